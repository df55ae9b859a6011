"""Splits a mask into parts: band, blocks, documents, padding, special rows, and the rest.

visible = (band or block) and document and padding and rest; a special row sees every key, no key, or its own key only

Row i sees the keys j of its band, least <= i - j <= greatest. Blocks are stretches of positions that see one another
whatever the band says: the tokens of an image in a causal model, or a prefix. Documents are stretches that do not see
beyond themselves. A row to which these parts leave no key is blind. Many codes let such a row see itself, or every
key, so that its softmax is not NaN. Two masks differ in one or more of these parts, and a part of one can be put into
the other. Rows are the last L of the S positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

NOT_APART, OPEN, CLOSED = -1, -2, -3  # codes in `apart`: the row sees what the other parts allow, every key, no key
Bounds = tuple[int | None, int | None]  # least and greatest i - j
TAKEN_APART: Any = WeakTensorKeyDictionary()  # parts by shape, for every mask that is still referenced


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of one mask; `b` is its batch size, 1 if all entries are equal.

    Attributes:
        rows: L.
        keys: S.
        least: least i - j of a visible key; None if no key is hidden for coming too late.
        greatest: greatest i - j; None if no key is hidden for lying too far back.
        padding: (b, S), True at a token, False at a key that no row sees although band and document allow it.
        apart: (b, L), what a special row sees whatever the other parts say: `OPEN`, `CLOSED`, or the number of the one
            key that a blind row sees, its own. `NOT_APART` if the other parts decide.
        rest: broadcasts to (b, H, L, S), False where a key is hidden by none of the above; None if there is no rest.
        documents: (b, S), number of each position's document; None without documents.
        blocks: (b, S), number of each position's block, 0 outside blocks; None without blocks.
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
        """Whether the band is a window that reaches equally far ahead and back."""
        return self.least is not None and self.least < 0 and self.greatest == -self.least


def distances(rows: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Returns i - j of row i and key j, (L, S)."""
    return torch.arange(rows, device=device)[:, None] - torch.arange(keys, device=device)


def band_mask(
    rows: int, keys: int, least: int | None, greatest: int | None, device: torch.device | None = None
) -> Tensor:
    """Returns True where least <= i - j <= greatest, (L, S).

    Example:
        >>> band_mask(2, 3, 0, None).int().tolist()
        [[1, 0, 0], [1, 1, 0]]
    """
    inside = torch.ones(rows, keys, dtype=torch.bool, device=device)
    inside = inside if least is None else inside.tril_(-least)
    return inside if greatest is None else inside.triu_(-greatest)


def common_mask_shape(*masks: Tensor | None) -> tuple[int, int, int]:
    """Returns the smallest (B, L, S) that all the masks broadcast to.

    Example:
        >>> common_mask_shape(torch.ones(1, 1, 5, 5), torch.ones(2, 1, 1, 5), None)
        (2, 5, 5)
    """
    shapes = [(1, 1, 1, 1, *mask.shape)[-4:] for mask in masks if mask is not None]
    batch, _, rows, keys = (max(sizes) for sizes in zip(*shapes, strict=True)) if shapes else (1, 1, 1, 1)
    return batch, rows, keys


