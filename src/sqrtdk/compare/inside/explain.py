"""Finds the causes of a segment's difference by applying suspicions to A's program.

Every suspicion turns one part of A's program into B's. They are applied one by one, each time the one that brings A
closest to B, until the numbers agree within rounding. Then causes that are not needed for that are dropped. The share
of a cause is the part of the difference that returns if it alone is left out. If no suspicion brings A closer, the rest
is `unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from sqrtdk.compare.inside.program import QKV, NormStep, OpaqueStep, Program, Rotation
from sqrtdk.compare.inside.segments import Segment, SegmentGap, is_known, run_segment, segment_gap
from sqrtdk.compare.inside.suspect import STAGES, Sides, Suspicion, path_of
from sqrtdk.compare.records import UNKNOWN_CAUSE, Cause, stage_word
from sqrtdk.compare.rounding.precision import RISK
from sqrtdk.messages import Message

MOST_CAUSES = 6  # causes of a segment that are searched one by one
MOST_TOGETHER = 24  # suspicions that are applied together at most
LEAST_SHARE_EXPLAINED = 0.5  # share that a cause must explain if an unknown difference remains next to it
LEAST_SHARE_REMOVED = 0.02  # share of the difference that a cause must remove to be kept while the rest is unexplained
Causes = Mapping[str, Callable[[Sides], Iterator[Suspicion]]]
Chosen = tuple[Suspicion, ...]
Programs = dict[Chosen, Program]  # A's program with some suspicions applied
# share of the squared differences that may remain after a cause that is visible in all numbers together
MOST_SQUARES_LEFT = 0.5
ROUNDED, OF_WEIGHTS = ("rounding",), ("weights", "projection_bias")
VECTORS = math.ceil(-2 * math.log2(RISK) - 1)  # n with 2^(-(n + 1) / 2) = RISK, see below


@dataclass(frozen=True, slots=True, eq=False)
class Explained:
    """A segment with its causes.

    Attributes:
        causes: proven causes, and `unknown` for a rest.
        program: A's program with all of them applied.
        before: difference without them.
        after: difference with them.
        applied: the suspicions behind the causes, in the order in which they were applied.
    """

    causes: tuple[Cause, ...]
    program: Program
    before: SegmentGap
    after: SegmentGap
    applied: Chosen = ()

    @property
    def stages(self) -> frozenset[str]:
        """Return every stage that the applied changes act on, those of other segments included."""
        return frozenset[str]().union(*(one.stages for one in self.applied))


def explain_segment(segment: Segment, sides: Sides, causes: Causes) -> Explained:
    """Find the causes of the difference over a segment, by changing A's program until it gives B's values.

    Args:
        segment: segment over which A's program may not give B's values.
        sides: both programs.
        causes: by name, functions that yield suspicions about two programs; tried in order.

    Returns:
        The causes, none if A gives B's values within rounding. The last one is "unknown" if a difference remains.
    """
    before = segment_gap(segment, sides.a)
    if before.within:
        return Explained((), sides.a, before, before)
    programs: Programs = {(): sides.a}

    def left(suspicions: Chosen) -> SegmentGap:
        return segment_gap(segment, _applied(programs, suspicions))

    chosen = _nearest(segment, sides, causes, programs)
    # two suspicions may help only together, so all are tried at once before giving up
    if not left(chosen).within and left(every := _all_suspicions(segment, sides, causes)).within:
        chosen = every
    if left(chosen).within:  # drop causes that are not needed for agreement, the last one first
        for suspicion in reversed(chosen):
            rest = _without_suspicion(chosen, suspicion)
            chosen = rest if left(rest).within else chosen
    else:
        chosen = helpful(chosen, left, LEAST_SHARE_EXPLAINED)
    after = left(chosen)
    found = [_cause_of(one, share_gone(left(_without_suspicion(chosen, one)), after)) for one in chosen]
    if not after.within:
        found.append(_unknown(segment, sides, before, after))
    return Explained(tuple(found), _applied(programs, chosen), before, after, chosen)


def _cause_of(one: Suspicion, explained: float) -> Cause:
    return Cause(one.name, one.a, one.b, explained, one.text, one.stage, codes=one.codes, lacks=one.lacks)


def helpful(chosen: Chosen, left: Callable[[Chosen], SegmentGap], least: float = 0.0) -> Chosen:
    """Return those of the chosen suspicions that reduce a difference which stays too large even with all of them.

    Each one that is kept removes at least a share of `least`, and more than nothing, from what is left without it. All
    together leave less than none of them; otherwise () is returned.

    Args:
        chosen: the suspicions.
        left: returns the difference that is left with some of them applied.
        least: least share, 0 to 1.
    """
    while chosen:
        after = left(chosen)
        shares = [share_gone(left(_without_suspicion(chosen, one)), after) for one in chosen]
        worst = min(range(len(chosen)), key=shares.__getitem__)
        if shares[worst] >= least and shares[worst] > 0.0:
            break
        chosen = _without_suspicion(chosen, chosen[worst])
    return chosen if chosen and share_gone(left(()), left(chosen)) > 0.0 else ()


def helpful_parts(whole: Segment, program: Program, parts: list[tuple[Segment, Explained]]) -> list[Explained]:
    """Return the explanations of the parts, with only those causes that bring the end of the whole nearer to B.

    A cause that is right by itself may lead away from B while another difference beside it is unknown: channels of q
    put in order against a k that stays as it was. It is no proof then, so its stage counts as unknown.

    Args:
        whole: the segment from the first difference to the output.
        program: A's program.
        parts: segments of the whole and their explanations.
    """
    every = tuple(one for _, explained in parts for one in explained.applied)
    programs: Programs = {(): program}
    kept = helpful(every, lambda some: segment_gap(whole, _applied(programs, some)))
    if len(kept) == len(every):
        return [explained for _, explained in parts]
    found = []
    for _, explained in parts:
        lost = [one for one in explained.applied if not any(one is other for other in kept)]
        names = {(one.name, one.stage) for one in lost}
        causes = [cause for cause in explained.causes if (cause.name, cause.stage) not in names]
        if lost and not any(cause.name == UNKNOWN_CAUSE for cause in causes):
            causes.append(unknown_cause(lost[0].stage, explained.before))
        applied = tuple(one for one in explained.applied if any(one is other for other in kept))
        found.append(replace(explained, causes=tuple(causes), program=_applied(programs, kept), applied=applied))
    return found


def mends(whole: Segment, sides: Sides, causes: Causes, found: Iterable[Cause]) -> bool:
    """Return whether B's program gives A's values, or comes nearer, once A's parts are put into it for these causes.

    A fix changes B, while a cause is proven by a change of A: so the causes are suspected again with the sides
    exchanged. True is also returned if this can't be tried, as B's program is unknown in a part.

    Args:
        whole: the segment from the first difference to the output.
        sides: both programs.
        causes: by name, functions that yield suspicions about two programs.
        found: causes of the difference. If one is "unknown", coming nearer is enough.
    """
    wanted, program = {(cause.name, cause.stage) for cause in found if cause.name != UNKNOWN_CAUSE}, sides.b
    if not wanted or not _can_run(whole, program):
        return True
    unexplained = any(cause.name == UNKNOWN_CAUSE for cause in found)
    target = replace(whole, target=run_segment(whole, sides.a)[0], own=None, known=[])
    before, done = segment_gap(target, program), set[tuple[str, str]]()
    for _ in range(MOST_TOGETHER):
        back = replace(sides, a=program, b=sides.a)
        every = (one for suspect in causes.values() for one in suspect(back))
        next_one = next((one for one in every if (one.name, one.stage) in wanted - done), None)
        if next_one is None:
            break
        done.add((next_one.name, next_one.stage))
        program = next_one.change(program)
    if done != wanted or not _can_run(whole, program):
        return True
    after = segment_gap(target, program)
    return after.within or (unexplained and share_gone(before, after) > 0.0)


def without_fixes(explained: Explained) -> Explained:
    """Return the explanation with `mends` False in every cause, so that no fix is offered."""
    return replace(explained, causes=tuple(replace(cause, mends=False) for cause in explained.causes))


def _can_run(whole: Segment, program: Program) -> bool:
    """Return whether a program can run over a segment: its formula, and what it passes of the paths, are known."""
    paths = {name: path_of(program, name) for name, begin in whole.begins.items() if begin != "used"}
    return program.formula is not None and all(
        is_known(path) and (path.affine is not None or whole.begins[name] != "input") for name, path in paths.items()
    )


def _suspicions_left(
    segment: Segment, sides: Sides, causes: Causes, chosen: Iterable[Suspicion]
) -> Iterator[Suspicion]:
    """Yield suspicions about the segment that are not chosen yet."""
    names = {(old.name, old.stage) for old in chosen}
    every = (suspicion for suspect in causes.values() for suspicion in suspect(sides))
    return (one for one in every if one.stage in segment.stages_tried and (one.name, one.stage) not in names)


def _nearest(segment: Segment, sides: Sides, causes: Causes, programs: Programs) -> Chosen:
    """Return suspicions one after the other, each the best at its time; an exact one ends the search."""
    chosen: Chosen = ()
    left = segment_gap(segment, sides.a)
    for _ in range(MOST_CAUSES):
        program, best = _applied(programs, chosen), None
        # Suspicions depend on the program: with the scale corrected, a softcap may be seen for what it is.
        for other in _suspicions_left(segment, replace(sides, a=program), causes, chosen):
            changed = other.change(program)
            found = segment_gap(segment, changed)
            if best is None or found.within or found.size < best[0].size:
                best = found, other, changed
            if found.within:
                break
        if best is None or not (best[0].within or best[0].size <= (1 - LEAST_SHARE_REMOVED) * left.size):
            break
        left, chosen = best[0], (*chosen, best[1])
        programs[chosen] = best[2]
        if left.within:
            break
    return chosen


def _all_suspicions(segment: Segment, sides: Sides, causes: Causes) -> Chosen:
    """Return all suspicions in the order in which they appear; some help only in combination."""
    chosen: Chosen = ()
    program = sides.a
    for _ in range(MOST_TOGETHER):
        suspicion = next(_suspicions_left(segment, replace(sides, a=program), causes, chosen), None)
        if suspicion is None:
            break
        chosen, program = (*chosen, suspicion), suspicion.change(program)
    return chosen


def _applied(programs: Programs, suspicions: Chosen) -> Program:
    """Return A's program with some suspicions applied, from the cache if possible."""
    if suspicions not in programs:
        programs[suspicions] = suspicions[-1].change(_applied(programs, suspicions[:-1]))
    return programs[suspicions]


