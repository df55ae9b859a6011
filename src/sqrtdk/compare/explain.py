"""Why a segment differs: the causes that are suspected, applied to A's program, and what is left with them.

Every suspicion makes one part of A's program B's. They are applied one after the other, each time the one that brings A
nearest to B, until the numbers agree within rounding; then those are dropped again without which they agree as well. A
cause's share is what comes back of the difference when it alone is left out. What remains when no suspicion brings A
nearer is `unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from sqrtdk.compare.observed import NAMES
from sqrtdk.compare.precision import RISK
from sqrtdk.compare.program import Norm, Opaque, Program, Rotation
from sqrtdk.compare.records import Cause
from sqrtdk.compare.segments import Gap, Segment, gap
from sqrtdk.compare.suspect import STAGES, Sides, Suspicion, way_of

MOST = 6  # causes of one segment
ROUNDS = 24  # suspicions that are applied together
LEAST = 0.5  # share that a cause must explain where something unknown is left beside it
WORTH = 0.02  # share of a difference that a cause must take away to be kept before the whole of it is explained
UNKNOWN = "unknown"
Causes = Mapping[str, Callable[[Sides], Iterator[Suspicion]]]
Chosen = tuple[Suspicion, ...]
Programs = dict[Chosen, Program]  # A's with some suspicions applied
LEFT = 0.5  # of the squares, with a cause that shows
ROUNDED, OF_WEIGHTS = ("rounding",), ("weights", "projection_bias")
VECTORS = math.ceil(-2 * math.log2(RISK) - 1)  # that chance does not lay along another one


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
    programs: Programs = {(): sides.a}

    def left(suspicions: Chosen) -> Gap:
        return gap(segment, _applied(programs, suspicions))

    chosen = _nearest(segment, sides, causes, programs)
    if not left(chosen).within and left(every := _all(segment, sides, causes)).within:
        chosen = every
    if left(chosen).within:  # those without which the numbers do not agree
        for suspicion in reversed(chosen):
            rest = _without(chosen, suspicion)
            chosen = rest if left(rest).within else chosen
    after = left(chosen)
    found = []
    for one in chosen:
        share = _share(left(_without(chosen, one)), after)
        if after.within or share >= LEAST:
            found.append(Cause(one.name, one.a, one.b, share, one.text, one.stage))
    if not after.within:
        found.append(_unknown(segment, sides, before, after))
    return Explained(tuple(found), _applied(programs, chosen), before, after)


def _asked(segment: Segment, sides: Sides, causes: Causes, chosen: Iterable[Suspicion]) -> Iterator[Suspicion]:
    """What is suspected beside what was chosen."""
    names = {(old.name, old.stage) for old in chosen}
    every = (suspicion for suspect in causes.values() for suspicion in suspect(sides))
    return (one for one in every if one.stage in segment.asks and (one.name, one.stage) not in names)


def _nearest(segment: Segment, sides: Sides, causes: Causes, programs: Programs) -> Chosen:
    """One after the other that brings A nearest to B, the first that brings it there; all are asked anew each time."""
    chosen: Chosen = ()
    left = gap(segment, sides.a)
    for _ in range(MOST):
        program, best = _applied(programs, chosen), None
        for other in _asked(segment, replace(sides, a=program), causes, chosen):
            changed = other.change(program)
            found = gap(segment, changed)
            if best is None or found.within or found.size < best[0].size:
                best = found, other, changed
            if found.within:
                break
        if best is None or not (best[0].within or best[0].size <= (1 - WORTH) * left.size):
            break
        left, chosen = best[0], (*chosen, best[1])
        programs[chosen] = best[2]
        if left.within:
            break
    return chosen


def _all(segment: Segment, sides: Sides, causes: Causes) -> Chosen:
    """All suspicions, as they come up while they are applied: two that only together bring A nearer are among them."""
    chosen: Chosen = ()
    program = sides.a
    for _ in range(ROUNDS):
        suspicion = next(_asked(segment, replace(sides, a=program), causes, chosen), None)
        if suspicion is None:
            break
        chosen, program = (*chosen, suspicion), suspicion.change(program)
    return chosen


def _applied(programs: Programs, suspicions: Chosen) -> Program:
    """A's program with some suspicions applied, once for those that are asked again."""
    if suspicions not in programs:
        programs[suspicions] = suspicions[-1].change(_applied(programs, suspicions[:-1]))
    return programs[suspicions]


