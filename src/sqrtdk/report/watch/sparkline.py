"""Draws series of numbers as lines of text: bars of eight heights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sqrtdk.report.watch.statistics import Array, badness, value_text

_BAR_GLYPHS = "▁▂▃▄▅▆▇█"
_NO_BAR = "·"
_LOG_FROM = 30.0  # positive values that span more than this factor are drawn on a log scale


def sparkline(values: Sequence[float] | Array, width: int, low: float, high: float, *, log: bool = False) -> str:
    """Draw values as bars of eight heights, at most `width` characters. A bar shows the last known value of its share.

    Args:
        values: NaN ("not measured") is drawn as a dot, an infinity as the highest or the lowest bar.
        width: in characters.
        low: value of the lowest bar.
        high: value of the highest bar.
        log: whether bars show the logarithm, which needs `low` > 0.

    Example:
        >>> sparkline([0, 1, 2, 3, math.nan, 7], 10, 0, 7)
        '▁▂▃▄·█'
        >>> sparkline(range(100), 4, 0, 99), sparkline([1, 10, 100], 3, 1, 100, log=True)
        ('▃▄▆█', '▁▅█')
    """
    cells = np.array_split(np.asarray(values, dtype=float), min(width, len(values))) if len(values) else []
    drawing = ""
    for cell in cells:
        known = cell[~np.isnan(cell)]
        if not len(known):
            drawing += _NO_BAR
            continue
        value = min(max(float(known[-1]), low), high)  # an infinity becomes the lowest or the highest bar
        share = 0.0
        if high > low:
            share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        drawing += _BAR_GLYPHS[round(share * (len(_BAR_GLYPHS) - 1))]
    return drawing


def worst_of(values: Array, column: str, width: int) -> Array:
    """Return at most `width` values, each the worst of its share of the input.

    Example:
        >>> worst_of(np.array([1.0, 9.0, 2.0, math.nan]), "max_logit", 2).tolist()
        [9.0, 2.0]
    """
    cells = np.array_split(values, min(width, len(values)))
    return np.array([cell[badness(cell, column).argmax()] for cell in cells])


def drawn_range(values: Array) -> tuple[float, float, bool]:
    """Return the range of values that a line of bars covers, and whether its scale is logarithmic.

    Returns:
        The least and the largest finite value, (0, 1) if there is none; and True for a log scale, which is taken for
        positive values that differ widely.

    Example:
        >>> drawn_range(np.array([1.0, 3.0, np.inf]))
        (1.0, 3.0, False)
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 0.0, 1.0, False
    # infinities would flatten all other bars
    low, high = float(finite.min()), float(finite.max())
    return low, high, low > 0 and high > _LOG_FROM * low


def ends_text(low: float, high: float, column: str = "") -> str:
    """Return what the lowest and the highest bar stand for, as "▁ 0.1  █ 3.2".

    Args:
        low: Value of the lowest bar.
        high: Value of the highest bar.
        column: Statistic that the bars show; "" for the loss.
    """
    return f"{_BAR_GLYPHS[0]} {value_text(column, low)}  {_BAR_GLYPHS[-1]} {value_text(column, high)}"
