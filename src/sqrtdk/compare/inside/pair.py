"""Judges one pair of calls: their programs, the differences stage by stage, and their causes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.align import in_order, other_shapes
from sqrtdk.compare.infer.evidence import SearchWork
from sqrtdk.compare.infer.missing import KERNEL_ROUNDINGS, KnownSide, complete_sides
from sqrtdk.compare.infer.vectors import with_known_step
from sqrtdk.compare.inside.addends import split_alike
from sqrtdk.compare.inside.call_numbers import ObservedVector, amplitudes_apart, observe, projected_alike
from sqrtdk.compare.inside.channels import in_one_layout, with_known_rows
from sqrtdk.compare.inside.compute import dtype_by_name
from sqrtdk.compare.inside.explain import (
    Causes,
    Explained,
    causes_below_rounding,
    explain_segment,
    first_stage,
    helpful_parts,
    mends,
    shows,
    stage_of_unexplained,
    without_fixes,
)
from sqrtdk.compare.inside.program import QK, QKV, Program, RoundingStep
from sqrtdk.compare.inside.segments import Segment, SegmentGap, joined_segments, segment_gap, segments
from sqrtdk.compare.inside.stages import hidden_rows, stage_text
from sqrtdk.compare.inside.suspect import Sides, path_of, with_path
from sqrtdk.compare.inside.unknown_steps import (
    ExplainedSegments,
    compare_directly,
    differs,
    equal_in_roundings,
    outputs_alike,
    past_unknown,
    same_input,
    told_once,
)
from sqrtdk.compare.numbers import constant_tolerance
from sqrtdk.compare.records import CANCELS, UNKNOWN_CAUSE, StageDiff
from sqrtdk.compare.rounding.precision import Precision, Precisions, rounding_unit
from sqrtdk.messages import Message, joined
from sqrtdk.tracing.tensors import CallTensors

TERM_ROUNDINGS = {"scale": 1, "softcap": 3, "bias": 1, "mask": 1}  # of the logits, by each term in eager code


@dataclass(frozen=True, slots=True, eq=False)
class JudgedPair:
    """The judgement of a pair, apart from its input.

    Attributes:
        same: whether both do the same to the same input; None if that could not be judged.
        parts: every segment with its causes.
        stages: every stage except the input.
        before: error of the output without causes.
        after: error of the output with all causes.
        reason: why the pair could not be judged.
        sides: the programs.
        seen: q, k and v of B, completed.
        rows: (B, L), True for compared rows: those that see a key on both sides.
        strangers: the shapes can't belong to one attention.
    """

    same: bool | None
    parts: tuple[tuple[Segment, Explained], ...] = ()
    stages: tuple[StageDiff, ...] = ()
    before: SegmentGap | None = None
    after: SegmentGap | None = None
    reason: str | None = None
    sides: Sides | None = None
    seen: Mapping[str, ObservedVector] | None = None
    rows: Tensor | None = None
    strangers: bool = False


def judge_pair(
    a: CallTensors,
    b: CallTensors,
    causes: Causes,
    earlier: Sides | None = None,
    declared: tuple[str, str] = ("", ""),
    kv_scale: float | None = None,
    work: SearchWork | None = None,
) -> JudgedPair:
    """Compare what two calls do to the same input, by running A's program from B's values at every stage.

    `earlier` are the programs of the previous pair, `declared` names what declares the scale of A and of B ("" if
    nothing), and `kv_scale` is the fixed scale of a quantised cache. `work` is what the searches of all pairs may
    compute. A pair that can't be compared is returned with `same` None and a reason.
    """
    reason = _unread(a, b)
    if reason is not None:
        return JudgedPair(None, reason=reason)
    a, b = in_order(a), in_order(b)
    seen_a, seen_b = amplitudes_apart((a, b), (observe(a, kv_scale), observe(b, kv_scale)))
    reason = _unlike(a, b, seen_a, seen_b)
    if reason is not None:
        return JudgedPair(None, reason=reason, strangers=True)

    told, layout_open = in_one_layout(_complete_pair(a, b, seen_a, seen_b, earlier, work), earlier)
    seen = {name: replace(own, alike=projected_alike(told[0].seen[name], own)) for name, own in told[1].seen.items()}
    ahead, behind, passed = past_unknown(told[0].program, told[1].program, told[0].seen, seen)
    told = [replace(side, program=program) for side, program in zip(told, (behind.a, behind.b), strict=True)]
    query, entering = behind.seen["query"].used, (seen_a["query"].input, seen_b["query"].input)
    sides = Sides(
        a=behind.a,
        b=behind.b,
        head_dim=query.shape[-1],
        model_dim=next((x.shape[-1] for x in entering if x is not None), None),
        heads=query.shape[1],
        self_attention=query.shape[2] == behind.seen["key"].used.shape[2],
        declared_a=declared[0],
        declared_b=declared[1],
    )
    batch, _, length = b.output.shape[:3]
    rows = ~(hidden_rows(sides.a.formula, batch, length) | hidden_rows(sides.b.formula, batch, length))
    precisions: Precisions = precision_of(a), precision_of(b)
    every = segments(b, behind.seen, sides.a, precisions, rows)
    direct, reasons = compare_directly(told, sides.a, {part.name for part in every}, rows)
    if sides.a.formula is None:
        return _without_formula(told, sides, every, direct, causes, rows)

    # the whole path, and every part of it
    recorded = None not in (a.terms, b.terms)
    whole_way = joined_segments(every, sides.a)
    before = segment_gap(whole_way, sides.a)
    if not recorded and outputs_alike(told, rows, KERNEL_ROUNDINGS):
        # a fitted formula may be off by the rounding of the numbers to which it was fitted
        before = replace(before, within=True)
    front = segments(b, ahead.seen, ahead.a, precisions, rows) if passed else []
    split = [part for part in front if _is_segment_of(part, passed)]
    same = before.within and all(segment_gap(part, ahead.a).within for part in split)
    asked = None if same else causes
    if passed:  # first the paths before unknown steps, then the paths behind them with the causes found for all others
        parts, program = _explained(front, replace(sides, a=ahead.a, b=ahead.b), asked)
        found = sides.a
        for name in QKV:
            if name not in passed:
                found = with_path(found, name, path_of(program, name))
        last = [part for part in every if part.name == "output" or _is_segment_of(part, passed)]
        later, program = _explained(last, replace(sides, a=found), asked)
        parts = [*later, *parts]
    else:
        parts, program = _explained(every, sides, asked)
    if not same:
        same = all(explained.before.within for _, explained in parts)
    elif recorded and not passed and any(rounding_unit(p.dtype) > rounding_unit(torch.float32) for p in precisions):
        # In half precision single numbers may hide a cause; all numbers together may show it.
        weak, changed = _explained(every, sides, causes, weak=True)
        both = joined_segments(every, sides.a, changed)
        if changed is not sides.a and shows(without := segment_gap(both, sides.a), segment_gap(both, changed)):
            before, parts, program, same = replace(without, within=False), weak, changed, False
            whole_way = joined_segments(segments(b, behind.seen, changed, precisions, rows), changed)
    by_way = None if same else _by_the_way(whole_way, sides, parts, causes)
    if by_way is not None:
        parts, program = by_way
    after = before if same else segment_gap(whole_way, program)
    if not same and not passed and not after.within and by_way is None:
        told_apart = helpful_parts(whole_way, sides.a, parts)
        parts = [(segment, found) for (segment, _), found in zip(parts, told_apart, strict=True)]
        program = parts[-1][1].program if parts else program
        after = segment_gap(whole_way, program)
    if before.within and not same:  # the difference is before an unknown step, which the whole path leaves out
        most = max(
            (found for part, found in parts if _is_segment_of(part, passed)), key=lambda found: found.before.size
        )
        before, after = most.before, most.after
    caused = frozenset[str]().union(*(explained.stages for _, explained in parts))
    stages = []
    for segment, explained in parts:
        elsewhere = () if explained.causes or passed else caused.intersection(segment.stages)
        cancelled = same or (by_way is not None and not explained.causes and not elsewhere)
        stages += _stages(segment, explained, sides, cancelled, elsewhere)

    # vectors that no segment covers
    if direct and same and same_input(told, rows) and equal_in_roundings(told, "output", rows):
        # q and k permuted alike differ, but their product stays the same
        direct = [(part, replace(found, causes=())) for part, found in direct]
    lost = [segment.name.removesuffix(" used") for segment, explained in direct if explained.causes]
    if lost and not passed and before.within:  # from B's vectors nothing differs: to the output from A's own
        whole_way = replace(whole_way, seen={**whole_way.seen, **{x: told[0].seen[x] for x in lost}}, known=[])
        before = segment_gap(whole_way, sides.a)
        if not all(explained.after.within for _, explained in direct):
            after = segment_gap(whole_way, program)
        if before.within:  # they differ alike, and nothing comes of it
            direct, lost = [(part, replace(found, causes=())) for part, found in direct], []
    if not same and not passed and not before.within:
        named = [cause for _, explained in parts for cause in explained.causes]
        if not mends(whole_way, sides, causes, named):
            parts = [(part, without_fixes(explained)) for part, explained in parts]
    cancels, direct = not lost, told_once(direct)
    for segment, explained in direct:
        stages += _stages(segment, explained, sides, cancels)
    if layout_open:
        reasons = [*reasons, Message("compare.vector.channels")]
    known = None if same and cancels and reasons else same and cancels
    reason = joined(reasons) if known is None else None
    return JudgedPair(known, (*direct, *parts), tuple(stages), before, after, reason, sides, behind.seen, rows)


def _complete_pair(
    a: CallTensors,
    b: CallTensors,
    seen_a: Mapping[str, ObservedVector],
    seen_b: Mapping[str, ObservedVector],
    earlier: Sides | None,
    work: SearchWork | None,
) -> list[KnownSide]:
    """Return both sides completed from each other, with norms and added terms read in each other's terms."""
    first = (None, None) if earlier is None else (earlier.a.formula, earlier.b.formula)
    told = with_known_rows(complete_sides(a, b, seen_a, seen_b, first, work))
    one, other = _rounded_steps(*told), _rounded_steps(*reversed(told))
    if one.formula is not None and other.formula is not None:
        formulas = split_alike(one.formula, other.formula, constant_tolerance(one.dtype, other.dtype))
        one, other = replace(one, formula=formulas[0]), replace(other, formula=formulas[1])
    return [replace(side, program=program) for side, program in zip(told, (one, other), strict=True)]


