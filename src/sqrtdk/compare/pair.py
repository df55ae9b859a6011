"""One pair of calls: their programs, what differs stage by stage, and the causes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.addends import told_alike
from sqrtdk.compare.align import in_order
from sqrtdk.compare.completing import TIGHT, Told, completed
from sqrtdk.compare.compute import dtype_of
from sqrtdk.compare.explain import UNKNOWN, Causes, Explained, explain, faint, first_stage, lost_stage, shows
from sqrtdk.compare.infer_vectors import with_known_norm
from sqrtdk.compare.numbers import held
from sqrtdk.compare.observed import NAMES, Seen, observe
from sqrtdk.compare.precision import Precision, unit
from sqrtdk.compare.program import Program
from sqrtdk.compare.records import CANCELS, StageDiff
from sqrtdk.compare.segments import Gap, Precisions, Segment, gap, segments, whole
from sqrtdk.compare.stages import hidden_rows, of_formula
from sqrtdk.compare.suspect import Sides, way_of, with_way
from sqrtdk.compare.unknown_steps import (
    Direct,
    Passed,
    compare_directly,
    output_differs,
    outputs_alike,
    past_unknown,
    same_output,
)
from sqrtdk.tracing.tensors import CallTensors

ROUNDINGS = {"scale": 1, "softcap": 3, "bias": 1, "mask": 1}  # of the logits, where each is an operation of its own
Parts = list[tuple[Segment, Explained]]


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """What a pair is, apart from what comes in.

    Attributes:
        same: it does the same to the same input; None where that could not be judged.
        parts: every segment with its causes.
        stages: every stage but the input.
        before: how far the output is off without causes.
        after: with all of them.
        reason: why it could not be judged.
        sides: the programs.
        seen: q, k and v of B, completed.
        rows: (B, L), True for those that were compared: they see a key on both sides.
        strangers: their shapes are not those of one attention.
    """

    same: bool | None
    parts: tuple[tuple[Segment, Explained], ...] = ()
    stages: tuple[StageDiff, ...] = ()
    before: Gap | None = None
    after: Gap | None = None
    reason: str | None = None
    sides: Sides | None = None
    seen: Mapping[str, Seen] | None = None
    rows: Tensor | None = None
    strangers: bool = False


def judge(
    a: CallTensors,
    b: CallTensors,
    causes: Causes,
    earlier: Sides | None = None,
    declared: tuple[str, str] = ("", ""),
    kv_scale: float | None = None,
) -> Judged:
    """Compare what two calls do to one input: B's own at every stage, through A's program.

    `earlier` are the programs of the pair before this one, `declared` what declares the scale of A and of B, `kv_scale`
    is the fixed scale of a quantised cache.
    """
    reason = _unread(a, b)
    if reason is not None:
        return Judged(None, reason=reason)
    reason = _unlike_shapes(a, b)
    if reason is not None:
        return Judged(None, reason=reason, strangers=True)
    a, b = in_order(a), in_order(b)
    seen_a, seen_b = observe(a, kv_scale), observe(b, kv_scale)
    reason = _unlike_heads(seen_a, seen_b)
    if reason is not None:
        return Judged(None, reason=reason, strangers=True)
    first = (None, None) if earlier is None else (earlier.a.formula, earlier.b.formula)
    told = completed(a, b, seen_a, seen_b, first)
    (program_a, program_b), seen_b = (_rounded_norms(*told), _rounded_norms(*reversed(told))), told[1].seen
    seen_b = {name: replace(seen, alike=_alike(told[0].seen[name], seen)) for name, seen in seen_b.items()}
    precisions = Precisions(precision_of(a), precision_of(b))
    program_a, program_b = _added_alike(program_a, program_b)
    passed = past_unknown(program_a, program_b, told[0].seen, seen_b)
    program_a, program_b, seen_b = passed.after.a, passed.after.b, passed.after.seen
    sides = Sides(
        a=program_a,
        b=program_b,
        head_dim=seen_b["query"].used.shape[-1],
        model_dim=_model_dim(seen_a) or _model_dim(seen_b),
        heads=seen_b["query"].used.shape[1],
        self_attention=seen_b["query"].used.shape[2] == seen_b["key"].used.shape[2],
        declared_a=declared[0],
        declared_b=declared[1],
    )
    rows = ~(hidden_rows(program_a.formula, *_sizes(b)) | hidden_rows(program_b.formula, *_sizes(b)))
    every = segments(b, seen_b, program_a, precisions, rows)
    told = [replace(side, program=program) for side, program in zip(told, (program_a, program_b), strict=True)]
    direct = compare_directly(told, program_a, {part.name for part in every}, rows)
    if program_a.formula is None:
        return _without_formula(told, sides, every, direct, causes, rows)
    whole_way = whole(b, seen_b, program_a, precisions, rows, every=every)
    before = gap(whole_way, program_a)
    if None in (a.terms, b.terms) and outputs_alike(told, rows, TIGHT):
        before = replace(before, within=True)  # a formula that was found on numbers may be off by their rounding
    front = segments(b, passed.before.seen, passed.before.a, precisions, rows) if passed.names else []
    alike = before.within and all(gap(part, passed.before.a).within for part in front if _of(part, passed))
    parts, program = _in_parts(front, every, passed, sides, None if alike else causes)
    half = any(unit(p.dtype) > unit(torch.float32) for p in precisions)
    if alike and half and None not in (a.terms, b.terms) and not passed.names:
        weak, changed = _explained(every, sides, causes, weak=True)
        both = whole(b, seen_b, program_a, precisions, rows, changed, every)
        if changed is not program_a and shows(without := gap(both, program_a), gap(both, changed)):
            before, parts, program, alike = replace(without, within=False), weak, changed, False
            whole_way = whole(b, seen_b, changed, precisions, rows)
    elif not alike:
        alike = all(explained.before.within for _, explained in parts)
    by_way = None if alike else _by_the_way(whole_way, sides, parts, causes)
    if by_way is not None:
        parts, program = by_way
    after = before if alike else gap(whole_way, program)
    if before.within and not alike:  # what differs is before a step that the whole way does not go through
        most = max((found for part, found in parts if _of(part, passed)), key=lambda found: found.before.size)
        before, after = most.before, most.after
    stages = []
    for segment, explained in parts:
        stages += _stages(segment, explained, sides, alike or (by_way is not None and not explained.causes))
    if direct.parts and alike and same_output(told, rows):
        # q and k that differ alike, by a permutation say, leave their product as it is
        direct = replace(direct, parts=tuple((part, replace(found, causes=())) for part, found in direct.parts))
    cancels = not any(explained.causes for _, explained in direct.parts)
    stages += [stage for segment, explained in direct.parts for stage in _stages(segment, explained, sides, cancels)]
    same: bool | None = alike and cancels
    reason = None
    if same and direct.reasons:
        same, reason = None, "; ".join(direct.reasons)
    return Judged(same, (*direct.parts, *parts), tuple(stages), before, after, reason, sides, seen_b, rows)


def _by_the_way(whole_way: Segment, sides: Sides, parts: Parts, causes: Causes) -> tuple[Parts, Program] | None:
    """What the causes of the whole way are, where a part is left with what is not known and the whole way is not.

    Features of q and k that stand in another order differ at every stage, and make no difference to their product.
    """
    if not any(cause.name == UNKNOWN for _, explained in parts for cause in explained.causes):
        return None
    found = explain(whole_way, sides, causes)
    if not found.after.within or not found.causes:
        return None
    left, told = list(found.causes), []
    for segment, explained in parts:
        own = [cause for cause in left if cause.stage in segment.stages and not explained.before.within]
        left = [cause for cause in left if cause not in own]
        told.append((segment, replace(explained, causes=tuple(own))))
    return None if left else (told, found.program)


def _rounded_norms(own: Told, other: Told) -> Program:
    """A side's program with the numbers of the other's norms in those of its own that were rounded."""
    program = own.program
    for name in NAMES:
        known = with_known_norm(way_of(program, name), own.seen[name], way_of(other.program, name))
        program = with_way(program, name, known)
    return program


def _explained(
    every: list[Segment], sides: Sides, causes: Causes | None, *, weak: bool = False
) -> tuple[Parts, Program]:
    """Every segment with its causes, and A's program with all of them; no causes are asked where there are none.

    With `weak` those are asked too of a segment that is within rounding.
    """
    parts = []
    program = sides.a
    for segment in every:
        if causes is None:
            # what differs and makes no difference to the output needs no cause
            own = gap(segment, program)
            explained = Explained((), program, own, own)
        else:
            explained = explain(segment, replace(sides, a=program), causes)
            if weak and explained.before.within:
                explained = faint(segment, replace(sides, a=program), causes)
        program = explained.program
        parts.append((segment, explained))
    return parts, program


def _in_parts(
    front: list[Segment], every: list[Segment], passed: Passed, sides: Sides, causes: Causes | None
) -> tuple[Parts, Program]:
    """The segments before steps that are not known, then those behind them with what was found of all other ways."""
    if not passed.names:
        return _explained(every, sides, causes)
    ahead, program = _explained(front, replace(sides, a=passed.before.a, b=passed.before.b), causes)
    found = sides.a
    for name in NAMES:
        if name not in passed.names:
            found = with_way(found, name, way_of(program, name))
    behind = [part for part in every if part.name == "output" or _of(part, passed)]
    parts, program = _explained(behind, replace(sides, a=found), causes)
    return [*parts, *ahead], program


def _of(part: Segment, passed: Passed) -> bool:
    """Whether a segment is of a way that has two parts."""
    return part.name.removesuffix(" used") in passed.names


def _without_formula(
    told: list[Told], sides: Sides, every: list[Segment], direct: Direct, causes: Causes, rows: Tensor
) -> Judged:
    """A pair of which what makes weights of the product is not known: q, k and v, and the outputs where these agree."""
    seen = told[1].seen
    alike = outputs_alike(told, rows)
    parts, _ = _explained(every, sides, None if alike else causes)
    parts = [*direct.parts, *parts]
    reason = _unknown(told)
    if alike:
        same: bool | None = True
    elif alike is False:
        parts.append(output_differs(told, rows, sides.a))
        same = False
    else:
        same = False if any(explained.causes for _, explained in parts) else None
    stages = [stage for segment, explained in parts for stage in _stages(segment, explained, sides, bool(alike))]
    if alike is not False:
        stages.append(StageDiff("weights", None, reason=reason))
    last = parts[-1][1].before if alike is False else None
    reason = "" if same is not None else reason
    return Judged(same, tuple(parts), tuple(stages), last, last, reason or None, sides, seen, rows)


def _sizes(call: CallTensors) -> tuple[int, int]:
    return call.output.shape[0], call.output.shape[2]


def _unknown(told: list[Told]) -> str:
    missing = [f"{label}: {side.call.missing}" for label, side in zip("AB", told, strict=True) if side.call.missing]
    if missing:
        return "; ".join(missing)
    label, side = next((x, y) for x, y in zip("AB", told, strict=True) if y.program.formula is None)
    return f"the formula of {label} is not known: {', '.join(side.program.unknown)}"


def _alike(one: Seen, other: Seen) -> bool:
    """Whether two projections had the same input and gave the same, bit for bit, each by its own record."""
    pairs = [(one.input, other.input), (one.projected, other.projected)]
    known = not (one.borrowed or other.borrowed) and one.weight is not None and other.weight is not None
    return known and all(x is not None and y is not None and torch.equal(x.double(), y.double()) for x, y in pairs)


def _unread(a: CallTensors, b: CallTensors) -> str | None:
    for label, call in (("A", a), ("B", b)):
        vectors = (call.query.values, call.key.values, call.value.values, call.output)
        if call.missing is not None and any(x.dim() != 4 or not x.numel() for x in vectors):
            return f"{label}: {call.missing}"
    return None


def _unlike_shapes(a: CallTensors, b: CallTensors) -> str | None:
    one, other = a.query.values.shape, b.query.values.shape
    if one[1] != other[1]:
        return f"A has {one[1]} heads, B {other[1]}"
    if one != other or a.output.shape != b.output.shape:
        return f"q of A is {tuple(one)}, of B {tuple(other)}; outputs {tuple(a.output.shape)}, {tuple(b.output.shape)}"
    return None


def _unlike_heads(a: Mapping[str, Seen], b: Mapping[str, Seen]) -> str | None:
    for name in ("key", "value"):
        one, other = a[name].used.shape, b[name].used.shape
        if one[1] != other[1] and one[1] != 1 and other[1] != 1:
            return f"{name} of A has {one[1]} heads, of B {other[1]}"
    return None


def _added_alike(a: Program, b: Program) -> tuple[Program, Program]:
    """The programs, with what their formulas add to the logits told apart alike."""
    if a.formula is None or b.formula is None:
        return a, b
    one, other = told_alike(a.formula, b.formula, held(a.dtype, b.dtype))
    return replace(a, formula=one), replace(b, formula=other)


def _model_dim(seen: Mapping[str, Seen]) -> int | None:
    entering = seen["query"].input
    return None if entering is None else entering.shape[-1]


def precision_of(call: CallTensors) -> Precision:
    """In which dtypes a call computes, and how often its logits were rounded."""
    steps = 2 if call.terms is None else 1 + sum(ROUNDINGS.get(term.name, 0) for term in call.terms)
    return Precision(dtype_of(call.dtype), dtype_of(call.logits_dtype), dtype_of(call.weights_dtype), max(2, steps))


def _stages(segment: Segment, explained: Explained, sides: Sides, alike: bool) -> list[StageDiff]:
    before = explained.before
    differing = {cause.stage for cause in explained.causes}
    reason = CANCELS if alike and not before.within else None
    if segment.name != "output":
        found = []
        lost = lost_stage(segment, sides)
        for stage in dict.fromkeys((*segment.stages, *([] if before.within or differing else [lost]))):
            differs = not before.within and (stage in differing or (not differing and stage == lost))
            told = reason if differs else None
            # of the stages beside the one that differs: what is left where that one is put right
            size = before if differs or before.within else explained.after if explained.after.within else None
            largest, allowed = (None, None) if size is None else (size.largest, size.allowed)
            found.append(StageDiff(stage, not differs, largest, allowed, reason=told))
        return found
    stages = [of_formula(stage, sides) for stage in segment.stages[:-1]]
    stages = [replace(stage, same=stage.stage not in differing) for stage in stages]
    return [*stages, StageDiff("output", before.within, before.largest, before.allowed, reason=reason)]


def cancelled_within(judged: Judged) -> Judged:
    """A pair that differs on the way and gives the same: its stages make no difference."""
    caused = {cause.stage for _, explained in judged.parts for cause in explained.causes}
    stages = tuple(
        replace(stage, same=False, reason=CANCELS) if stage.same is False or stage.stage in caused else stage
        for stage in judged.stages
        if stage.stage != "output"
    )
    parts = tuple((segment, replace(explained, causes=())) for segment, explained in judged.parts)
    after = judged.after if judged.after is not None and judged.after.within else None
    return replace(judged, same=True, parts=parts, stages=stages, before=after, after=after)


def first_difference(judged: Judged) -> str | None:
    """The first stage that differs; none where what differs there cancels."""
    known = first_stage([stage.stage for stage in judged.stages if stage.same is False and not stage.cancels])
    return known or first_stage([cause.stage for _, explained in judged.parts for cause in explained.causes])
