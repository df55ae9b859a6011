"""Takes a mask apart into band, blocks, documents, padding, special rows, and the rest.

The band comes first, read from the rows that see neither every key nor their own key alone. Documents and blocks are
tried only if the band and padding leave a rest. `parts` says what each part means, and puts masks together again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sqrtdk.masks.band import Band, band_around, band_mask, first_and_last
from sqrtdk.masks.parts import CLOSED, NOT_APART, OPEN, Parts, blind, pattern_mask, same_stretch

_PARTS_OF: Any = WeakTensorKeyDictionary()  # parts by shape, for every mask that is still referenced


def common_mask_shape(*masks: Tensor | None) -> tuple[int, int, int]:
    """Return the smallest (B, L, S) that all the masks broadcast to.

    Example:
        >>> common_mask_shape(torch.ones(1, 1, 5, 5), torch.ones(2, 1, 1, 5), None)
        (2, 5, 5)
    """
    shapes = [(1, 1, 1, 1, *mask.shape)[-4:] for mask in masks if mask is not None]
    batch, _, rows, keys = (max(sizes) for sizes in zip(*shapes, strict=True)) if shapes else (1, 1, 1, 1)
    return batch, rows, keys


def decompose(visible: Tensor | None, batch: int, rows: int, keys: int) -> Parts:
    """Return the parts of a mask, computed once while the mask is referenced; `recompose` is the exact inverse.

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
    known = _PARTS_OF.setdefault(visible, {})
    if (batch, rows, keys) not in known:
        known[batch, rows, keys] = _taken_apart(visible, batch, rows, keys)
    parts: Parts = known[batch, rows, keys]
    return parts


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
    around = band_around(core)
    # Bounds are read without rows that see every key: `mask | padding_row` would hide any band. A row to which the
    # band itself shows every key goes back in; it is not special.
    if around is not None:
        number = torch.arange(rows, device=visible.device)
        some = _left_out(core, (core.sum(-1) <= 1).all(1))  # rows that see only themselves may be padding: `mask | eye`
        far = _bounds_that_hide(some, batch).greatest
        open_rows = open_rows & ((number < keys - 1 + around[0]) | (number > (rows if far is None else far)))
    alone = _only_key(visible, open_rows, batch)
    core = _left_out(visible, open_rows | (alone >= 0))
    band = _bounds_that_hide(core, batch)
    if band == Band():  # an entry that sees everything has no mask: its rows are not special
        open_rows = open_rows & ~visible.all(1).all(-1).all(-1, keepdim=True)
        core = _left_out(visible, open_rows | (alone >= 0))
    apart = torch.where(open_rows, OPEN, alone)
    parts = _parts_around(visible, core, apart, band)
    if parts.rest is None or rows > keys:
        return parts
    # Documents and blocks are tried only if a rest is left: each try splits the mask again.
    return next((other for other in _in_stretches(visible, core, apart, batch) if other.rest is None), parts)


def _left_out(visible: Tensor, rows: Tensor) -> Tensor:
    """Return the mask with nothing visible in the given rows."""
    return visible & ~rows[:, None, :, None] if bool(rows.any()) else visible


def _only_key(visible: Tensor, open_rows: Tensor, batch: int) -> Tensor:
    """Return the one key that a blind row sees, (b, L), else `NOT_APART`; rows that see more decide who is blind.

    Both diagonals are tried, since code may write `eye(L, S)` or its lower right form. The one with more rows counts.
    """
    rows, keys = visible.shape[-2:]
    single = (visible.sum(-1) == 1).all(1)
    only = torch.full(single.shape, NOT_APART, device=visible.device)
    for corner in dict.fromkeys((0, keys - rows)):
        own = torch.arange(rows, device=visible.device) + corner
        there = (own >= 0) & (own < keys)
        sees_own = visible.all(1).gather(-1, own.clamp(0, keys - 1).expand(single.shape)[..., None])[..., 0]
        rows_alone = _blind_of(visible, open_rows, single & sees_own & there, batch, -corner)
        if int(rows_alone.sum()) > int((only >= 0).sum()):
            only = torch.where(rows_alone, own, NOT_APART)
    return only


def _blind_of(visible: Tensor, open_rows: Tensor, alone: Tensor, batch: int, apart: int) -> Tensor:
    """Return the rows that see only their own key, at i - j = `apart`, and are blind by the other rows' parts."""
    while bool(alone.any()):
        core = _left_out(visible, open_rows | alone)
        if not bool(core.any()):  # no other row is evidence
            return torch.zeros_like(alone)
        band = _bounds_that_hide(core, batch)
        parts = _parts_around(visible, core, torch.where(open_rows, OPEN, NOT_APART), band)
        blinded = alone & blind(parts)
        # in an entry where all rows are blind, the last row is a token
        if band.least is not None and band.least <= apart:
            blinded[:, -1] &= ~blinded.all(-1)
        if torch.equal(blinded, alone):
            break
        alone = blinded
    return alone


