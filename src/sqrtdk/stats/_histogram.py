"""Histograms per head: counts in equal bins, with one pass and one transfer for all heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sqrtdk.stats._block import Block
from sqrtdk.stats._partial import RowStats
from sqrtdk.stats._sweep import TILE
from sqrtdk.stats.rows import LogitSource
from sqrtdk.stats.tiles import ProductSource

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

LOGIT_BINS = 48
SAMPLED_ROWS = 64  # per head, at most
SAMPLED_BATCH = 8  # at most


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of sampled logits in equal bins between `low` and `high`."""

    low: float
    high: float
    counts: tuple[int, ...]


def bin_counts(
    values: Float[Tensor, " Hq *rows"],
    counted: Bool[Tensor, " Hq *rows"] | None,
    low: Float[Tensor, "#Hq *#rows"] | float,
    spread: Float[Tensor, "#Hq *#rows"],
    bins: int,
) -> Int[Tensor, "Hq {bins}"]:
    """Return counts (Hq, bins) of values (Hq, ...) in bins of width 1/spread from `low`; outliers go to the end bins.

    Args:
        values: (Hq, ...), not changed; NaN values must not be counted.
        counted: bool of the same shape, or None: all.
        low: broadcastable to `values`.
        spread: bins per unit, broadcastable to `values`; 0 puts everything into the first bin.
        bins: number of bins.
    """
    heads = values.shape[0]
    first = torch.arange(heads, device=values.device).view(-1, *[1] * (values.ndim - 1)) * bins
    index = ((values - low) * spread).clamp_(0, bins - 1).to(torch.int64).add_(first)
    if counted is not None:
        # One bin beyond the last head's takes what does not count; selecting by a bool mask would wait for the device.
        index.masked_fill_(~counted, heads * bins)
    return torch.bincount(index.flatten(), minlength=heads * bins + 1)[:-1].view(heads, bins)


def _evenly(count: int, limit: int) -> list[int]:
    """Return at most `limit` of 0..count-1, evenly spaced, including the first and the last."""
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


class SampleSource(Protocol):
    """An attention call whose logits can be computed for a sample of its rows."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the logits: (B, Hq, L, S)."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the statistics: float32 or float64."""

    @property
    def device(self) -> torch.device:
        """Device of the logits."""

    def sample(self, batch: slice, rows: Int[Tensor, " R"]) -> LogitSource | ProductSource:
        """Return the same call with only some batch elements and some rows, (R,) int64 indices."""


def logit_histograms(source: SampleSource, rows: RowStats) -> tuple[Histogram, ...]:
    """Return histograms of each head's visible logits in sampled rows, between the head's smallest and largest logit.

    Args:
        source: the call.
        rows: its statistics, (B, Hq, L), for the range.

    Returns:
        One Histogram per head; rows with a NaN or +inf logit are left out, a -inf logit counts in the first bin.
    """
    batch, heads, length, keys = source.shape
    flat = rows.map(lambda field: field.transpose(0, 1).flatten(1))
    # NaN compares as False, so a row with a NaN is left out as well.
    good = (flat.keys > 0) & (flat.max_logit.abs() < math.inf)
    finite = good & (flat.min_logit > -math.inf)
    empty = not (batch and length and keys)
    high = flat.keys.new_zeros(heads) if empty else flat.max_logit.masked_fill(~good, -math.inf).amax(-1)
    low = flat.keys.new_zeros(heads) if empty else flat.min_logit.masked_fill(~finite, math.inf).amin(-1)
    low = torch.minimum(low, high)
    width = high - low
    spread = torch.where(width > 0, LOGIT_BINS / width, 0.0)
    # One bincount counts all heads: head h has the numbers from h (LOGIT_BINS + 1) on, the first of them for values
    # that don't count.
    counts = torch.zeros(heads, LOGIT_BINS + 1, dtype=torch.int64, device=source.device)
    first = torch.arange(heads, dtype=torch.int32, device=source.device).view(-1, 1, 1) * (LOGIT_BINS + 1)
    sound = not empty and bool(good.all())
    picked = [] if empty else _evenly(batch, SAMPLED_BATCH)
    share = SAMPLED_ROWS // max(1, len(picked))
    chunk = max(1, TILE // max(1, heads * keys))
    for b in picked:
        picked_rows = torch.tensor(_evenly(length, share), device=source.device)
        for part in torch.split(picked_rows, chunk):
            sample = source.sample(slice(b, b + 1), part)
            block = Block(0, 1, 0, heads, 0, len(part), 0, keys)
            mask, start, stop = sample.masks.window(block, source.dtype, source.device)
            if stop == 0:
                continue
            z = torch.empty(1, heads, len(part), stop, dtype=source.dtype, device=source.device)
            sample.load(replace(block, c1=stop), z, z, mask, start)
            z.sub_(low[:, None, None]).mul_(spread[:, None, None]).clamp_(0.0, LOGIT_BINS - 1.0).nan_to_num_(0.0)
            z.add_(1.0)  # bin 0 takes what does not count
            if mask is not None:
                z[..., start:].mul_(mask)
            if not sound:
                z.mul_(good.view(heads, batch, length)[:, b, part].unsqueeze(-1))
            index = z.to(torch.int32).squeeze(0).add_(first)
            counts += torch.bincount(index.flatten(), minlength=counts.numel()).view_as(counts)
    counts = counts[:, 1:]
    ranges = torch.stack([low, high]).double().nan_to_num(nan=math.nan, posinf=math.nan, neginf=math.nan)
    table = torch.cat([ranges.to(source.device), counts.mT.double()]).tolist()
    return tuple(
        Histogram(table[0][head], table[1][head], tuple(int(row[head]) for row in table[2:])) for head in range(heads)
    )