def _without(suspicions: Chosen, one: Suspicion) -> Chosen:
    return tuple(other for other in suspicions if other is not one)


def _share(before: Gap, after: Gap) -> float:
    """How much of a difference is gone; what is not finite is gone, or not."""
    if not math.isfinite(before.size):
        return float(math.isfinite(after.size))
    return 1 - after.size / before.size if before.size > 0 and math.isfinite(after.size) else 0.0


def _unknown(segment: Segment, sides: Sides, before: Gap, after: Gap) -> Cause:
    if segment.name != "output":
        stage = lost_stage(segment, sides)
    else:  # where B has no formula, what it makes of the product is not known
        stage = "weights" if sides.b.formula is None else segment.stages[-1]
    return unknown_cause(stage, after, max(0.0, _share(before, after)))


def unknown_cause(stage: str, left: Gap, explained: float = 0.0) -> Cause:
    """A difference that no cause explains."""
    text = f"differs at the {stage} by what is not known: {left.largest:.2g}, rounding allows {left.allowed:.2g}"
    return Cause(UNKNOWN, None, None, explained, text, stage)


def lost_stage(segment: Segment, sides: Sides) -> str:
    """Where a difference of q, k or v that no cause explains is put."""
    name = segment.name.removesuffix(" used")
    if len(segment.stages) == 1 or name not in NAMES:
        return segment.stages[0]
    return stage_of_vector(name, (sides.a, sides.b))


def stage_of_vector(name: str, programs: Iterable[Program]) -> str:
    """The first stage behind the projection that one of the sides has.

    A step that is not known counts as a rotation, which most have; without any it is one of the vector itself: "key".
    """
    steps = [step for program in programs for step in way_of(program, name).steps]
    kinds: dict[str, type | tuple[type, ...]] = {"norm": Norm, "rotation": (Rotation, Opaque)}
    return next((f"{name} {kind}" for kind, of in kinds.items() if any(isinstance(step, of) for step in steps)), name)


def first_stage(names: list[str]) -> str | None:
    """The first of some stages, in the order of an attention."""
    return next((name for name in STAGES if name in names), None)


# -- causes that move no single number beyond what rounding allows -----------------------------------------------------
#
# What is allowed of one number is the largest that chance makes of its rounding; in half precision a scale that is off
# by a hundredth stays below. All numbers together tell more. Where the programs say that B does something else, that
# change of A's program moves its values by d. With r what A's are off by, the cause is there where
# |r - d|^2 <= |r|^2 / 2: more than half of what is left is gone with it.
#
# Chance does that to no one: it asks that r, which is nothing but rounding, lies within 45 degrees of d. Of n numbers
# that are rounded independently that has a probability of at most 2^(-(n + 1) / 2), `RISK` at n = 39. A vector's
# numbers have errors in common, so n counts vectors, not their entries. A constant that one side holds in fewer digits
# is no cause: causes ask that the numbers be further apart than that; the cause `rounding` is not asked, nor, of sides
# of two dtypes, what finds weights that are not the same.


def shows(before: Gap, after: Gap) -> bool:
    """Whether more than half of what a program's values are off by, in squares, goes away by a change of it."""
    return before.size > 0.0 and after.size**2 <= LEFT * before.size**2


def faint(segment: Segment, sides: Sides, causes: Causes) -> Explained:
    """Causes over a segment whose numbers are each within rounding, one after the other while they show.

    Args:
        segment: over which A's program gives B's values within rounding.
        sides: both programs.
        causes: who is asked, in order.

    Returns:
        None of the causes, and A's program as it is, where none shows.
    """
    before = gap(segment, sides.a)
    found = Explained((), sides.a, before, before)
    if math.prod(segment.target.shape[:3]) < VECTORS:
        return found
    rounded = ROUNDED if sides.a.dtype == sides.b.dtype else (*ROUNDED, *OF_WEIGHTS)
    asked = {name: suspect for name, suspect in causes.items() if name not in rounded}
    while found.after.size > 0.0:
        sharper = replace(segment, most=math.sqrt(LEFT) * found.after.size, known=[])
        more = explain(sharper, replace(sides, a=found.program), asked)
        if not more.after.within:
            break
        found = Explained((*found.causes, *more.causes), more.program, before, gap(segment, more.program))
    return found
