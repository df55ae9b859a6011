"""The pass over tiles: what both sources of logits (a tensor, a query and a key) share.

A tile is (batch, heads, rows, keys). Two buffers of one tile each are reused for the whole call; every operation
writes into one of them. Visibility travels as a float mask of 0 and 1, because on a CPU torch's float operations are
vectorised and its bool fills are not (0.03 against 0.3 ms for 400k elements).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.stats._partial import RowStats

TILE = 2**18 + 2**17  # elements; two float32 buffers of it are 3 MiB, and calls of 12 heads divide well
FLOOR = {torch.float32: -85.0, torch.float64: -700.0}  # of z - m; e^floor is a normal number
FLUSH = {torch.float32: 1e-30, torch.float64: 1e-290}  # a total weight below this, relative to the peak's, is 0
HIDDEN = -3e4  # an additive mask at or below hides its key: half of float16's lowest, so any dtype's fill is known


@dataclass(frozen=True, slots=True)
class Block:
    """Half-open ranges of one tile; heads are query heads, whole groups of them."""

    b0: int
    b1: int
    h0: int
    h1: int
    r0: int
    r1: int


@dataclass(frozen=True, slots=True)
class Masks:
    """What hides keys: every tensor is 4-D with sizes 1 or full, (B, H, L, S)."""

    visible: Tensor | None = None  # bool
    float_mask: Tensor | None = None  # additive
    is_causal: bool = False  # upper-left

    def window(
        self, block: Block, keys: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor | None, int, int]:
        """(mask, start, stop): no row sees a key from `stop` on, every row sees all before `start`.

        `mask` is float 0 or 1 for the keys in between; None where no key of the range is hidden from any row.
        """
        stop = min(keys, block.r1) if self.is_causal else keys
        height = block.r1 - block.r0
        if self.visible is None and self.float_mask is None:
            if not self.is_causal or block.r0 >= stop:
                return None, stop, stop
            triangle = torch.ones(height, stop - block.r0, dtype=dtype, device=device).tril_()
            return triangle, block.r0, stop
        mask = torch.ones((), dtype=dtype, device=device)
        if self.visible is not None:
            mask = mask * cut(self.visible, block, stop)
        if self.float_mask is not None:
            mask = mask * (cut(self.float_mask, block, stop) > HIDDEN)
        if self.is_causal:
            mask = mask * torch.ones(height, stop, dtype=dtype, device=device).tril_(block.r0)
        mask = mask.expand(*mask.shape[:-1], stop)
        if stop == 0:
            return None, 0, 0
        some = mask.amax((0, 1, 2)).nonzero()
        stop = int(some[-1]) + 1 if len(some) else 0
        part = (mask[..., :stop].amin((0, 1, 2)) == 0).nonzero()
        start = int(part[0]) if len(part) else stop
        return (mask[..., start:stop] if start < stop else None), start, stop


class Source(Protocol):
    """Where logits come from."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, L, S."""

    @property
    def group(self) -> int:
        """Query heads that share a key head."""

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64: that of the statistics."""

    @property
    def device(self) -> torch.device:
        """Where the tiles live."""

    @property
    def masks(self) -> Masks:
        """What hides keys."""

    def load(self, block: Block, stop: int, tile: Tensor, scratch: Tensor, mask: Tensor | None, start: int) -> None:
        """Write the logits of the block's rows against the first `stop` keys into `tile`."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for every other floating type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def four_dims(tensor: Tensor, shape: Sequence[int], name: str) -> Tensor:
    """View a tensor that broadcasts to `shape` (..., H, L, S) as 4-D: sizes stay 1 where they can, no copy of L x S."""
    if name == "visible" and tensor.dtype != torch.bool:
        raise InvalidTypeError(f"visible is a bool tensor; got {tensor.dtype}", hint="Use `float_mask=` or `mask > x`.")
    sizes = (1,) * (len(shape) - tensor.ndim) + tuple(tensor.shape)
    if len(sizes) > len(shape) or any(size not in (1, full) for size, full in zip(sizes, shape, strict=False)):
        raise InvalidValueError(
            f"{name} broadcasts to {tuple(shape)}; got {tuple(tensor.shape)}",
            hint="Align the dimensions from the right.",
        )
    tensor = tensor.detach().reshape((1,) * (4 - len(sizes)) + sizes)
    lead, full = tensor.shape[:-3], tuple(shape[:-3])
    if len(lead) > 1 and any(size != 1 for size in lead):
        tensor = tensor.expand(*full, *tensor.shape[-3:])
    return tensor.reshape(-1 if tensor.numel() else math.prod(tensor.shape[:-3]), *tensor.shape[-3:])


