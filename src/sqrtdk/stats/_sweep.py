"""The pass over tiles, shared by both sources of logits (a tensor; a query and a key).

Two buffers of one tile each are reused for the whole call. The results of several tiles of a row's keys merge as
`RowStats` do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sqrtdk.stats._block import Block, Masks, cut_keys
from sqrtdk.stats._partial import ROW_STATS_FIELDS, RowStats
from sqrtdk.stats._tile import exact_extremes, exponentials, reduce_tile

if TYPE_CHECKING:
    from jaxtyping import Float

TILE = 2**21  # elements; a float32 buffer of it is 8 MiB
MOST_TILE_KEYS = 2**10  # keys of a tile, at most: with few rows and many keys, products spend their time on the keys


class TileSource(Protocol):
    """An attention call whose logits can be computed tile by tile."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the logits: (B, Hq, L, S)."""

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the statistics: float32 or float64."""

    @property
    def device(self) -> torch.device:
        """Device of the tiles."""

    @property
    def masks(self) -> Masks:
        """Masks of the keys."""

    def load(
        self,
        block: Block,
        tile: Float[Tensor, "B Hq R C"],
        scratch: Float[Tensor, "B Hq R C"],
        mask: Float[Tensor, "*#BHq #R T"] | None,
        start: int,
    ) -> None:
        """Write the logits of a block into a tile.

        Args:
            block: Which logits.
            tile: (B, Hq, R, C) output, in the dtype of the statistics.
            scratch: (B, Hq, R, C) memory that may be overwritten.
            mask: (#B, #Hq, #R, T) mask of the block's keys from `start` on, or None.
            start: First key of the block that the mask covers.
        """

    def moments(self, block: Block) -> tuple[Float[Tensor, "B Hq R"], Float[Tensor, "B Hq R"]] | None:
        """Return the moments of a block's logits in closed form, if no key is masked.

        Returns:
            Mean and sum of squared deviations from it, each (batch, heads, rows); None if a pass is needed.
        """


class Weigher(Protocol):
    """Computes sums over the weights of a row beside the statistics, such as the output of attention."""

    @property
    def columns(self) -> int:
        """Number of sums for each row."""

    def __call__(self, weights: Float[Tensor, "B Hq R C"], block: Block) -> Float[Tensor, "B Hq R columns"]:
        """Return (batch, heads, rows, columns) from the block's weights, up to a factor per row, which is 0 without
        a key."""


def sweep_tiles(
    source: TileSource, weigher: Weigher | None = None
) -> tuple[RowStats, Float[Tensor, "B Hq L columns"] | None]:
    """Compute the statistics of every row in one pass over the tiles.

    Args:
        source: The call.
        weigher: Computes sums over the weights in the same pass; None for none.

    Returns:
        Statistics (B, Hq, L), and the weigher's sums (B, Hq, L, columns), or None without a weigher.
    """
    shape, dtype, device = source.shape[:3], source.dtype, source.device
    statistics = torch.stack(_fields(RowStats.empty(shape, dtype=dtype, device=device)))
    weighed = None if weigher is None else torch.empty(*shape, weigher.columns, dtype=dtype, device=device)
    if weighed is not None and 0 in source.shape:
        weighed.zero_()
    buffers: Float[Tensor, "2 elements"] | None = None
    for block in row_blocks(source):
        if buffers is None:  # the first block is the largest
            buffers = torch.empty(
                2, math.prod(block.sizes[:3]) * min(block.c1, MOST_TILE_KEYS), dtype=dtype, device=device
            )
        rows, sums = _rows(source, weigher, block, buffers)
        if rows is not None:
            places = (slice(None), *block.rows)
            statistics[places] = torch.stack(_fields(rows))
        if weighed is not None and rows is not None and sums is not None:
            # The sums are of e^{z-m}; times 1 / l, which is the peak, they are of the weights.
            share = rows.peak.masked_fill(rows.keys == 0, 0.0).unsqueeze(-1)
            torch.mul(sums, share, out=weighed[block.rows])
        elif weighed is not None:
            weighed[block.rows] = 0.0
    return exact_extremes(RowStats(*statistics)), weighed


def row_blocks(source: TileSource) -> Iterator[Block]:
    """Yield blocks of rows whose tiles have about `TILE` elements.

    A block has as many key heads as there are threads, if possible, as products of several matrices parallelise better
    than one. In causal calls blocks are short, so that most of the hidden triangle is skipped.
    """
    batch, heads, length, keys = source.shape
    if 0 in source.shape:
        return
    group, long = source.group, min(keys, MOST_TILE_KEYS)
    # torch's batched product gives each matrix to one thread, so as many heads as threads keep all busy.
    width = group * min(heads // group, torch.get_num_threads())
    height = min(length, max(8, TILE // (long * width)))
    if source.masks.is_causal or source.masks.visible is not None or source.masks.float_mask is not None:
        # An eighth of the rows: the hidden triangle that a causal block still computes is then a sixteenth of all.
        height = min(height, max(32, -(-length // 8)))
    width = max(width, min(heads, group * (TILE // (height * long * group))))
    depth = min(batch, max(1, TILE // (height * long * heads))) if width == heads else 1
    for b in range(0, batch, depth):
        for h in range(0, heads, width):
            for r in range(0, length, height):
                yield Block(b, min(batch, b + depth), h, min(heads, h + width), r, min(length, r + height), 0, keys)


def _rows(
    source: TileSource, weigher: Weigher | None, block: Block, buffers: Float[Tensor, "2 elements"]
) -> tuple[RowStats | None, Float[Tensor, "B Hq R columns"] | None]:
    """Sum a block of rows over all its keys: statistics, and sums with weights e^{z-m}; None if no key is seen."""
    mask, start, stop = source.masks.window(block, source.dtype, source.device)
    # The closed form holds for all keys of a block alone, so a mask of any kind rules it out.
    moments = source.moments(block) if mask is None and stop == block.c1 else None
    parts: list[RowStats] = []
    sums = top = None
    for c0 in range(0, stop, MOST_TILE_KEYS):
        tile = replace(block, c0=c0, c1=min(stop, c0 + MOST_TILE_KEYS))
        a, b = (buffer[: math.prod(tile.sizes)].view(tile.sizes) for buffer in buffers)
        hidden, first = cut_keys(mask, start, tile)
        source.load(tile, a, b, hidden, first)
        found = exponentials(a, b, hidden, first, moments=moments is None)
        if weigher is not None:
            part = weigher(b, tile)
            if sums is None or top is None:
                sums, top = part, found.max_logit
            else:
                # Online softmax: earlier sums shrink by e^{old max - new max}.
                below, top = top, torch.maximum(top, found.max_logit)
                sums = sums.mul_(_down(below, top)).add_(part.mul_(_down(found.max_logit, top)))
        parts.append(reduce_tile(b, a, found))
    if not parts:
        return None, None
    rows = (
        parts[0] if len(parts) == 1 else RowStats(*torch.stack([torch.stack(_fields(p)) for p in parts], 1)).merged(0)
    )
    return rows if moments is None else replace(rows, mean=moments[0], m2=moments[1]), sums


def _down(low: Float[Tensor, "B Hq R"], high: Float[Tensor, "B Hq R"]) -> Float[Tensor, "B Hq R 1"]:
    """Return e^{low - high}, (..., R, 1); 0 for a `low` of -inf."""
    return (low - high.masked_fill(high == -math.inf, 0.0)).exp_().unsqueeze(-1)


def _fields(rows: RowStats) -> list[Float[Tensor, "*rows"]]:
    return [getattr(rows, name) for name in ROW_STATS_FIELDS]