def _without_suspicion(suspicions: Chosen, one: Suspicion) -> Chosen:
    return tuple(other for other in suspicions if other is not one)


def share_gone(before: SegmentGap, after: SegmentGap) -> float:
    """Return the share of a difference that is gone, 0 to 1; infinite differences are gone completely or not at all.

    A difference that has grown is gone by no share.

    Example:
        >>> gap = lambda size: SegmentGap(size, size, 1e-6, False)
        >>> share_gone(gap(1.0), gap(0.25)), share_gone(gap(1.0), gap(2844.0)), share_gone(gap(math.nan), gap(0.1))
        (0.75, 0.0, 1.0)
    """
    if not math.isfinite(before.size):
        return float(math.isfinite(after.size))
    if not (before.size > 0 and math.isfinite(after.size)):
        return 0.0
    return min(1.0, max(0.0, 1 - after.size / before.size))


def _unknown(segment: Segment, sides: Sides, before: SegmentGap, after: SegmentGap) -> Cause:
    if segment.name != "output":
        stage = stage_of_unexplained(segment, sides)
    else:  # without B's formula, its result from the product is unknown
        stage = "weights" if sides.b.formula is None else segment.stages[-1]
    return unknown_cause(stage, after, share_gone(before, after))


def unknown_cause(stage: str, left: SegmentGap, explained: float = 0.0) -> Cause:
    """Return the cause "unknown" for a difference that no suspicion explains.

    Args:
        stage: stage to which it is attributed.
        left: difference that is left.
        explained: share of the whole difference for which it stands, 0 to 1.
    """
    sizes = {"left": f"{left.largest:.2g}", "allowed": f"{left.allowed:.2g}"}
    text = Message("causes.unknown.at_stage", stage=stage_word(stage), **sizes)
    return Cause(UNKNOWN_CAUSE, None, None, explained, text, stage)