def _rounded_steps(own: KnownSide, other: KnownSide) -> Program:
    """Return a side's program in which steps followed by a cast have the numbers of steps that no cast followed."""
    program = own.program
    for name in QKV:
        known = [*path_of(other.program, name).steps]
        for beside in (path_of(program, vector).steps for vector in QK if name in QK and vector != name):
            known += beside if not any(isinstance(step, RoundingStep) for step in beside) else ()
        program = with_path(program, name, with_known_step(path_of(program, name), own.seen[name], known))
    return program


def _explained(
    every: list[Segment], sides: Sides, causes: Causes | None, *, weak: bool = False
) -> tuple[ExplainedSegments, Program]:
    """Return every segment with its causes, and A's program with all causes; None as `causes` asks for none.

    With `weak`, causes are also searched over segments that are within rounding.
    """
    parts: ExplainedSegments = []
    program = sides.a
    for segment in every:
        here, before = replace(sides, a=program), segment_gap(segment, program)
        if causes is None:  # a difference that does not reach the output needs no cause
            explained = Explained((), program, before, before)
        else:
            explained = (causes_below_rounding if weak and before.within else explain_segment)(segment, here, causes)
        program = explained.program
        parts.append((segment, explained))
    return parts, program


def _by_the_way(
    whole_way: Segment, sides: Sides, parts: ExplainedSegments, causes: Causes
) -> tuple[ExplainedSegments, Program] | None:
    """Return the parts with the causes of the whole path, if single parts have unknown causes and the whole has none.

    Features of q and k in another order differ at every stage but leave their product unchanged.
    """
    if not any(cause.name == UNKNOWN_CAUSE for _, explained in parts for cause in explained.causes):
        return None
    found = explain_segment(whole_way, sides, causes)
    if not found.after.within or not found.causes:
        return None
    left = list(found.causes)
    told: ExplainedSegments = []
    for segment, explained in parts:
        own = [cause for cause in left if cause.stage in segment.stages and not explained.before.within]
        left = [cause for cause in left if cause not in own]
        told.append((segment, replace(explained, causes=tuple(own), applied=found.applied if own else ())))
    return None if left else (told, found.program)


