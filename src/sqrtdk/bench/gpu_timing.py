"""Timing on a GPU, in pairs: every round runs all ways once, in turn, each after the cache was flushed."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from sqrtdk.bench.paired import Work, rounds

LEAST_ROUNDS = 3
LEAST_FLUSHED = 2**28  # bytes written before each call, at least twice the cache
AHEAD = 1_000_000  # cycles that the GPU waits, so that what Python takes for a call is not timed


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

    Example:
        >>> times = rounds_on(torch.device("cpu"), {"one": lambda: None, "two": lambda: None}, 2)
        >>> [(name, len(seconds)) for name, seconds in times.items()]
        [('one', 2), ('two', 2)]
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
                torch.cuda._sleep(AHEAD)  # type: ignore[no-untyped-call]
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
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
