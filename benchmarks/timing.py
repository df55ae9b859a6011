"""Timing in pairs: every round runs all ways once, in turn, so that a drift of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Work = Callable[[], object]
LEAST_ROUNDS = 3
LEAST_FLUSHED = 2**28  # bytes written before each call, at least twice the cache
AHEAD = 1_000_000  # cycles that the GPU waits, so that what Python takes for a call is not timed


@dataclass(frozen=True, slots=True)
class Spread:
    """Median with the 10th and 90th percentile, which are the extremes of five values and fewer."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one or more values."""
        ordered = sorted(values)
        tenth = round(0.1 * (len(ordered) - 1))
        return cls(statistics.median(ordered), ordered[tenth], ordered[len(ordered) - 1 - tenth])

    def text(self, digits: int = 3) -> str:
        """For people, with that many digits after the point."""
        return f"{self.median:.{digits}f} [{self.p10:.{digits}f} .. {self.p90:.{digits}f}]"


def rounds(
    ways: Mapping[str, Work],
    repeats: int,
    calls: int = 1,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Seconds a call of every way in every round, after one round that is not counted.

    Args:
        ways: what to run, in this order, by name.
        repeats: rounds that are counted.
        calls: of one way in a row, before it is the next one's turn; more than 1 where a call is shorter than the
            clock can tell.
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
    return times


def rounds_on(
    device: torch.device, ways: Mapping[str, Work], repeats: int, most_s: float = float("inf")
) -> dict[str, list[float]]:
    """Seconds of every way in every round, after one round that is not counted.

    On a GPU by CUDA events: what the device takes, without Python's share. On a CPU by the clock.

    Args:
        device: that the ways run on.
        ways: what to run, in this order, by name.
        repeats: rounds that are counted.
        most_s: no round starts after so many seconds, once there are three.
    """
    if device.type != "cuda":
        return rounds(ways, repeats)
    begin = time.monotonic()
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    flushed = torch.empty(max(LEAST_FLUSHED, 2 * cache), dtype=torch.int8, device=device)
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.cuda.device(device):
        for i in range(repeats + 1):
            if i > LEAST_ROUNDS and time.monotonic() - begin > most_s:
                break
            marks = {}
            for name, work in ways.items():
                flushed.zero_()
                torch.cuda._sleep(AHEAD)
                start, stop = _mark(), _mark()
                start.record()
                work()
                stop.record()
                marks[name] = start, stop
            torch.cuda.synchronize(device)
            for name, (start, stop) in marks.items():
                if i:
                    times[name].append(start.elapsed_time(stop) / 1e3)
    return times


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Of two ways, round by round."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])