def _is_segment_of(part: Segment, names: list[str]) -> bool:
    """Return whether a segment belongs to one of these vectors."""
    return part.name.removesuffix(" used") in names


def _without_formula(
    told: list[KnownSide], sides: Sides, every: list[Segment], direct: ExplainedSegments, causes: Causes, rows: Tensor
) -> JudgedPair:
    """Judges a pair without a known formula: q, k and v, and the outputs if these agree."""
    same = outputs_alike(told, rows)
    parts, _ = _explained(every, sides, None if same else causes)
    parts = [*told_once(direct), *parts]
    if same is False:
        parts.append(differs(told, "output", ("weights", "output"), rows, sides.a))
    stages = [stage for segment, explained in parts for stage in _stages(segment, explained, sides, bool(same))]
    reason = _unknown(told)
    if same is not False:
        stages.append(StageDiff("weights", None, reason=reason))
    last = parts[-1][1].before if same is False else None
    if same is None and any(explained.causes for _, explained in parts):
        same = False
    told_why = reason if same is None else None
    return JudgedPair(same, tuple(parts), tuple(stages), last, last, told_why, sides, told[1].seen, rows)


def _unknown(told: list[KnownSide]) -> str:
    missing = [_of_side(label, side.call.missing) for label, side in zip("AB", told, strict=True) if side.call.missing]
    if missing:
        return joined(missing)
    label, side = next((x, y) for x, y in zip("AB", told, strict=True) if y.program.formula is None)
    unknown = Message("compare.formula.unknown_of", side=label, why=", ".join(side.program.unknown))
    return unknown if side.ended is None else joined([unknown, side.ended])


