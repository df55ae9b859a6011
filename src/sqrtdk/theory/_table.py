"""The shipped finite-n table and its interpolation: cubic splines in log n, then in asinh(sigma); no numpy.

Splines go through the logarithms of ratios that are 1 at sigma = 0 and finite down to n = 1: entropy / log n,
-log(peak) / log n, log(effective keys) / log n, Jacobian norm n / sqrt(n - 1). `sqrtdk.theory.gaussian` states the
errors of the interpolation.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.resources import files
from itertools import pairwise

# The power of sigma with which each ratio falls beyond the table's last sigma.
POWER_BEYOND = {"entropy": 1.0, "effective": 1.0, "peak": 1.0, "jacobian": 0.5}


@cache
def load_table() -> dict[str, list[list[float]]]:
    """Return the axes `log_n` and `sigma`, and logarithms of the ratios: a row for each n, a column for each sigma."""
    raw = json.loads(files("sqrtdk.theory").joinpath("gaussian_table.json").read_text(encoding="utf-8"))
    table: dict[str, list[list[float]]] = {"log_n": [[math.log(n) for n in raw["n"]]], "sigma": [raw["sigma"]]}
    for name in POWER_BEYOND:
        table[name] = [[math.log(value) for value in row] for row in raw[name]]
    return table


def spline(x: Sequence[float], y: Sequence[float], *, flat: bool = False) -> list[float]:
    """Return the slopes at the knots of the cubic spline through the points: flat or not-a-knot at the left, not-a-knot
    right.

    Example:
        >>> [round(slope, 9) for slope in spline([0, 1, 3, 4], [0, 1, 27, 64])]  # a cubic is its own spline
        [0.0, 3.0, 27.0, 48.0]
    """
    h = [b - a for a, b in pairwise(x)]
    rise = [(b - a) / step for (a, b), step in zip(pairwise(y), h, strict=True)]
    both = h[0] + h[1]
    upper, right = [0.0], [0.0]  # of a system whose diagonal is reduced to 1, row by row
    if not flat:
        upper = [both / h[1]]
        right = [((h[0] + 2 * both) * h[1] * rise[0] + h[0] ** 2 * rise[1]) / (both * h[1])]
    for i in range(1, len(h)):
        diagonal = 2 * (h[i - 1] + h[i]) - h[i] * upper[-1]
        right.append((3 * (h[i] * rise[i - 1] + h[i - 1] * rise[i]) - h[i] * right[-1]) / diagonal)
        upper.append(h[i - 1] / diagonal)
    both = h[-1] + h[-2]
    last = (h[-1] ** 2 * rise[-2] + (2 * both + h[-1]) * h[-2] * rise[-1]) / both
    slopes = [(last - both * right[-1]) / (h[-2] - both * upper[-1])]
    for u, r in zip(reversed(upper), reversed(right), strict=True):
        slopes.append(r - u * slopes[-1])
    return slopes[::-1]


def cubic(x: Sequence[float], y: Sequence[float], d: Sequence[float], at: float) -> float:
    """Evaluate the Hermite cubic through (x, y) with slopes d.

    Example:
        >>> cubic([0.0, 2.0], [0.0, 8.0], [0.0, 12.0], 1.0)
        1.0
    """
    i = min(max(bisect_right(x, at) - 1, 0), len(x) - 2)
    h = x[i + 1] - x[i]
    t = (at - x[i]) / h
    s = 1 - t
    return (1 + 2 * t) * s * s * y[i] + t * t * (1 + 2 * s) * y[i + 1] + h * t * s * (s * d[i] - t * d[i + 1])


@cache
def sigma_knots() -> list[float]:
    """Return the knots in asinh(sigma)."""
    # asinh is linear near 0, where all but the peak are even in sigma, and a logarithm at large sigma.
    return [math.asinh(sigma) for sigma in load_table()["sigma"][0]]


@cache
def _along_n(quantity: str) -> list[tuple[tuple[float, ...], list[float]]]:
    """Return (values, slopes) over log n for each sigma of the table."""
    table = load_table()
    return [(values, spline(table["log_n"][0], values)) for values in zip(*table[quantity], strict=True)]


@lru_cache(maxsize=8192)
def column(quantity: str, n: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (values, slopes) over asinh(sigma) for one n."""
    logs, at = load_table()["log_n"][0], math.log(n)
    values = tuple(cubic(logs, points, slopes, at) for points, slopes in _along_n(quantity))
    return values, tuple(spline(sigma_knots(), values, flat=quantity != "peak"))  # the others are even in sigma


def table_ratio(quantity: str, n: float, sigma: float) -> float:
    """Return the interpolated ratio; beyond the last sigma it falls with its power of sigma."""
    values, slopes = column(quantity, n)
    last = load_table()["sigma"][0][-1]
    if sigma > last:
        return math.exp(values[-1] - POWER_BEYOND[quantity] * math.log(sigma / last))
    return math.exp(cubic(sigma_knots(), values, slopes, math.asinh(sigma)))


def table_value(quantity: str, n: float, sigma: float) -> float:
    """Return entropy, log(effective keys) or -log(peak), capped at log n despite rounding in the table; or the
    Jacobian's root mean square norm.
    """
    if quantity == "jacobian":
        return table_ratio(quantity, n, sigma) * math.sqrt(n - 1.0) / n
    return min(1.0, table_ratio(quantity, n, sigma)) * math.log(n)
