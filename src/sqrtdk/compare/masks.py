"""A mask taken apart: band, blocks, documents, padding, rows that stand apart, and the rest.

visible = (band or block) and document and padding and rest; a row that stands apart sees every key, none, or its own

A row i sees the keys j of its band, least <= i - j <= greatest. Blocks are stretches of positions that see one another
whatever the band says, as the tokens of an image in a causal model, or a prefix. Documents are stretches that do not
see beyond themselves. A row to which all that leaves no key is blind; many codes let it see itself, or everything, so
that its softmax is one. What two masks differ in is one of these parts or several, and a part of one can be put into
the other. Rows are the last L of the S positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

NOT_APART, OPEN, CLOSED = -1, -2, -3  # of a row: sees what the parts let it, every key, none
Bounds = tuple[int | None, int | None]  # least and greatest i - j
TAKEN_APART: Any = WeakTensorKeyDictionary()  # of a mask that is still held: its parts, by shape


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A mask taken apart; `b` is its batch size, 1 where all entries are alike.

    Attributes:
        rows: L.
        keys: S.
        least: least i - j of a visible key; None where no key is hidden for coming too late.
        greatest: greatest i - j; None where none is hidden for being too long ago.
        padding: (b, S), True at a token, False at a key that no row sees although band and document let it.
        apart: (b, L), what a row sees whatever the other parts say: `OPEN`, `CLOSED`, or the number of the one key that
            a blind row sees, its own; `NOT_APART` where the others say it.
        rest: broadcasts to (b, H, L, S), False where a key is hidden by none of the above; None where there is none.
        documents: (b, S), number of the document of each position; None where there are none.
        blocks: (b, S), number of the block of each position, 0 outside of blocks; None where there are none.
    """

    rows: int
    keys: int
    least: int | None
    greatest: int | None
    padding: Tensor
    apart: Tensor
    rest: Tensor | None
    documents: Tensor | None = None
    blocks: Tensor | None = None

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
    inside = torch.ones(rows, keys, dtype=torch.bool, device=device)
    inside = inside if least is None else inside.tril_(-least)
    return inside if greatest is None else inside.triu_(-greatest)


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
    """Take a mask apart, once while it is held; `recompose` gives it back exactly.

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
        return _everything(1, rows, keys, None)
    known = TAKEN_APART.setdefault(visible, {})
    if (batch, rows, keys) not in known:
        known[batch, rows, keys] = _taken_apart(visible, batch, rows, keys)
    found: Parts = known[batch, rows, keys]
    return found


def recompose(parts: Parts) -> Tensor | None:
    """The mask of the parts, (b, H or 1, L, S); None where every key is seen."""
    inside = within(parts)[:, None]
    if parts.rest is not None:
        inside = inside & parts.rest
    if bool((parts.apart != NOT_APART).any()):
        apart = parts.apart[:, None, :, None]
        own = apart == torch.arange(parts.keys, device=apart.device)
        inside = (inside & (apart == NOT_APART)) | (apart == OPEN) | own
    return None if bool(inside.all()) else inside


def pattern(parts: Parts) -> Tensor:
    """What band, blocks and documents let each row see, (b, L, S)."""
    inside = band(parts.rows, parts.keys, parts.least, parts.greatest, parts.padding.device)[None]
    if parts.blocks is not None:
        inside = inside | alike(parts.blocks, parts.rows)
    return inside if parts.documents is None else inside & alike(parts.documents, parts.rows)


def within(parts: Parts) -> Tensor:
    """What the pattern and padding let each row see, (b, L, S)."""
    return pattern(parts) & parts.padding[:, None]


def alike(numbers: Tensor, rows: int) -> Tensor:
    """True where row and key are in the same stretch, (b, L, S), from the number of each position's, (b, S)."""
    own = numbers[:, numbers.shape[1] - rows :, None]
    return (own == numbers[:, None]) & (own > 0)