def _bounds_that_hide(
    core: Tensor, batch: int, around: tuple[int, int] | None = None, free: Tensor | None = None
) -> Band:
    """Return a band without the bounds that hide no key.

    Rows that see nothing and keys that are never seen don't count as hidden.

    Args:
        core: (b, H, L, S), what rows see that are not special.
        batch: B.
        around: the bounds; None takes those around all visible keys of `core`.
        free: (b, L, S), pairs whose visibility another part decides.
    """
    around = around or band_around(core)
    if around is None:
        return Band()
    (least, greatest), (rows, keys) = around, core.shape[-2:]
    meet = core.any(1).any(-1)[:, :, None] & core.any(1).any(-2)[:, None]
    reach = band_around(meet if free is None else meet & ~free)
    equal = batch == 1 or core.shape[0] == 1 or bool((core == core[:1]).all())
    aligned = equal and rows != keys and least in (0, rows - keys) and 1 - keys < least
    # With L != S, a causal bound at a corner is kept even if it hides only keys that no row sees.
    hides_late = aligned or (reach is not None and reach[0] < least)
    return Band(least if hides_late else None, greatest if reach is not None and reach[1] > greatest else None)


def _in_stretches(visible: Tensor, core: Tensor, apart: Tensor, batch: int) -> Iterator[Parts]:
    """Yield the mask as documents, as blocks that a causal band does not hide, and as both."""
    rows, keys = core.shape[-2:]
    by_any, corner = core.any(1), rows - keys
    live = by_any.any(-2)
    live[:, : keys - rows] = True  # a key without a row may be a token of an earlier document: a decoder with a cache
    live[:, keys - rows :] |= by_any.any(-1)
    documents = linked(by_any, live)
    other = ~same_stretch(documents, rows)
    yield _parts_around(visible, core, apart, _bounds_that_hide(core, batch, free=other), documents)
    blocks = linked(by_any & ~band_mask(rows, keys, corner, None, core.device), torch.ones_like(live))
    single = torch.zeros_like(blocks).scatter_add_(1, blocks - 1, torch.ones_like(blocks)) == 1
    # A block of one position is not a block: the causal band shows a row its own key anyway.
    blocks = blocks.masked_fill(single.gather(1, blocks - 1), 0)
    own = same_stretch(blocks, rows)
    outside = band_around(core & ~own[:, None])
    for free, parted in ((own, None), (own | other, documents)):
        far = None if outside is None else _bounds_that_hide(core, batch, (corner, outside[1]), free).greatest
        yield _parts_around(visible, core, apart, Band(corner, far), parted, blocks)


def linked(pairs: Tensor, live: Tensor) -> Tensor:
    """Return the stretch number of each position, from 1, (b, S): a visible pair ties all positions between the two.

    Positions that are not live, such as padding, belong to the stretch before them.

    Example:
        >>> pairs = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]]).bool()
        >>> linked(pairs, pairs.any(1)).tolist()
        [[1, 1, 2, 2]]
    """
    batch, rows, keys = pairs.shape
    own = torch.arange(keys - rows, keys, device=pairs.device)
    first, last = first_and_last(pairs)
    first, last = first.minimum(own), last.maximum(own)
    # Difference array: +1 after the first position of a pair, -1 after its last; a sum of 0 starts a new stretch.
    ties = torch.zeros(batch, keys + 1, dtype=torch.long, device=pairs.device)
    ties.scatter_add_(1, first + 1, torch.ones_like(first)).scatter_add_(1, last + 1, -torch.ones_like(last))
    return ((ties.cumsum(1)[:, :keys] == 0) & live).cumsum(1).clamp(min=1)


def _parts_around(visible: Tensor, core: Tensor, apart: Tensor, band: Band, *stretches: Tensor | None) -> Parts:
    """Return the parts for known band, documents and blocks; padding, special rows and rest explain what is left."""
    rows, keys = visible.shape[-2:]
    tokens = core.any(1).any(-2)
    parts = Parts(rows, keys, *band, tokens, apart, None, *stretches)
    inside = pattern_mask(parts)
    padding = tokens | ~inside.any(-2)
    both = inside & padding[:, None]
    apart = torch.where(~visible.any(1).any(-1) & both.any(-1), CLOSED, apart)
    rest = visible | ~both[:, None] | (apart != NOT_APART)[:, None, :, None]
    return replace(parts, padding=padding, apart=apart, rest=None if bool(rest.all()) else rest)