def visible_rows(masks: Masks, batch: int, rows: Tensor, keys: int) -> Masks:
    """The masks of some rows of one batch element; a causal mask becomes an explicit one."""

    def pick(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor[batch : batch + 1] if tensor.shape[0] != 1 else tensor
        return tensor.index_select(2, rows) if tensor.shape[2] != 1 else tensor

    visible, float_mask = pick(masks.visible), pick(masks.float_mask)
    if masks.is_causal:
        past = (torch.arange(keys, device=rows.device) <= rows.unsqueeze(-1))[None, None]
        visible = past if visible is None else visible & past
    return replace(masks, visible=visible, float_mask=float_mask, is_causal=False)


def place(block: Block) -> tuple[slice, slice, slice]:
    """Index of the block's rows in a (B, H, L) tensor."""
    return slice(block.b0, block.b1), slice(block.h0, block.h1), slice(block.r0, block.r1)


def cut(tensor: Tensor, block: Block, stop: int) -> Tensor:
    """The part of a 4-D tensor (sizes 1 or full) that belongs to the block and the first `stop` keys."""
    ranges = ((block.b0, block.b1), (block.h0, block.h1), (block.r0, block.r1), (0, stop))
    return tensor[tuple(slice(*r) if size != 1 else slice(None) for r, size in zip(ranges, tensor.shape, strict=True))]


def blocks(source: Source) -> Iterator[Block]:
    """Tiles of about `TILE` elements that cover the call; causal calls get short ones, to skip the hidden triangle."""
    batch, heads, length, keys = source.shape
    if 0 in source.shape:
        return
    group = source.group
    height = min(length, max(8, TILE // (keys * group)))
    if source.masks.is_causal or source.masks.visible is not None or source.masks.float_mask is not None:
        height = min(height, max(32, -(-length // 8)))
    width = min(heads, group * max(1, TILE // (height * keys * group)))
    depth = min(batch, max(1, TILE // (height * keys * heads))) if width == heads else 1
    for b in range(0, batch, depth):
        for h in range(0, heads, width):
            for r in range(0, length, height):
                yield Block(b, min(batch, b + depth), h, min(heads, h + width), r, min(length, r + height))


def reduce_tile(a: Tensor, b: Tensor, mask: Tensor | None, start: int) -> dict[str, Tensor]:
    """The fields of RowStats for a tile of logits, before `settle`; both buffers are overwritten.

    Differences z - m are clamped where e^{z-m} is almost the smallest normal number: the exponential of MKL and the
    products of its results are several times slower beyond, and such keys are flushed to weight zero by `settle`.

    Args:
        a: (..., R, C) logits, C > 0.
        b: scratch of the same shape.
        mask: float 0 or 1, broadcastable to `a[..., start:]`, or None.
        start: first key that is hidden from some row.
    """
    keys = a.shape[-1]
    floor = FLOOR[a.dtype]
    if mask is None:
        n = torch.full(a.shape[:-1], float(keys), dtype=a.dtype, device=a.device)
        top, low = a.amax(-1), a.amin(-1)
    else:
        n = (mask.sum(-1) + start).expand(a.shape[:-1])
        part, part_b = a[..., start:], b[..., start:]
        cap = (mask - 0.5) * math.inf  # +inf at visible keys, -inf at hidden ones
        torch.minimum(part, cap, out=part)
        top = a.amax(-1)
        if bool(top.isnan().any()):  # NaN may sit at a hidden key, where it does not count
            part.masked_fill_(mask == 0, -math.inf)
            top = a.amax(-1)
        low = torch.maximum(part, -cap, out=part_b).amin(-1)
        if start:
            low = torch.minimum(low, a[..., :start].amin(-1))
    a.sub_(top.masked_fill(top == -math.inf, 0.0).unsqueeze(-1))
    if mask is not None:
        torch.maximum(part, -cap.clamp_(min=0.0), out=part)  # hidden keys: 0, which the tie rule below leaves out
    mean = a.sum(-1) / n.clamp(min=1.0)
    torch.sub(a, mean.unsqueeze(-1), out=b)
    if mask is not None:
        part_b.mul_(mask)
    m2 = torch.linalg.vector_norm(b, dim=-1) ** 2
    a.clamp_(min=floor)
    ties = torch.eq(a, 0.0, out=b).sum(-1) - (keys - n)  # visible keys that hold the maximum
    torch.add(a, b, alpha=floor, out=b).exp_()  # e^{z-m}, and next to nothing where z = m or hidden
    extra = (ties - 1.0).clamp_(min=0.0)
    rest = b.sum(-1) + extra
    weighted = torch.mul(a, b, out=a).sum(-1)
    rest2 = torch.mul(b, b, out=a).sum(-1) + extra
    rest3 = a.mul_(b).sum(-1) + extra
    return {
        "n": n,
        "max": top,
        "min": low,
        "rest": rest,
        "rest2": rest2,
        "rest3": rest3,
        "a": weighted,
        "mean": top + mean,
        "m2": m2,
    }


def settle(rows: RowStats) -> RowStats:
    """Give rows without a finite maximum or minimum, and weights that do not count, their exact values."""
    none = rows.rest < FLUSH[rows.rest.dtype]
    blind = rows.n == 0
    overflowed = (rows.min == -math.inf) & ~blind
    bad = ~(rows.max < math.inf)
    exact = {
        "rest": rows.rest.masked_fill(none, 0.0),
        "rest2": rows.rest2.masked_fill(none, 0.0),
        "rest3": rows.rest3.masked_fill(none, 0.0),
        "a": rows.a.masked_fill(none, 0.0),
        "mean": rows.mean.masked_fill(overflowed, -math.inf).masked_fill(blind, 0.0),
        "m2": rows.m2.masked_fill(overflowed, math.inf).masked_fill(blind, 0.0),
        "max": rows.max,
        "min": rows.min,
    }
    return RowStats(n=rows.n, **{name: value.masked_fill(bad, math.nan) for name, value in exact.items()})


def future_sum(a: Tensor, top: Tensor, mask: Tensor | None, start: int, first: int) -> Tensor:
    """Sum of e^{z-m} over the visible keys j > i, for rows i = first, first + 1, ...; `a` is left as it is."""
    keys = a.shape[-1]
    first = min(first, keys)
    weights = (a[..., first:] - top.unsqueeze(-1)).exp_()
    if mask is not None:
        begin = max(start, first)
        part = weights[..., begin - first :]
        part.masked_fill_(mask.expand(*mask.shape[:-1], keys - start)[..., begin - start :] == 0, 0.0)
    return weights.triu_(1).sum(-1)


def sweep(source: Source, *, future: bool = False) -> tuple[RowStats, Tensor | None]:
    """(RowStats of shape (B, H, L), weight on keys j > i of each row or None)."""
    batch, heads, length, keys = source.shape
    out = RowStats.empty((batch, heads, length), dtype=source.dtype, device=source.device)
    ahead = torch.zeros_like(out.n) if future else None
    buffers: Tensor | None = None
    for block in blocks(source):
        mask, start, stop = source.masks.window(block, keys, source.dtype, source.device)
        if stop == 0:
            continue
        sizes = (block.b1 - block.b0, block.h1 - block.h0, block.r1 - block.r0, stop)
        if buffers is None:  # the first block is the largest
            buffers = torch.empty(2, math.prod(sizes[:3]) * keys, dtype=source.dtype, device=source.device)
        tile, scratch = (buffer[: math.prod(sizes)].view(sizes) for buffer in buffers)
        source.load(block, stop, tile, scratch, mask, start)
        rows = place(block)
        if ahead is not None and not source.masks.is_causal:
            top = tile.amax(-1) if mask is None else _visible_top(tile, scratch, mask, start)
            ahead[rows] = future_sum(tile, top, mask, start, block.r0)
        stats = reduce_tile(tile, scratch, mask, start)
        if ahead is not None:
            ahead[rows] /= 1.0 + stats["rest"]
        for name, value in stats.items():
            getattr(out, name)[rows] = value
    return settle(out), ahead


def _visible_top(tile: Tensor, scratch: Tensor, mask: Tensor, start: int) -> Tensor:
    scratch.copy_(tile)
    scratch[..., start:].masked_fill_(mask == 0, -math.inf)
    top = scratch.amax(-1)
    return top.masked_fill(top == -math.inf, 0.0)
