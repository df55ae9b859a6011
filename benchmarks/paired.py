"""Timing in pairs: every round runs all sides once, in turn, so that drift of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Work = Callable[[], object]


def timed(work: Work, calls: int = 1) -> float:
    """Seconds of one call, over `calls` in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


def spread(values: list[float]) -> dict[str, float]:
    """Median with the 10th and 90th percentile."""
    ordered = sorted(values)
    tenth = max(0, round(0.1 * (len(ordered) - 1)))
    return {
        "median": statistics.median(ordered),
        "p10": ordered[tenth],
        "p90": ordered[len(ordered) - 1 - tenth],
    }


def rounds(ways: Mapping[str, Work], repeats: int, calls: int = 1) -> dict[str, list[float]]:
    """Seconds of every way in every round, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(repeats + 1):
        for name, work in ways.items():
            seconds = timed(work, calls)
            if i:
                times[name].append(seconds)
    return times


def ratio(times: Mapping[str, list[float]], above: str, below: str) -> dict[str, float]:
    """Spread of the ratio of two ways, round by round."""
    return spread([a / b for a, b in zip(times[above], times[below], strict=True)])


def line(name: str, value: Mapping[str, float], unit: str = "", factor: float = 1.0) -> str:
    """One line of a table: median [p10 .. p90]."""
    low, middle, high = (factor * value[key] for key in ("p10", "median", "p90"))
    return f"{name:48s} {middle:9.3f}{unit:3s} [{low:.3f} .. {high:.3f}]"
