"""A mask taken apart: the band that every row sees, the tokens that are padding, rows that stand apart, and the rest.

visible = (band and padding and rest, or an open row) and not a closed row

A row i sees the keys j of its band, least <= i - j <= greatest. What two masks differ in is one of these parts or
several, and a part of one can be put into the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A mask taken apart; `b` is its batch size, 1 where all entries are alike.

    Attributes:
        rows: L.
        keys: S.
        least: least i - j of a visible key; None where no key is hidden for coming too late.
        greatest: greatest i - j; None where none is hidden for being too long ago.
        padding: (b, S), True at a token, False at a key that no row sees although the band lets it.
        open_rows: (b, L), True where the row sees every key, whatever the other parts say.
        closed_rows: (b, L), True where it sees none, whatever the other parts say.
        rest: broadcasts to (b, H, L, S), False where a key is hidden by none of the above; None where there is none.
    """

    rows: int
    keys: int
    least: int | None
    greatest: int | None
    padding: Tensor
    open_rows: Tensor
    closed_rows: Tensor
    rest: Tensor | None

    @property
    def banded(self) -> bool:
        """Whether a key is hidden for its distance."""
        return self.least is not None or self.greatest is not None

    @property
    def symmetric(self) -> bool:
        """Whether the band is a window that reaches as far ahead as back."""
        return self.least is not None and self.least < 0 and self.greatest == -self.least


def distances(rows: int, keys: int, device: torch.device | None = None) -> Tensor:
    """The i - j of row i and key j, (L, S)."""
    return torch.arange(rows, device=device)[:, None] - torch.arange(keys, device=device)


def band(rows: int, keys: int, least: int | None, greatest: int | None, device: torch.device | None = None) -> Tensor:
    """True where least <= i - j <= greatest, (L, S).

    Example:
        >>> band(2, 3, 0, None).int().tolist()
        [[1, 0, 0], [1, 1, 0]]
    """
    apart = distances(rows, keys, device)
    inside = torch.ones_like(apart, dtype=torch.bool)
    if least is not None:
        inside &= apart >= least
    if greatest is not None:
        inside &= apart <= greatest
    return inside


def shape_of(*masks: Tensor | None) -> tuple[int, int, int]:
    """The least (B, L, S) that all the masks broadcast to.

    Example:
        >>> shape_of(torch.ones(1, 1, 5, 5), torch.ones(2, 1, 1, 5), None)
        (2, 5, 5)
    """
    shapes = [(1, 1, 1, 1, *mask.shape)[-4:] for mask in masks if mask is not None]
    batch, _, rows, keys = (max(sizes) for sizes in zip(*shapes, strict=True)) if shapes else (1, 1, 1, 1)
    return batch, rows, keys


def decompose(visible: Tensor | None, batch: int, rows: int, keys: int) -> Parts:
    """Take a mask apart; `recompose` gives it back exactly.

    Args:
        visible: True where the row sees the key, broadcasts to (B, Hq, L, S); None where every key is seen.
        batch: B.
        rows: L.
        keys: S.

    Example:
        >>> parts = decompose(torch.ones(4, 4, dtype=torch.bool).tril().triu(-1), 1, 4, 4)
        >>> parts.least, parts.greatest, parts.rest
        (0, 1, None)
    """
    if visible is None:
        visible = torch.ones(1, 1, rows, keys, dtype=torch.bool)
    visible = visible.bool()[(None,) * (4 - visible.ndim)]
    visible = visible.expand(*visible.shape[:2], rows, keys)
    open_rows = visible.all(1).all(-1)
    if bool(open_rows.all()):
        return _everything(rows, keys, visible)
    least, _ = _bounds(visible & ~open_rows[:, None, :, None])
    if least is not None:  # a row so far down that its band has every key is not apart
        open_rows = open_rows & (torch.arange(rows, device=visible.device) < keys - 1 + least)
    core = visible & ~open_rows[:, None, :, None]
    least, greatest = _kept(core, *_bounds(core), batch)
    if least is None and greatest is None:  # no band to stand apart from: an entry that sees everything has no mask
        open_rows = open_rows & ~visible.all(1).all(-1).all(-1, keepdim=True)
        core = visible & ~open_rows[:, None, :, None]
    return _parts(visible, core, open_rows, least, greatest)


