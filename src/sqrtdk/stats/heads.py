"""Per-head summaries of the row statistics of one attention call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """Equal bins between `low` and `high`."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadStats:
    """Statistics of the logits and of their softmax; every tuple has one entry a query head.

    A row is one query of one batch element. Rows that see no key are counted in `blind_rows` and left out of
    everything else; a row of one visible key has no choice to make and is left out of `saturated`,
    `entropy_fraction`. A head without any seeing row holds NaN.
    """

    heads: int
    rows: int  # rows a head, blind ones included
    blind_rows: tuple[int, ...]
    nan_rows: tuple[int, ...]  # rows with a NaN or +inf logit; left out of everything else
    keys: tuple[float, ...]  # mean number of visible keys
    max_logit: tuple[float, ...]  # signed, scaled, after bias, visible keys only
    min_logit: tuple[float, ...]
    max_abs_logit: tuple[float, ...]
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
    logit_histogram: tuple[Histogram, ...]  # of the visible logits (sampled rows), one a head
    entropy_histogram: tuple[Histogram, ...]  # of the rows' entropy, one a head
