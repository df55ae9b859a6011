"""`rope_missing`: one side does not turn q, or k, or both.

A table that turns nothing is none. A rotation of other angles, or of fewer channels, is a neighbour's: `rope_base`,
`positions`, `rope_partial`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sqrtdk.compare.causes._parts import QK, Finding, joined, rotation, way
from sqrtdk.compare.program import Norm, Rotation, Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "rope_missing"
ROTATION = "rotation"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """The rotation that one side has and the other has not."""
    yield from joined(NAME, ROTATION, _findings(sides))


def _findings(sides: Sides) -> Iterator[Finding]:
    for part in QK:
        a, b = rotation(way(sides.a, part)), rotation(way(sides.b, part))
        if a is not None and b is None:
            yield Finding(part, "rotated", "not rotated", "leaves out the rotation of {}", _without)
        elif a is None and b is not None:
            other, place = b, _norms_before(way(sides.b, part))

            def added(old: Way, other: Rotation = other, place: int | None = place) -> Way:
                return _with(old, other, place)

            yield Finding(part, "not rotated", "rotated", "rotates {}, which A does not", added)


def _without(old: Way) -> Way:
    return replace(old, steps=tuple(step for step in old.steps if not isinstance(step, Rotation)))


def _norms_before(other: Way) -> int | None:
    """How many norms come before its rotation; None where none comes after."""
    at = next(i for i, step in enumerate(other.steps) if isinstance(step, Rotation))
    after = any(isinstance(step, Norm) for step in other.steps[at:])
    return sum(isinstance(step, Norm) for step in other.steps[:at]) if after else None


def _with(old: Way, new: Rotation, place: int | None) -> Way:
    """With a rotation after `place` norms, or at the end."""
    steps = list(_without(old).steps)
    norms = [i for i, step in enumerate(steps) if isinstance(step, Norm)]
    at = len(steps) if place is None or place >= len(norms) else norms[place]
    return replace(old, steps=(*steps[:at], new, *steps[at:]))