def blind(parts: Parts) -> Tensor:
    """(b, L), True where band and padding leave a row no key."""
    return ~within(parts).any(-1)


def _everything(count: int, rows: int, keys: int, device: torch.device | None) -> Parts:
    tokens = torch.ones(count, keys, dtype=torch.bool, device=device)
    return Parts(rows, keys, None, None, tokens, torch.full((count, rows), NOT_APART, device=device), None)


def _taken_apart(visible: Tensor, batch: int, rows: int, keys: int) -> Parts:
    visible = visible.bool()[(None,) * (4 - visible.ndim)]
    visible = visible.expand(*visible.shape[:2], rows, keys)
    if visible.stride(1) == 0 or bool((visible == visible[:, :1]).all()):  # one mask of all heads
        visible = visible[:, :1]
    open_rows = visible.all(1).all(-1)
    if bool(open_rows.all()):
        return _everything(len(visible), rows, keys, visible.device)
    core = _left_out(visible, open_rows)
    least, _ = _bounds(core)
    if least is not None:  # a row so far down that its band has every key is not apart
        number = torch.arange(rows, device=visible.device)
        some = _left_out(core, (core.sum(-1) <= 1).all(1))  # a row that sees itself alone may be padding
        _, greatest = _kept(some, *_bounds(some), batch)
        open_rows = open_rows & ((number < keys - 1 + least) | (number > (rows if greatest is None else greatest)))
    alone = _alone(visible, open_rows, batch)
    core = _left_out(visible, open_rows | (alone >= 0))
    least, greatest = _kept(core, *_bounds(core), batch)
    if least is None and greatest is None:  # no band to stand apart from: an entry that sees everything has no mask
        open_rows = open_rows & ~visible.all(1).all(-1).all(-1, keepdim=True)
        core = _left_out(visible, open_rows | (alone >= 0))
    apart = torch.where(open_rows, OPEN, alone)
    parts = _parts(visible, core, apart, (least, greatest))
    if parts.rest is None or rows > keys:
        return parts
    return next((found for found in _in_stretches(visible, core, apart, batch) if found.rest is None), parts)


def _left_out(visible: Tensor, rows: Tensor) -> Tensor:
    """The mask with nothing visible in some rows."""
    return visible & ~rows[:, None, :, None] if bool(rows.any()) else visible


def _alone(visible: Tensor, open_rows: Tensor, batch: int) -> Tensor:
    """(b, L), the one key that a row sees where the rows that see more say that it is blind; else `NOT_APART`."""
    rows, keys = visible.shape[-2:]
    single = (visible.sum(-1) == 1).all(1)
    found = torch.full(single.shape, NOT_APART, device=visible.device)
    for corner in dict.fromkeys((0, keys - rows)):
        own = torch.arange(rows, device=visible.device) + corner
        there = (own >= 0) & (own < keys)
        sees_own = visible.all(1).gather(-1, own.clamp(0, keys - 1).expand(single.shape)[..., None])[..., 0]
        rows_alone = _blind_of(visible, open_rows, single & sees_own & there, batch, -corner)
        if int(rows_alone.sum()) > int((found >= 0).sum()):
            found = torch.where(rows_alone, own, NOT_APART)
    return found


def _blind_of(visible: Tensor, open_rows: Tensor, alone: Tensor, batch: int, apart: int) -> Tensor:
    """Which of the rows that see their own key alone, `apart` before them, are blind by what all others see."""
    while bool(alone.any()):
        core = _left_out(visible, open_rows | alone)
        if not bool(core.any()):  # no other row says so
            return torch.zeros_like(alone)
        least, greatest = _kept(core, *_bounds(core), batch)
        parts = _parts(visible, core, torch.where(open_rows, OPEN, NOT_APART), (least, greatest))
        blinded = alone & blind(parts)
        if least is not None and least <= apart:  # of an entry in which all are, the last row is a token
            blinded[:, -1] &= ~blinded.all(-1)
        if torch.equal(blinded, alone):
            break
        alone = blinded
    return alone


