"""`step()` was never called although forward passes were seen: nothing of the run was judged or recorded."""

from __future__ import annotations

from collections.abc import Iterator

from sqrtdk.monitor.samples import Alarm

NAME = "idle"
SOURCE = "a step lies between two calls of step()"


def judge(steps: int, forwards: int, step: int) -> Iterator[Alarm]:
    """At most one alarm, as the block of a watch ends.

    Args:
        steps: how often `step()` was called.
        forwards: forward passes that were seen since the last.
        step: number of the step that is under way.

    Example:
        >>> [alarm.severity for alarm in judge(0, 3, 1)], list(judge(1, 0, 2))
        (['warn'], [])
    """
    if steps == 0 and forwards:
        text = f"step() was never called, {forwards} forward passes were seen: call it after each optimizer step"
        yield Alarm(NAME, "warn", step, text, SOURCE, value=float(forwards), bar=0.0)
