"""The shipped finite-n table and its interpolation: monotone cubic in log n, then in sigma; standard library only."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.resources import files
from itertools import pairwise


@cache
def load() -> dict[str, list[list[float]]]:
    """Contents of gaussian_table.json; `log_n` and `sigma` are the axes, the first row of n is n = 1."""
    raw = json.loads(files("sqrtdk.theory").joinpath("gaussian_table.json").read_text(encoding="utf-8"))
    table: dict[str, list[list[float]]] = {"log_n": [[math.log(n) for n in raw["n"]]], "sigma": [raw["sigma"]]}
    for name in ("entropy", "effective"):
        table[name] = [
            [value * log_n for value in row] for row, log_n in zip(raw[name], table["log_n"][0], strict=True)
        ]
    table["peak"] = [[-math.log(value) for value in row] for row in raw["peak"]]  # log scale: from 1/n to 1
    table["log_n"][0].insert(0, 0.0)
    for name in ("entropy", "effective", "peak"):
        table[name].insert(0, [0.0] * len(raw["sigma"]))
    return table


def slopes(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Slopes of the monotone cubic through the points (Fritsch and Butland, 1984)."""
    steps = [b - a for a, b in pairwise(x)]
    secants = [(b - a) / step for a, b, step in zip(y, y[1:], steps, strict=False)]
    inner = []
    for left, right, h, k in zip(secants, secants[1:], steps, steps[1:], strict=False):
        w, v = 2 * k + h, k + 2 * h
        inner.append((w + v) / (w / left + v / right) if left * right > 0 else 0.0)
    return [_end(secants[0], inner[0], secants), *inner, _end(secants[-1], inner[-1], secants)]


def _end(secant: float, neighbour: float, secants: Sequence[float]) -> float:
    """Slope at an end: that of the parabola with the neighbour's slope, kept within the monotone bounds."""
    slope = 2 * secant - neighbour
    if slope * secant <= 0:
        return 0.0
    return slope if abs(slope) <= 3 * abs(secant) else 3 * secant


def cubic(x: Sequence[float], y: Sequence[float], d: Sequence[float], at: float) -> float:
    """Hermite cubic through (x, y) with slopes d."""
    i = min(max(bisect_right(x, at) - 1, 0), len(x) - 2)
    h = x[i + 1] - x[i]
    t = (at - x[i]) / h
    s = 1 - t
    return (1 + 2 * t) * s * s * y[i] + t * t * (1 + 2 * s) * y[i + 1] + h * t * s * (s * d[i] - t * d[i + 1])


@lru_cache(maxsize=8192)
def column(quantity: str, n: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(values, slopes) over the sigma axis for one n, interpolated in log n between neighbouring counts."""
    table = load()
    logs, rows = table["log_n"][0], table[quantity]
    at = math.log(n)
    i = min(max(bisect_right(logs, at) - 1, 0), len(logs) - 2)
    low, high = max(0, i - 1), min(len(logs), i + 3)
    values = []
    for points in zip(*rows[low:high], strict=True):
        values.append(cubic(logs[low:high], points, slopes(logs[low:high], points), at))
    d = slopes(table["sigma"][0], values)
    if quantity != "peak":
        d[0] = 0.0  # entropy and effective keys are even in sigma
    return tuple(values), tuple(d)


def value(quantity: str, n: float, sigma: float) -> float:
    """Entropy, log(effective keys) or -log(peak); beyond the last sigma it falls like 1 / sigma.

    All three are at most log n: the table's last digit must not say otherwise.
    """
    axis = load()["sigma"][0]
    values, d = column(quantity, n)
    if sigma > axis[-1]:
        return values[-1] * axis[-1] / sigma
    return min(math.log(n), cubic(axis, values, d, sigma))
