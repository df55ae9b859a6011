"""Formats numbers. Terminal and page share one precision, which also decides which layers are folded as equal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqrtdk.audit.records import JudgedCall
    from sqrtdk.stats.heads import HeadStats


@dataclass(frozen=True, slots=True)
class WorstHead:
    """The four health figures of some calls, each taken from its worst head; None if nothing was measured."""

    max_logit: float | None
    entropy_nats: float | None
    entropy_fraction: float | None  # entropy as a share of log(visible keys), from the head with the lowest entropy
    peak: float | None
    saturated: float | None


def format_number(value: float | None, digits: int = 4) -> str:
    """Format a number with `digits` significant digits. Below a million no digit left of the point is dropped.

    Example:
        >>> [format_number(value) for value in (0.125, 12345.678, 65504, 1e9, None, float("inf"))]
        ['0.125', '12346', '65504', '1e+09', '-', 'inf']
    """
    if value is None:
        return "-"
    return f"{value:.0f}" if 10**digits <= abs(value) < 1e6 else f"{value:.{digits}g}"


def format_ratio(value: float | None) -> str:
    """Format a scale ratio; 1 is the textbook value.

    Example:
        >>> format_ratio(1.0), format_ratio(8.0), format_ratio(0.08838), format_ratio(None)
        ('1.000', '8.000', '0.08838', '?')
    """
    if value is None:
        return "?"
    return f"{value:.3f}" if 0.1 <= abs(value) < 1000 else format_number(value)


def format_percent(value: float | None) -> str:
    """Format a share in percent.

    Example:
        >>> format_percent(0.5831), format_percent(0.0042), format_percent(None), format_percent(float("nan"))
        ('58%', '0.4%', '-', '-')
    """
    if value is None or math.isnan(value):
        return "-"
    # one more decimal at the ends: 99.6% must not read 100%, nor 0.4% read 0%
    return f"{100 * value:.0f}%" if value in (0, 1) or 0.1 <= value <= 0.99 else f"{100 * value:.1f}%"


def worst_head(calls: Iterable[JudgedCall]) -> WorstHead:
    """Return the worst value of each figure: largest max logit, lowest entropy, largest peak, most saturated rows.

    NaN is returned only if all heads are NaN; a head with NaN has a finding of its own.
    """
    stats = [judged.call.stats for judged in calls if judged.call.stats is not None]
    low, share = _lowest_entropy(stats)
    return WorstHead(
        max_logit=_largest(value for item in stats for value in item.max_logit),
        entropy_nats=low,
        entropy_fraction=share,
        peak=_largest(value for item in stats for value in item.peak),
        saturated=_largest(value for item in stats for value in item.saturated),
    )


def _lowest_entropy(stats: Sequence[HeadStats]) -> tuple[float | None, float | None]:
    pairs = [pair for item in stats for pair in zip(item.entropy_nats, item.entropy_fraction, strict=True)]
    known = [pair for pair in pairs if not math.isnan(pair[0])]
    if known:
        return min(known, key=lambda pair: pair[0])
    return (math.nan, math.nan) if pairs else (None, None)


def _largest(values: Iterable[float]) -> float | None:
    every = list(values)
    known = [value for value in every if not math.isnan(value)]
    return max(known) if known else (math.nan if every else None)
