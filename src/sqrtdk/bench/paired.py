"""Timing in pairs: every round runs all ways once, in turn, so that a drift of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median with the 10th and 90th percentile, which are the extremes of five values and fewer."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one or more values.

        Example:
            >>> Spread.of([3.0, 1.0, 2.0])
            Spread(median=2.0, p10=1.0, p90=3.0)
        """
        ordered = sorted(values)
        tenth = round(0.1 * (len(ordered) - 1))
        return cls(statistics.median(ordered), ordered[tenth], ordered[len(ordered) - 1 - tenth])

    def text(self, digits: int = 3) -> str:
        """For people, with that many digits after the point.

        Example:
            >>> Spread(2.0, 1.0, 3.25).text(2)
            '2.00 [1.00 .. 3.25]'
        """
        return f"{self.median:.{digits}f} [{self.p10:.{digits}f} .. {self.p90:.{digits}f}]"


def rounds(
    ways: Mapping[str, Work],
    repeats: int,
    calls: int = 1,
    after_round: Callable[[], object] = lambda: None,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Seconds a call of every way in every round, after one round that is not counted.

    Args:
        ways: what to run, in this order, by name.
        repeats: rounds that are counted.
        calls: of one way in a row, before it is the next one's turn; more than 1 where a call is shorter than the
            clock can tell.
        after_round: told of every round, the first included.
        clock: in seconds; None: `time.perf_counter`. `time.process_time` where other programs run beside.
    """
    now = clock or time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(repeats + 1):
        for name, work in ways.items():
            start = now()
            for _ in range(calls):
                work()
            seconds = (now() - start) / calls
            if i:
                times[name].append(seconds)
        after_round()
    return times


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Of two ways, round by round.

    Example:
        >>> ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
        Spread(median=2.0, p10=2.0, p90=3.0)
    """
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])
