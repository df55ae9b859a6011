"""Why a segment differs: the causes that are suspected, applied to A's program, and what is left with them.

Every suspicion makes one part of A's program B's. All of them are applied, in the order of the table and again as long
as new ones come up, and then those are dropped again without which the numbers agree as well: what remains is the
smallest set that explains the difference. A cause's share is what comes back of the difference when it alone is left
out. Where even all of them do not bring A to B, each is kept that takes away the most of what is left, and the rest is
`unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from sqrtdk.compare.program import Program
from sqrtdk.compare.records import Cause
from sqrtdk.compare.segments import Gap, Segment, gap
from sqrtdk.compare.suspect import STAGES, Sides, Suspicion

ROUNDS = 4  # how often the causes are asked anew
WORTH = 0.1  # share of a difference that a cause must take away where the whole of it is not explained
UNKNOWN = "unknown"
Causes = Mapping[str, Callable[[Sides], Iterator[Suspicion]]]


@dataclass(frozen=True, slots=True, eq=False)
class Explained:
    """A segment, explained as far as it goes.

    Attributes:
        causes: found and proven.
        program: A's, with all of them applied.
        before: the difference without them.
        after: with them.
    """

    causes: tuple[Cause, ...]
    program: Program
    before: Gap
    after: Gap


def explain(segment: Segment, sides: Sides, causes: Causes) -> Explained:
    """Find the causes of the difference over a segment.

    Args:
        segment: over which A's program does not give B's values.
        sides: both programs.
        causes: who is asked, in order.
    """
    before = gap(segment, sides.a)
    if before.within:
        return Explained((), sides.a, before, before)
    chosen = _suspected(segment, sides, causes)
    after = gap(segment, _applied(sides.a, chosen))
    chosen = _fewest(segment, sides.a, chosen) if after.within else _useful(segment, sides.a, chosen, before)
    program = _applied(sides.a, chosen)
    after = gap(segment, program)
    found = [_cause(segment, sides.a, chosen, suspicion, after) for suspicion in chosen]
    if not after.within:
        found.append(_unknown(segment, sides, before, after))
    return Explained(tuple(found), program, before, after)


def _suspected(segment: Segment, sides: Sides, causes: Causes) -> list[Suspicion]:
    """All suspicions on the stages of a segment, as they come up while they are applied."""
    chosen: list[Suspicion] = []
    names: set[tuple[str, str]] = set()
    program = sides.a
    for _ in range(ROUNDS):
        count = len(chosen)
        for suspect in causes.values():
            for suspicion in suspect(replace(sides, a=program)):
                key = (suspicion.name, suspicion.stage)
                if suspicion.stage in segment.stages and key not in names:
                    names.add(key)
                    chosen.append(suspicion)
                    program = suspicion.change(program)
        if len(chosen) == count:
            break
    return chosen


def _applied(program: Program, suspicions: list[Suspicion]) -> Program:
    for suspicion in suspicions:
        program = suspicion.change(program)
    return program


def _without(suspicions: list[Suspicion], one: Suspicion) -> list[Suspicion]:
    return [other for other in suspicions if other is not one]


def _fewest(segment: Segment, program: Program, suspicions: list[Suspicion]) -> list[Suspicion]:
    """Those without which the numbers do not agree."""
    for suspicion in reversed(suspicions):
        rest = _without(suspicions, suspicion)
        if gap(segment, _applied(program, rest)).within:
            suspicions = rest
    return suspicions


def _useful(segment: Segment, program: Program, suspicions: list[Suspicion], before: Gap) -> list[Suspicion]:
    """Those that take away much of the difference, the best first, where all together do not take away all."""
    chosen: list[Suspicion] = []
    left = before
    while len(chosen) < len(suspicions):
        others = [suspicion for suspicion in suspicions if suspicion not in chosen]
        gaps = [gap(segment, _applied(program, [*chosen, suspicion])) for suspicion in others]
        best = min(range(len(others)), key=lambda i: gaps[i].size)
        if gaps[best].size > (1 - WORTH) * left.size:
            break
        chosen.append(others[best])
        left = gaps[best]
    return chosen


def _cause(segment: Segment, program: Program, chosen: list[Suspicion], one: Suspicion, after: Gap) -> Cause:
    without = gap(segment, _applied(program, _without(chosen, one)))
    explained = 1 - after.size / without.size if without.size > 0 else 0.0
    return Cause(one.name, one.a, one.b, explained, one.text, one.stage)


def _unknown(segment: Segment, sides: Sides, before: Gap, after: Gap) -> Cause:
    stage = segment.stages[-1]
    if len(segment.stages) > 1 and segment.name != "output":
        stage = segment.stages[0]
    explained = 1 - after.size / before.size if before.size > 0 else 0.0
    text = f"differs at the {stage} by what is not known: {after.largest:.2g}, rounding allows {after.allowed:.2g}"
    return Cause(UNKNOWN, None, None, max(0.0, explained), text, stage)


def first_stage(names: list[str]) -> str | None:
    """The first of some stages, in the order of an attention."""
    known = [name for name in STAGES if name in names]
    return known[0] if known else None