def stage_of_unexplained(segment: Segment, sides: Sides) -> str:
    """Return the name of the stage to which a segment's unexplained difference is attributed.

    It is the first stage of the segment, or for q, k and v the one that `stage_of_vector` returns.
    """
    name = segment.name.removesuffix(" used")
    if len(segment.stages) == 1 or name not in QKV:
        return segment.stages[0]
    return stage_of_vector(name, (sides.a, sides.b))


def stage_of_vector(name: str, programs: Iterable[Program]) -> str:
    """Return the first stage after the projection that any of the programs has: "key norm", "key rotation".

    An unknown step counts as a rotation, which most models have. Without any step, the stage is the vector itself.

    Args:
        name: "query", "key" or "value".
        programs: programs of A and B.
    """
    steps = [step for program in programs for step in path_of(program, name).steps]
    kinds: dict[str, type | tuple[type, ...]] = {"norm": NormStep, "rotation": (Rotation, OpaqueStep)}
    return next((f"{name} {kind}" for kind, of in kinds.items() if any(isinstance(step, of) for step in steps)), name)


def first_stage(names: list[str]) -> str | None:
    """Return the earliest of some stages, in the order of `STAGES`; None if no name is a stage."""
    return next((name for name in STAGES if name in names), None)


# -- causes that move no single number beyond what rounding allows -----------------------------------------------------
#
# The allowance for one number is the largest error that chance gives it; in half precision, a scale that is off by one
# percent stays below. All numbers together show more. If the programs say that B does something else, that change moves
# A's values by d. Let r be the error of A's values. The cause is accepted if |r - d|^2 <= |r|^2 / 2: more than half of
# the squared error disappears with it.
#
# Chance can't do that. It would need r, which is only rounding, to lie within 45 degrees of d. For n independently
# rounded numbers the probability is at most 2^(-(n + 1) / 2), which is `RISK` at n = 39. The numbers of a vector share
# errors, so n counts vectors, not entries. A constant that one side stores with fewer digits is no cause: causes ask
# numbers to differ by more. The cause `rounding` is not tried, nor, if the dtypes of the sides differ, the causes for
# unequal weights.