def decompose(visible: Tensor | None, batch: int, rows: int, keys: int) -> Parts:
    """Returns the parts of a mask, computed once while the mask is referenced; `recompose` is the exact inverse.

    Args:
        visible: True where the row sees the key, broadcasts to (B, Hq, L, S); None if every key is visible.
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
    """Returns the mask that the parts make, (b, H or 1, L, S); None if every key is visible."""
    inside = keys_within(parts)[:, None]
    if parts.rest is not None:
        inside = inside & parts.rest
    if bool((parts.apart != NOT_APART).any()):
        apart = parts.apart[:, None, :, None]
        own = apart == torch.arange(parts.keys, device=apart.device)
        inside = (inside & (apart == NOT_APART)) | (apart == OPEN) | own
    return None if bool(inside.all()) else inside


def pattern_mask(parts: Parts) -> Tensor:
    """Returns the keys that band, blocks and documents allow each row, (b, L, S)."""
    inside = band_mask(parts.rows, parts.keys, parts.least, parts.greatest, parts.padding.device)[None]
    if parts.blocks is not None:
        inside = inside | same_stretch(parts.blocks, parts.rows)
    return inside if parts.documents is None else inside & same_stretch(parts.documents, parts.rows)


def keys_within(parts: Parts) -> Tensor:
    """Returns the keys that pattern and padding allow each row, (b, L, S)."""
    return pattern_mask(parts) & parts.padding[:, None]


def same_stretch(numbers: Tensor, rows: int) -> Tensor:
    """Returns True where row and key share a stretch, (b, L, S), from the stretch number of each position, (b, S)."""
    own = numbers[:, numbers.shape[1] - rows :, None]
    return (own == numbers[:, None]) & (own > 0)


def blind(parts: Parts) -> Tensor:
    """Returns True at rows to which band and padding leave no key, (b, L)."""
    return ~keys_within(parts).any(-1)


def _everything(count: int, rows: int, keys: int, device: torch.device | None) -> Parts:
    tokens = torch.ones(count, keys, dtype=torch.bool, device=device)
    return Parts(rows, keys, None, None, tokens, torch.full((count, rows), NOT_APART, device=device), None)


def _taken_apart(visible: Tensor, batch: int, rows: int, keys: int) -> Parts:
    visible = visible.bool()[(None,) * (4 - visible.ndim)]
    visible = visible.expand(*visible.shape[:2], rows, keys)
    if visible.stride(1) == 0 or bool((visible == visible[:, :1]).all()):  # all heads share a mask
        visible = visible[:, :1]
    open_rows = visible.all(1).all(-1)
    if bool(open_rows.all()):
        return _everything(len(visible), rows, keys, visible.device)
    core = _left_out(visible, open_rows)
    least, _ = _bounds(core)
    # Bounds are read without rows that see every key: `mask | padding_row` would hide any band. A row to which the
    # band itself shows every key goes back in; it is not special.
    if least is not None:
        number = torch.arange(rows, device=visible.device)
        some = _left_out(core, (core.sum(-1) <= 1).all(1))  # rows that see only themselves may be padding: `mask | eye`
        _, greatest = _bounds_that_hide(some, *_bounds(some), batch)
        open_rows = open_rows & ((number < keys - 1 + least) | (number > (rows if greatest is None else greatest)))
    alone = _only_key(visible, open_rows, batch)
    core = _left_out(visible, open_rows | (alone >= 0))
    least, greatest = _bounds_that_hide(core, *_bounds(core), batch)
    if least is None and greatest is None:  # an entry that sees everything has no mask: its rows are not special
        open_rows = open_rows & ~visible.all(1).all(-1).all(-1, keepdim=True)
        core = _left_out(visible, open_rows | (alone >= 0))
    apart = torch.where(open_rows, OPEN, alone)
    parts = _parts_around(visible, core, apart, (least, greatest))
    if parts.rest is None or rows > keys:
        return parts
    # Documents and blocks are tried only if a rest is left: each try splits the mask again.
    return next((found for found in _in_stretches(visible, core, apart, batch) if found.rest is None), parts)


def _left_out(visible: Tensor, rows: Tensor) -> Tensor:
    """Returns the mask with nothing visible in the given rows."""
    return visible & ~rows[:, None, :, None] if bool(rows.any()) else visible


def _only_key(visible: Tensor, open_rows: Tensor, batch: int) -> Tensor:
    """Returns the one key that a blind row sees, (b, L), else `NOT_APART`; rows that see more decide who is blind.

    Both diagonals are tried, since code may write `eye(L, S)` or its lower right form. The one with more rows counts.
    """
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
    """Returns the rows that see only their own key, at i - j = `apart`, and are blind by the other rows' parts."""
    while bool(alone.any()):
        core = _left_out(visible, open_rows | alone)
        if not bool(core.any()):  # no other row is evidence
            return torch.zeros_like(alone)
        least, greatest = _bounds_that_hide(core, *_bounds(core), batch)
        parts = _parts_around(visible, core, torch.where(open_rows, OPEN, NOT_APART), (least, greatest))
        blinded = alone & blind(parts)
        if least is not None and least <= apart:  # in an entry where all rows are blind, the last row is a token
            blinded[:, -1] &= ~blinded.all(-1)
        if torch.equal(blinded, alone):
            break
        alone = blinded
    return alone


