"""Which steps of which attempt count: where attempts overlap, the later one does.

A training that went back to a checkpoint runs some steps again, and what it records replaces the rest of the attempt
before. An attempt that recorded nothing replaces nothing; one whose parts were lost did record, and is missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqrtdk.monitor.manifest import MAX_STEP, Attempt
from sqrtdk.monitor.names import Part


@dataclass(frozen=True, slots=True)
class Gap:
    """Steps that no attempt recorded, from `first_step` to `last_step`, before `attempt` began."""

    first_step: int
    last_step: int
    attempt: int


def lost_tails(attempts: Sequence[Attempt], parts: Sequence[Part]) -> tuple[Part, ...]:
    """For each attempt that counted more parts than are there after its last one, those that are not, as one part.

    Args:
        attempts: as run.json had them before the parts were listed: what is written meanwhile is not missed.
        parts: that are there.

    Example:
        >>> attempts = [Attempt(1, 0, 0.0, None, parts=8, last_step=799), Attempt(2, 500, 0.0, None, 1, 599)]
        >>> [part.numbers for part in lost_tails(attempts, [Part(1, 0, 4, 0, 499), Part(2, 0, 0, 500, 599)])]
        ['attempt-1.part-000005-000007']
        >>> [(part.attempt, part.first_step, part.last_step) for part in lost_tails(attempts, [])]
        [(1, 0, 799), (2, 500, 599)]
    """
    lost = []
    ends: dict[int, tuple[int, int]] = {}  # number and step after the last part of each attempt
    for part in parts:
        number, step = ends.get(part.attempt, (0, 0))
        ends[part.attempt] = max(number, part.last + 1), max(step, part.last_step + 1)
    for attempt in attempts:
        number, step = ends.get(attempt.number, (0, attempt.first_step))
        if (attempt.parts or 0) > number and attempt.last_step is not None:
            first_step = min(step, attempt.last_step)
            lost.append(Part(attempt.number, number, (attempt.parts or 0) - 1, first_step, attempt.last_step))
    return tuple(lost)


def spans(attempts: Sequence[Attempt], parts: Sequence[Part]) -> dict[int, tuple[int, int]]:
    """The first and the last step that count of each attempt that recorded something, by its number.

    Example:
        >>> attempts = [Attempt(1, 0, 0.0, None), Attempt(2, 50, 0.0, None), Attempt(3, 40, 0.0, None)]
        >>> spans(attempts, [Part(1, 0, 0, 0, 99), Part(2, 0, 0, 50, 80)])
        {2: (50, 999999999999999999), 1: (0, 49)}
    """
    wrote = {part.attempt for part in parts}
    counted: dict[int, tuple[int, int]] = {}
    last = MAX_STEP
    for attempt in reversed(attempts):
        if attempt.number in wrote:
            counted[attempt.number] = (attempt.first_step, last)
            last = min(last, attempt.first_step - 1)
    return counted


def last_recorded(attempts: Sequence[Attempt], parts: Sequence[Part], before: int = MAX_STEP + 1) -> int | None:
    """The last step below `before` that counts; None: there is none.

    Example:
        >>> attempts = [Attempt(1, 0, 0.0, None), Attempt(2, 50, 0.0, None)]
        >>> parts = [Part(1, 0, 0, 0, 99), Part(2, 0, 0, 50, 80)]
        >>> last_recorded(attempts, parts), last_recorded(attempts, parts, before=30)
        (80, 29)
    """
    counted = spans(attempts, parts)
    steps = [
        min(part.last_step, counted[part.attempt][1], before - 1)
        for part in parts
        if part.attempt in counted and part.first_step <= min(counted[part.attempt][1], before - 1)
    ]
    return max(steps, default=None)


def gaps(attempts: Sequence[Attempt], parts: Sequence[Part]) -> tuple[Gap, ...]:
    """Where an attempt began later than after the last step before it.

    Example:
        >>> attempts = [Attempt(1, 0, 0.0, None), Attempt(2, 100, 0.0, None)]
        >>> gaps(attempts, [Part(1, 0, 0, 0, 79), Part(2, 0, 0, 100, 120)])
        (Gap(first_step=80, last_step=99, attempt=2),)
    """
    wrote: dict[int, list[Part]] = {}
    for part in parts:
        wrote.setdefault(part.attempt, []).append(part)
    counted = spans(attempts, parts)
    found = []
    before: list[Part] = []  # what counts when an attempt begins, in order of step
    for attempt in attempts:
        first = attempt.first_step
        if attempt.number not in wrote:
            continue
        while before and before[-1].first_step >= first:
            before.pop()
        if before and before[-1].last_step + 1 < first <= counted[attempt.number][1]:
            found.append(Gap(before[-1].last_step + 1, first - 1, attempt.number))
        before += wrote[attempt.number]
    return tuple(found)
