"""Fits the number of an edit to the answers: base, factor, window, cap, scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from sqrtdk.answers.edit import Edit, Number
from sqrtdk.answers.judge import LEAST_FLOOR
from sqrtdk.answers.lab import Edits, Lab

RATIOS = (0.1, 0.25, 0.5, 0.71, 0.9, 1.1, 1.41, 2.0, 4.0, 10.0)  # of A's own number, from which a fit starts
BETTER = 0.97  # of the residue without the edit: a grid that comes no nearer is not searched
GOLDEN = (5**0.5 - 1) / 2
STEPS, CLOSE = 12, 1.003  # of the golden section; ratio of its ends where it stops
PARABOLAS = 5
DIGITS = (1, 2, 3, 4, 5)  # somebody who wrote a number wrote a round one
AS_GOOD = 1.03


def families(edits: Sequence[Edit]) -> list[list[Edit]]:
    """Return the edits whose number can be fitted, by what they change."""
    found: dict[tuple[str, str], list[Edit]] = {}
    for edit in edits:
        if edit.number is not None and not edit.fitted:
            found.setdefault((edit.cause, edit.what), []).append(edit)
    return list(found.values())


def fit(
    lab: Lab,
    family: Sequence[Edit],
    beside: Edits = (),
    *,
    start: float | None = None,
    most: float = math.inf,
) -> Edit | None:
    """Return the edit of a family with the number that comes nearest on the first prompt.

    Args:
        lab: Runs A.
        family: Edits that differ in their number.
        beside: Other edits that are applied as well.
        start: A number around which is searched; None for the grid.
        most: Residue of the grid, in nats, up to which a number is searched.

    Returns:
        None if no number of the grid comes nearer than the edits beside it alone.
    """
    number = family[0].number
    assert number is not None

    def value(at: float) -> float:
        return lab.run((*beside, number.make(at))).residue

    own = family[0].a
    listed = {float(edit.b) for edit in family if isinstance(edit.b, float | int)}
    around = start if start is not None else own if isinstance(own, float | int) else None
    grid = set() if start is not None else set(listed)
    if around is not None:
        grid |= {_within(number, float(around) * ratio) for ratio in (*RATIOS, *((1.0,) if start is not None else ()))}
    places = sorted(grid)
    best = min(range(len(places)), key=lambda at: value(places[at]))
    if value(places[best]) > min(BETTER * lab.run(beside).residue, most):
        return None
    low, high = places[max(best - 1, 0)], places[min(best + 1, len(places) - 1)]
    if number.whole:
        return replace(number.make(_whole(value, int(low), int(high))), fitted=True)
    exact = _real(value, low, high)

    def finest(at: float) -> float:
        return lab.run((*beside, number.make(at)), floor=True).residue

    least = finest(exact) * AS_GOOD + LEAST_FLOOR / 10
    rounds = (float(f"{exact:.{digits}g}") for digits in DIGITS)
    return replace(number.make(next((near for near in rounds if finest(near) <= least), exact)), fitted=True)


def _within(number: Number, value: float) -> float:
    value = min(max(value, number.low), number.high)
    return float(round(value)) if number.whole else value


def _whole(value: Callable[[float], float], low: int, high: int) -> float:
    """Return the best whole number between two, by ever finer steps."""
    while True:
        step = max(1, (high - low) // 6)
        near = min(range(low, high + 1, step), key=value)
        if step == 1:
            return float(near)
        low, high = max(near - step, low), min(near + step, high)


def _real(value: Callable[[float], float], low: float, high: float) -> float:
    """Return the best number between two: golden section over its logarithm, then parabolas."""
    left, right = high * (low / high) ** GOLDEN, low * (high / low) ** GOLDEN
    for _ in range(STEPS):
        if high / low < CLOSE:
            break
        if value(left) <= value(right):
            high, right = right, left
            left = high * (low / high) ** GOLDEN
        else:
            low, left = left, right
            right = low * (high / low) ** GOLDEN
    exact: float = (low * high) ** 0.5
    step = (high / low) ** 0.5
    for _ in range(PARABOLAS):  # squares of residues are a parabola about their least
        below, at, above = (value(place) ** 2 for place in (exact / step, exact, exact * step))
        bend = below + above - 2 * at
        move = 0.5 * (below - above) / bend if bend > 0 else 0.0
        exact *= step ** min(max(move, -1.5), 1.5)
        step = step**0.5
        if value(exact) < LEAST_FLOOR:
            break
    return exact