def _ends(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first and last key of each row, (..., L); S and -1 for a row without keys."""
    keys, some, flags = pairs.shape[-1], pairs.any(-1), pairs.to(torch.uint8)
    first, last = flags.argmax(-1), keys - 1 - flags.flip(-1).argmax(-1)
    return torch.where(some, first, keys), torch.where(some, last, -1)


def _bounds(core: Tensor) -> Bounds:
    """Returns the least and greatest i - j of a visible key; None if no key is visible."""
    first, last = (ends.flatten(0, -2) for ends in _ends(core))
    number = torch.arange(core.shape[-2], device=core.device)
    some = last >= 0
    if not bool(some.any()):
        return None, None
    return int((number - last)[some].min()), int((number - first)[some].max())


def _bounds_that_hide(
    core: Tensor, least: int | None, greatest: int | None, batch: int, free: Tensor | None = None
) -> Bounds:
    """Returns the bounds that hide at least one key; None for a bound that hides nothing.

    Rows that see nothing and keys that are never seen don't count as hidden. `free`, (b, L, S), are pairs whose
    visibility another part decides.
    """
    if least is None or greatest is None:
        return None, None
    rows, keys = core.shape[-2:]
    meet = core.any(1).any(-1)[:, :, None] & core.any(1).any(-2)[:, None]
    low, high = _bounds(meet if free is None else meet & ~free)
    equal = batch == 1 or core.shape[0] == 1 or bool((core == core[:1]).all())
    aligned = equal and rows != keys and least in (0, rows - keys) and 1 - keys < least
    # With L != S, a causal bound at a corner is kept even if it hides only keys that no row sees.
    hides_late = aligned or (low is not None and low < least)
    return least if hides_late else None, greatest if high is not None and high > greatest else None


def _in_stretches(visible: Tensor, core: Tensor, apart: Tensor, batch: int) -> Iterator[Parts]:
    """Yields the mask as documents, as blocks that a causal band does not hide, and as both."""
    rows, keys = core.shape[-2:]
    seen, corner = core.any(1), rows - keys
    live = seen.any(-2)
    live[:, : keys - rows] = True  # a key without a row may be a token of an earlier document: a decoder with a cache
    live[:, keys - rows :] |= seen.any(-1)
    documents = linked(seen, live)
    other = ~same_stretch(documents, rows)
    yield _parts_around(visible, core, apart, _bounds_that_hide(core, *_bounds(core), batch, other), documents)
    blocks = linked(seen & ~band_mask(rows, keys, corner, None, core.device), torch.ones_like(live))
    single = torch.zeros_like(blocks).scatter_add_(1, blocks - 1, torch.ones_like(blocks)) == 1
    # A block of one position is no block: the causal band shows a row its own key anyway.
    blocks = blocks.masked_fill(single.gather(1, blocks - 1), 0)
    own = same_stretch(blocks, rows)
    _, greatest = _bounds(core & ~own[:, None])
    for free, parted in ((own, None), (own | other, documents)):
        _, early = _bounds_that_hide(core, corner, greatest, batch, free)
        yield _parts_around(visible, core, apart, (corner, early), parted, blocks)


def linked(pairs: Tensor, live: Tensor) -> Tensor:
    """Returns the stretch number of each position, from 1, (b, S): a visible pair ties all positions between the two.

    Positions that are not live, such as padding, belong to the stretch before them.

    Example:
        >>> pairs = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]]).bool()
        >>> linked(pairs, pairs.any(1)).tolist()
        [[1, 1, 2, 2]]
    """
    batch, rows, keys = pairs.shape
    own = torch.arange(keys - rows, keys, device=pairs.device)
    first, last = _ends(pairs)
    first, last = first.minimum(own), last.maximum(own)
    # Difference array: +1 after the first position of a pair, -1 after its last; a sum of 0 starts a new stretch.
    ties = torch.zeros(batch, keys + 1, dtype=torch.long, device=pairs.device)
    ties.scatter_add_(1, first + 1, torch.ones_like(first)).scatter_add_(1, last + 1, -torch.ones_like(last))
    return ((ties.cumsum(1)[:, :keys] == 0) & live).cumsum(1).clamp(min=1)


def _parts_around(visible: Tensor, core: Tensor, apart: Tensor, bounds: Bounds, *stretches: Tensor | None) -> Parts:
    """Returns the parts for known band, documents and blocks; padding, special rows and rest explain what is left."""
    rows, keys = visible.shape[-2:]
    tokens = core.any(1).any(-2)
    parts = Parts(rows, keys, *bounds, tokens, apart, None, *stretches)
    inside = pattern_mask(parts)
    padding = tokens | ~inside.any(-2)
    both = inside & padding[:, None]
    apart = torch.where(~visible.any(1).any(-1) & both.any(-1), CLOSED, apart)
    rest = visible | ~both[:, None] | (apart != NOT_APART)[:, None, :, None]
    return replace(parts, padding=padding, apart=apart, rest=None if bool(rest.all()) else rest)


# -- a part of one mask put into another -------------------------------------------------------------------------------
#
# A row that becomes blind sees what the other side shows to blind rows; a row that is no longer blind sees what the
# parts allow. So putting in the parts of another mask one by one, in any order, ends with the other mask.


def with_pattern(parts: Parts, other: Parts, **changes: Any) -> Parts:
    """Returns the parts with another band, blocks or documents; keys that appear or vanish follow the other mask."""
    moved = replace(parts, **changes)
    changed = (pattern_mask(parts) ^ pattern_mask(moved))[:, None]
    return _settled(parts, moved, other, torch.where(blind(parts), NOT_APART, parts.apart), changed)


def with_padding(parts: Parts, other: Parts) -> Parts:
    """Returns the parts with the padding and the special rows of another mask."""
    moved = replace(parts, padding=other.padding)
    changed = (parts.padding ^ other.padding)[:, None, None]
    return _settled(parts, moved, other, torch.where(blind(other), NOT_APART, other.apart), changed)


def rows_differ(a: Parts, b: Parts) -> Tensor:
    """Returns special rows that differ, (b, L), unless a different band or padding explains the difference."""
    return (a.apart != b.apart) & (blind(a) == blind(b))


def _settled(parts: Parts, moved: Parts, other: Parts, apart: Tensor, changed: Tensor) -> Parts:
    """Returns the moved parts with their special rows and their rest.

    Args:
        parts: parts before the move.
        moved: parts with another band or padding.
        other: parts of the other mask.
        apart: codes of rows that are not blind after the move.
        changed: broadcasts to (b, H, L, S), True at keys that appeared or vanished.
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
    """Returns what the other mask shows to its blind rows, (b, L), extended to rows that are blind only here.

    The extension follows what most blind rows of the other mask do; if it has none, what most of these parts' do.
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