def shows(before: SegmentGap, after: SegmentGap) -> bool:
    """Return whether a change removes at least half of the squared error of a program's values, which is not 0.

    Args:
        before: distance from B's values without the change.
        after: distance with it.
    """
    return before.size > 0.0 and after.size**2 <= MOST_SQUARES_LEFT * before.size**2


def causes_below_rounding(segment: Segment, sides: Sides, causes: Causes) -> Explained:
    """Find causes over a segment whose entries each agree within rounding, while all together show a difference.

    A cause counts if it removes more than half of the squared error. Segments of fewer than 39 vectors are not
    searched.

    Args:
        segment: segment over which A's program gives B's values within rounding.
        sides: both programs.
        causes: by name, functions that yield suspicions about two programs; tried in order.

    Returns:
        The causes and A's program with them; no cause and A's own program if none is visible.
    """
    before = segment_gap(segment, sides.a)
    found = Explained((), sides.a, before, before)
    if math.prod(segment.target.shape[:3]) < VECTORS:
        return found
    rounded = ROUNDED if sides.a.dtype == sides.b.dtype else (*ROUNDED, *OF_WEIGHTS)
    asked = {name: suspect for name, suspect in causes.items() if name not in rounded}
    while found.after.size > 0.0:
        sharper = replace(segment, most=math.sqrt(MOST_SQUARES_LEFT) * found.after.size, known=[])
        more = explain_segment(sharper, replace(sides, a=found.program), asked)
        if not more.after.within:
            break
        found = Explained(
            (*found.causes, *more.causes), more.program, before, segment_gap(segment, more.program),
            (*found.applied, *more.applied),
        )  # fmt: skip
    return found
