"""Per-head summaries of the row statistics of one attention call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.stats._block import Future
from sqrtdk.stats._histogram import LOGIT_BINS as LOGIT_BINS
from sqrtdk.stats._histogram import Histogram as Histogram
from sqrtdk.stats._histogram import SampleSource
from sqrtdk.stats._histogram import bin_counts as bin_counts
from sqrtdk.stats._histogram import logit_histograms as sampled_histograms
from sqrtdk.stats._partial import RowStats
from sqrtdk.stats._sweep import sweep_tiles
from sqrtdk.stats.rows import QUANTILES, LogitSource, logit_source, row_quantiles
from sqrtdk.stats.tiles import AttentionRows, ProductSource, product_source, sweep_product

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from sqrtdk._shapes import Bias, Factor, Logits, Visible

SATURATED = 0.99  # peak weight above which a row of more than one key counts as saturated
ENTROPY_BINS = 24


@dataclass(frozen=True, slots=True)
class HeadStats:
    """Statistics of the logits and of their softmax; every tuple has one entry per query head.

    A row is one query of one batch element. Rows that see no key are counted in `blind_rows` and left out of everything
    else. A row of one visible key has no choice to make, and is left out of `saturated` and `entropy_fraction`. A head
    without any seeing row holds NaN.
    """

    heads: int
    rows: int  # rows per head, blind ones included
    blind_rows: tuple[int, ...]
    nan_rows: tuple[int, ...]  # rows with a NaN or +inf logit, or all -inf; left out of everything else
    keys: tuple[float, ...]  # mean number of visible keys
    max_logit: tuple[float, ...]  # signed, scaled, after bias, visible keys only
    min_logit: tuple[float, ...]
    max_abs_logit: tuple[float, ...]
    # largest (max of a row - its mean): softmax sees the max only relative to the row
    max_above_mean: tuple[float, ...]
    mean_logit: tuple[float, ...]
    std_logit: tuple[float, ...]  # root of the mean within-row variance
    row_offset: tuple[float, ...]  # largest |mean of a row|
    entropy_nats: tuple[float, ...]  # mean over rows
    entropy_p05: tuple[float, ...]
    entropy_p50: tuple[float, ...]
    entropy_p95: tuple[float, ...]
    entropy_fraction: tuple[float, ...]  # mean of entropy / log(visible keys)
    effective_keys: tuple[float, ...]  # mean of 1 / sum p^2
    peak: tuple[float, ...]  # mean largest weight
    peak_max: tuple[float, ...]
    saturated: tuple[float, ...]  # fraction of rows with peak > 0.99
    jacobian_norm: tuple[float, ...]  # mean Frobenius norm of diag(p) - p p^T
    logit_histogram: tuple[Histogram, ...]  # of the visible logits (sampled rows), one per head
    entropy_histogram: tuple[Histogram, ...]  # of the rows' entropy, one per head


@dataclass(frozen=True, slots=True)
class CallStats:
    """The statistics of one attention call: those of its heads, and those of the call as a whole."""

    heads: HeadStats
    max_product: float | None  # largest |q . k| before any scale, visible keys only; None if no row sees a key
    future_weight: float | None  # mean over seeing rows of the weight on keys j > i; None unless asked and L == S


def head_stats_from_logits(logits: Logits, visible: Visible | None = None, *, future: bool = False) -> CallStats:
    """Return per-head statistics of existing logits.

    Args:
        logits: (..., Hq, L, S), including scale, softcap and bias; any floating dtype, not changed.
        visible: bool, broadcastable to `logits`; True where the row sees the key. A mask that was added to the logits
            must be passed here as well, or its -inf entries count as logits.
        future: also compute the mean weight on keys j > i, if L == S.

    Returns:
        CallStats without `max_product`.

    Raises:
        InvalidTypeError: The logits are not a floating tensor, or the mask is not bool.
        InvalidValueError: The shapes do not fit.

    Example:
        >>> head_stats_from_logits(torch.zeros(1, 2, 3, 8)).heads.effective_keys
        (8.0, 8.0)
    """
    with torch.no_grad():
        return call_stats(logit_source(logits, visible), future=future)


def head_stats_from_qk(
    query: Float[Tensor, "*B Hq L E"],
    key: Float[Tensor, "*B H S E"],
    *,
    scale: float | Factor,
    softcap: float | None = None,
    bias: Bias | None = None,
    visible: Visible | None = None,
    is_causal: bool = False,
    float_mask: Bias | None = None,
    future: bool = False,
) -> CallStats:
    """Return per-head statistics of a call from its query and key, without an (L, S) matrix; see `attention_row_stats`.

    Example:
        >>> q = k = torch.zeros(1, 2, 4, 8)
        >>> head_stats_from_qk(q, k, scale=8**-0.5, is_causal=True).heads.keys
        (2.5, 2.5)
    """
    with torch.no_grad():
        source = product_source(
            query,
            key,
            scale=scale,
            softcap=softcap,
            bias=bias,
            visible=visible,
            is_causal=is_causal,
            float_mask=float_mask,
        )
        return call_stats(source, future=future)


def call_rows(source: LogitSource | ProductSource, *, future: bool = False) -> AttentionRows:
    """Return the statistics of every row of a call, (B, Hq, L), on the device of the call.

    Args:
        source: Result of `logit_source` or `product_source`.
        future: Whether to compute the weight on future keys, j > i, too. It needs L = S; otherwise it stays None.
    """
    if isinstance(source, ProductSource):
        return sweep_product(source, future=future)
    rows, ahead = sweep_tiles(source, Future() if future and source.shape[2] == source.shape[3] else None)
    return AttentionRows(rows, future=None if ahead is None else ahead.squeeze(-1))


def call_stats(source: LogitSource | ProductSource, *, future: bool = False) -> CallStats:
    """Return the statistics of each head of a call.

    Args:
        source: Result of `logit_source` or `product_source`; the latter gives `max_product` as well.
        future: Whether to compute the weight on future keys, j > i, too.
    """
    return call_stats_of_rows(source, call_rows(source, future=future))


def call_stats_of_rows(source: SampleSource, result: AttentionRows) -> CallStats:
    """Return the statistics of each head of a call from those of its rows.

    Args:
        source: The call, from which logits are sampled for the histograms.
        result: Statistics of the rows, (B, Hq, L), from `call_rows`.
    """
    rows, product, ahead = result.rows, result.max_product, result.future
    stats = head_stats(rows, logit_histograms=sampled_histograms(source, rows))
    largest = weight = None
    if product is not None and bool((known := (rows.keys > 0) & ~product.isnan()).any()):
        largest = float(product.masked_fill(~known, 0.0).amax())
    if ahead is not None:
        seeing = (rows.keys > 0) & (rows.max_logit > -math.inf)
        weight = float(ahead.masked_fill(~seeing, 0.0).sum(dtype=torch.float64) / seeing.sum())
    return CallStats(stats, largest, None if weight is None or math.isnan(weight) else weight)


def head_stats(rows: RowStats, *, logit_histograms: Sequence[Histogram] = ()) -> HeadStats:
    """Summarise the rows of each head; the results leave the device in one transfer.

    Args:
        rows: statistics of shape (..., Hq, L).
        logit_histograms: one per head, stored as they are; empty: left out.

    Returns:
        HeadStats; quantiles interpolate linearly between rows.

    Example:
        >>> from sqrtdk.stats import row_stats
        >>> flat = Histogram(0.0, 0.0, (4,))
        >>> head_stats(row_stats(torch.zeros(1, 2, 2, 4)), logit_histograms=[flat, flat]).entropy_fraction
        (1.0, 1.0)
    """
    heads = rows.keys.shape[-2]
    rows = rows.map(lambda field: field.movedim(-2, 0).flatten(1))
    count = rows.keys.shape[1]
    blind = rows.keys == 0
    broken = ~blind & ~(rows.max_logit.abs() < math.inf)
    good = ~(blind | broken)
    choice = good & (rows.keys > 1)
    total, choices = good.sum(-1), choice.sum(-1)

    def mean(
        value: Float[Tensor, "Hq rows"], where: Bool[Tensor, "Hq rows"] = good, over: Int[Tensor, " Hq"] = total
    ) -> Float[Tensor, " Hq"]:
        return value.masked_fill(~where, 0.0).sum(-1, dtype=torch.float64) / over

    def largest(value: Float[Tensor, "Hq rows"]) -> Float[Tensor, " Hq"]:
        if not count:
            return torch.full((heads,), math.nan, dtype=value.dtype, device=value.device)
        return value.masked_fill(~good, -math.inf).amax(-1).masked_fill(total == 0, math.nan)

    entropy, peak = rows.entropy_nats, rows.peak
    longest = rows.keys.amax(-1).clamp(min=1.0) if count else rows.keys.new_ones(heads)
    room = torch.log(longest)
    spread = torch.where(room > 0, ENTROPY_BINS / room, 0.0).unsqueeze(-1)
    p05, p50, p95 = row_quantiles(entropy.masked_fill(~good, math.inf), total, QUANTILES)
    named = {
        "blind_rows": blind.sum(-1),
        "nan_rows": broken.sum(-1),
        "keys": mean(rows.keys),
        "max_logit": largest(rows.max_logit),
        "min_logit": -largest(-rows.min_logit),
        "max_abs_logit": largest(torch.maximum(rows.max_logit.abs(), rows.min_logit.abs())),
        "max_above_mean": largest(rows.max_logit - rows.mean),
        "mean_logit": mean(rows.mean),
        "std_logit": mean(rows.variance).sqrt(),
        "row_offset": largest(rows.mean.abs()),
        "entropy_nats": mean(entropy),
        "entropy_p05": p05,
        "entropy_p50": p50,
        "entropy_p95": p95,
        "entropy_fraction": mean(entropy / rows.keys.clamp(min=2.0).log(), choice, choices),
        "effective_keys": mean(rows.effective_keys),
        "peak": mean(peak),
        "peak_max": largest(peak),
        "saturated": mean((peak > SATURATED).to(peak.dtype), choice, choices),
        "jacobian_norm": mean(rows.jacobian_norm),
        "room": room,
    }
    bins = bin_counts(entropy.nan_to_num(), good, 0.0, spread, ENTROPY_BINS)
    table = torch.cat([torch.stack([value.double() for value in named.values()]), bins.mT.double()])
    columns = [tuple(column) for column in table.tolist()]
    found: dict[str, tuple[float, ...]] = dict(zip(named, columns, strict=False))
    return HeadStats(
        heads=heads,
        rows=count,
        blind_rows=tuple(int(x) for x in found["blind_rows"]),
        nan_rows=tuple(int(x) for x in found["nan_rows"]),
        keys=found["keys"],
        max_logit=found["max_logit"],
        min_logit=found["min_logit"],
        max_abs_logit=found["max_abs_logit"],
        max_above_mean=found["max_above_mean"],
        mean_logit=found["mean_logit"],
        std_logit=found["std_logit"],
        row_offset=found["row_offset"],
        entropy_nats=found["entropy_nats"],
        entropy_p05=found["entropy_p05"],
        entropy_p50=found["entropy_p50"],
        entropy_p95=found["entropy_p95"],
        entropy_fraction=found["entropy_fraction"],
        effective_keys=found["effective_keys"],
        peak=found["peak"],
        peak_max=found["peak_max"],
        saturated=found["saturated"],
        jacobian_norm=found["jacobian_norm"],
        logit_histogram=tuple(logit_histograms),
        entropy_histogram=tuple(
            Histogram(0.0, found["room"][head], tuple(int(column[head]) for column in columns[len(named) :]))
            for head in range(heads)
        ),
    )