def _ends(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """First and last key of each row, (..., L); of a row without one S and -1."""
    keys, some, flags = pairs.shape[-1], pairs.any(-1), pairs.to(torch.uint8)
    first, last = flags.argmax(-1), keys - 1 - flags.flip(-1).argmax(-1)
    return torch.where(some, first, keys), torch.where(some, last, -1)


def _bounds(core: Tensor) -> Bounds:
    """Least and greatest i - j of a visible key; None where none is."""
    first, last = (ends.flatten(0, -2) for ends in _ends(core))
    number = torch.arange(core.shape[-2], device=core.device)
    some = last >= 0
    if not bool(some.any()):
        return None, None
    return int((number - last)[some].min()), int((number - first)[some].max())


def _kept(core: Tensor, least: int | None, greatest: int | None, batch: int, free: Tensor | None = None) -> Bounds:
    """The bounds that hide a key which the row would see, were it for rows that see nothing and keys never seen.

    `free`, (b, L, S), are pairs of which another part says whether they are seen.
    """
    if least is None or greatest is None:
        return None, None
    rows, keys = core.shape[-2:]
    meet = core.any(1).any(-1)[:, :, None] & core.any(1).any(-2)[:, None]
    low, high = _bounds(meet if free is None else meet & ~free)
    equal = batch == 1 or core.shape[0] == 1 or bool((core == core[:1]).all())
    aligned = equal and rows != keys and least in (0, rows - keys) and 1 - keys < least
    hides_late = aligned or (low is not None and low < least)
    return least if hides_late else None, greatest if high is not None and high > greatest else None


def _in_stretches(visible: Tensor, core: Tensor, apart: Tensor, batch: int) -> Iterator[Parts]:
    """The mask as documents, as blocks that the band of a causal mask does not hide, and as both."""
    rows, keys = core.shape[-2:]
    seen, corner = core.any(1), rows - keys
    live = seen.any(-2)
    live[:, : keys - rows] = True  # a key without a row may be a token of an earlier document
    live[:, keys - rows :] |= seen.any(-1)
    documents = linked(seen, live)
    other = ~alike(documents, rows)
    yield _parts(visible, core, apart, _kept(core, *_bounds(core), batch, other), documents)
    blocks = linked(seen & ~band(rows, keys, corner, None, core.device), torch.ones_like(live))
    single = torch.zeros_like(blocks).scatter_add_(1, blocks - 1, torch.ones_like(blocks)) == 1
    blocks = blocks.masked_fill(single.gather(1, blocks - 1), 0)
    own = alike(blocks, rows)
    _, greatest = _bounds(core & ~own[:, None])
    for free, parted in ((own, None), (own | other, documents)):
        _, early = _kept(core, corner, greatest, batch, free)
        yield _parts(visible, core, apart, (corner, early), parted, blocks)


def linked(pairs: Tensor, live: Tensor) -> Tensor:
    """Number of the stretch of each position, from 1, (b, S): a pair of row and key ties all between them together.

    Positions that are not live, padding, belong to the stretch before them.

    Example:
        >>> pairs = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]]).bool()
        >>> linked(pairs, pairs.any(1)).tolist()
        [[1, 1, 2, 2]]
    """
    batch, rows, keys = pairs.shape
    own = torch.arange(keys - rows, keys, device=pairs.device)
    first, last = _ends(pairs)
    first, last = first.minimum(own), last.maximum(own)
    ties = torch.zeros(batch, keys + 1, dtype=torch.long, device=pairs.device)
    ties.scatter_add_(1, first + 1, torch.ones_like(first)).scatter_add_(1, last + 1, -torch.ones_like(last))
    return ((ties.cumsum(1)[:, :keys] == 0) & live).cumsum(1).clamp(min=1)


def _parts(visible: Tensor, core: Tensor, apart: Tensor, bounds: Bounds, *stretches: Tensor | None) -> Parts:
    """Band, documents and blocks that are known, and what they leave to padding, rows apart and rest."""
    rows, keys = visible.shape[-2:]
    tokens = core.any(1).any(-2)
    parts = Parts(rows, keys, *bounds, tokens, apart, None, *stretches)
    inside = pattern(parts)
    padding = tokens | ~inside.any(-2)
    both = inside & padding[:, None]
    apart = torch.where(~visible.any(1).any(-1) & both.any(-1), CLOSED, apart)
    rest = visible | ~both[:, None] | (apart != NOT_APART)[:, None, :, None]
    return replace(parts, padding=padding, apart=apart, rest=None if bool(rest.all()) else rest)


# -- a part of one mask put into another -------------------------------------------------------------------------------
#
# A row that becomes blind is what the other side makes of blind rows; one that is blind no more sees what the parts let
# it. So the parts of another mask, put over one by one in any order, end with the other mask.


def with_pattern(parts: Parts, other: Parts, **changes: Any) -> Parts:
    """The parts with another band, blocks or documents; keys that come in or go out are as the other mask has them."""
    moved = replace(parts, **changes)
    changed = (pattern(parts) ^ pattern(moved))[:, None]
    return _settled(parts, moved, other, torch.where(blind(parts), NOT_APART, parts.apart), changed)


def with_padding(parts: Parts, other: Parts) -> Parts:
    """The parts with the padding of another mask, and with the rows that stand apart there."""
    moved = replace(parts, padding=other.padding)
    changed = (parts.padding ^ other.padding)[:, None, None]
    return _settled(parts, moved, other, torch.where(blind(other), NOT_APART, other.apart), changed)


def rows_differ(a: Parts, b: Parts) -> Tensor:
    """(b, L), rows that stand apart otherwise, where that does not follow from a band or a padding that differs."""
    return (a.apart != b.apart) & (blind(a) == blind(b))


def _settled(parts: Parts, moved: Parts, other: Parts, apart: Tensor, changed: Tensor) -> Parts:
    """The moved parts, with their rows and their rest.

    Args:
        parts: before.
        moved: with another band or padding.
        other: the other mask.
        apart: of rows that are not blind now.
        changed: broadcasts to (b, H, L, S), keys that came in or went out.
    """
    blinded = blind(moved)
    apart = torch.where(blinded, _of_blind(other, parts) if bool(blinded.any()) else NOT_APART, apart)
    rest, others = parts.rest, other.rest
    if rest is not None or others is not None:
        changed = changed | ((parts.apart != NOT_APART) & (apart == NOT_APART))[:, None, :, None]
        true = torch.ones((), dtype=torch.bool, device=changed.device)
        rest = torch.where(changed, true if others is None else others, true if rest is None else rest)
    return replace(moved, apart=apart, rest=rest)


def _of_blind(other: Parts, parts: Parts) -> Tensor:
    """(b, L), what the other makes of its blind rows; by the same rule what those are that are blind here alone.

    The rule is what most blind rows of the other are, else of these parts, each in its place.
    """
    blinded = blind(other)
    rule = torch.full((other.rows,), NOT_APART, device=other.apart.device)
    for flags, apart in ((blinded, other.apart), (blind(parts), parts.apart)):
        if not bool(flags.any()):
            continue
        flags = flags.expand(apart.shape)
        codes, own = apart[flags], torch.arange(other.rows, device=apart.device)
        alone = codes >= 0
        if 2 * int(alone.sum()) > codes.numel():
            own = own + (codes - flags.nonzero()[:, 1])[alone].mode().values
            rule = torch.where((own >= 0) & (own < other.keys), own, NOT_APART)
        elif 2 * int((codes == OPEN).sum()) > codes.numel():
            rule = torch.full_like(rule, OPEN)
        break
    return torch.where(blinded, other.apart, rule)