def _of_side(label: str, reason: str) -> Message:
    return Message("compare.pair.of_side", side=label, reason=reason)


def _unread(a: CallTensors, b: CallTensors) -> str | None:
    for label, call in (("A", a), ("B", b)):
        vectors = (call.query.values, call.key.values, call.value.values, call.output)
        if call.missing is not None and any(x.dim() != 4 or not x.numel() for x in vectors):
            return _of_side(label, call.missing)
    return None


def _unlike(
    a: CallTensors, b: CallTensors, seen_a: Mapping[str, ObservedVector], seen_b: Mapping[str, ObservedVector]
) -> str | None:
    """Return why two calls can't be one attention, by their shapes and equal heads; None if they can."""
    if (reason := other_shapes(a, b)) is not None:
        return reason
    for name in ("key", "value"):
        of_a, of_b = seen_a[name].used.shape[1], seen_b[name].used.shape[1]
        # one head of keys may be multi-query attention, which the other side repeats: k.expand(-1, Hq, -1, -1)
        if of_a != of_b and 1 not in (of_a, of_b):
            return Message("compare.pair.heads_of", part=name, heads=of_a, other=of_b)
    return None


def precision_of(call: CallTensors) -> Precision:
    """Return the dtypes in which a call computes, and how often its logits are rounded (at least twice)."""
    # the product itself is rounded once
    steps = 1 + sum(TERM_ROUNDINGS.get(term.name, 0) for term in call.terms or ())
    return Precision(
        dtype_by_name(call.dtype), dtype_by_name(call.logits_dtype), dtype_by_name(call.weights_dtype), max(2, steps)
    )


def _stages(
    segment: Segment, explained: Explained, sides: Sides, same: bool, elsewhere: Collection[str] = ()
) -> list[StageDiff]:
    """Return the stages of a segment; `elsewhere` are those with a cause that was found at another segment."""
    before, differing = explained.before, {cause.stage for cause in explained.causes}
    if elsewhere:  # the norm of k, wrong as that of q is: A's own program shows it
        own = segment_gap(segment, sides.a)
        before, differing = (before, differing) if own.within else (own, set(elsewhere))
    cancels = same and not before.within
    reason = Message(CANCELS) if cancels else None
    if segment.name == "output":
        stages = [replace(stage_text(stage, sides), same=stage not in differing) for stage in segment.stages[:-1]]
        output = StageDiff("output", before.within, before.largest, before.allowed, reason=reason, cancels=cancels)
        return [*stages, output]
    if not before.within and not differing:
        differing = {stage_of_unexplained(segment, sides)}
        stages_of = dict.fromkeys((*segment.stages, *differing))
    else:
        stages_of = dict.fromkeys(segment.stages)
    # next to the stage that differs, others show what is left once that one is corrected
    left = before if before.within else explained.after if explained.after.within else None
    found = []
    for stage in stages_of:
        wrong = not before.within and stage in differing
        size = before if wrong else left
        largest, allowed = (None, None) if size is None else (size.largest, size.allowed)
        plain = StageDiff(stage, not wrong, largest, allowed)
        found.append(replace(plain, reason=reason, cancels=cancels) if wrong else plain)
    return found


def cancelled_within(judged: JudgedPair) -> JudgedPair:
    """Return the judgement as the same, with its differing stages marked as not changing the output."""
    caused = {cause.stage for _, explained in judged.parts for cause in explained.causes}
    stages = tuple(
        replace(stage, same=False, reason=Message(CANCELS), cancels=True)
        if stage.same is False or stage.stage in caused
        else stage
        for stage in judged.stages
        if stage.stage != "output"
    )
    parts = tuple((segment, replace(explained, causes=())) for segment, explained in judged.parts)
    after = judged.after if judged.after is not None and judged.after.within else None
    return replace(judged, same=True, parts=parts, stages=stages, before=after, after=after)


def first_difference(judged: JudgedPair) -> str | None:
    """Return the first stage that differs and changes the output, or that has a cause; None if there is none."""
    known = first_stage([stage.stage for stage in judged.stages if stage.same is False and not stage.cancels])
    return known or first_stage([cause.stage for _, explained in judged.parts for cause in explained.causes])