def recompose(parts: Parts) -> Tensor | None:
    """The mask of the parts, (b, H or 1, L, S); None where every key is seen."""
    inside = _inside(parts)[:, None]
    if parts.rest is not None:
        inside = inside & parts.rest
    inside = (inside | parts.open_rows[:, None, :, None]) & ~parts.closed_rows[:, None, :, None]
    return None if bool(inside.all()) else inside


def with_band(parts: Parts, least: int | None, greatest: int | None, other: Parts) -> Parts:
    """The parts with another band; keys that come in or go out are else as the other mask has them."""
    old = band(parts.rows, parts.keys, parts.least, parts.greatest, parts.padding.device)
    new = band(parts.rows, parts.keys, least, greatest, parts.padding.device)
    moved = replace(parts, least=least, greatest=greatest, rest=_mixed(parts.rest, other.rest, old ^ new))
    empty = ~_inside(moved).any(-1)  # such a row is what the other makes of it
    return replace(
        moved,
        open_rows=torch.where(empty, other.open_rows, parts.open_rows),
        closed_rows=torch.where(empty, other.closed_rows, parts.closed_rows),
    )


def with_padding(parts: Parts, other: Parts) -> Parts:
    """The parts with the padding of another mask, and with what it makes of the rows of padding."""
    changed = (parts.padding ^ other.padding)[:, None, None]
    return replace(
        parts,
        padding=other.padding,
        open_rows=other.open_rows,
        closed_rows=other.closed_rows,
        rest=_mixed(parts.rest, other.rest, changed),
    )


def _everything(rows: int, keys: int, visible: Tensor) -> Parts:
    count, device = visible.shape[0], visible.device
    tokens = torch.ones(count, keys, dtype=torch.bool, device=device)
    none = torch.zeros(count, rows, dtype=torch.bool, device=device)
    return Parts(rows, keys, None, None, tokens, none, none, None)


def _bounds(core: Tensor) -> tuple[int | None, int | None]:
    """Least and greatest i - j of a visible key; None where none is."""
    seen = core.any(0).any(0)
    apart = distances(seen.shape[0], seen.shape[1], seen.device)[seen]
    return (int(apart.min()), int(apart.max())) if apart.numel() else (None, None)


def _kept(core: Tensor, least: int | None, greatest: int | None, batch: int) -> tuple[int | None, int | None]:
    """The bounds that hide a key which the row would see, were it for rows that see nothing and keys never seen."""
    if least is None or greatest is None:
        return None, None
    rows, keys = core.shape[-2:]
    row = core.any(1).any(-1).to(torch.float32)  # (b, L), such that a product tells whether any entry has both
    key = core.any(1).any(-2).to(torch.float32)  # (b, S)
    meet = (row.mT @ key) > 0
    apart = distances(rows, keys, core.device)
    alike = batch == 1 or core.shape[0] == 1 or bool((core == core[:1]).all())
    aligned = alike and rows != keys and least in (0, rows - keys) and bool((apart < least).any())
    hides_late = bool((meet & (apart < least)).any()) or aligned
    hides_early = bool((meet & (apart > greatest)).any())
    return least if hides_late else None, greatest if hides_early else None


def _parts(visible: Tensor, core: Tensor, open_rows: Tensor, least: int | None, greatest: int | None) -> Parts:
    rows, keys = visible.shape[-2:]
    inside = band(rows, keys, least, greatest, visible.device)
    padding = core.any(1).any(-2) | ~inside.any(0)
    both = inside & padding[:, None]
    closed_rows = ~visible.any(1).any(-1) & both.any(-1)
    apart = (open_rows | closed_rows)[:, None, :, None]
    rest = visible | ~both[:, None] | apart
    return Parts(rows, keys, least, greatest, padding, open_rows, closed_rows, None if bool(rest.all()) else rest)


def _inside(parts: Parts) -> Tensor:
    """Band and padding, (b, L, S)."""
    inside = band(parts.rows, parts.keys, parts.least, parts.greatest, parts.padding.device)
    return inside & parts.padding[:, None]


def _mixed(rest: Tensor | None, other: Tensor | None, changed: Tensor) -> Tensor | None:
    """The rest, and the other's where something was changed."""
    if rest is None and other is None:
        return None
    one = torch.ones((), dtype=torch.bool, device=changed.device)
    return torch.where(changed, one if other is None else other, one if rest is None else rest)
