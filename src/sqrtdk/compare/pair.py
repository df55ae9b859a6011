"""One pair of calls: their programs, what differs stage by stage, and the causes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.completing import TIGHT, Told, completed, near, with_way
from sqrtdk.compare.compute import dtype_of
from sqrtdk.compare.direct import Direct, compare_directly, output_differs, outputs_alike, same_output
from sqrtdk.compare.explain import Causes, Explained, explain, first_stage
from sqrtdk.compare.heads import in_order
from sqrtdk.compare.observed import NAMES, Seen, observe
from sqrtdk.compare.precision import Precision
from sqrtdk.compare.program import Opaque, Program, Way
from sqrtdk.compare.records import StageDiff
from sqrtdk.compare.segments import Gap, Precisions, Segment, gap, segments, way_of, whole
from sqrtdk.compare.stages import hidden_rows, of_formula
from sqrtdk.compare.suspect import Sides
from sqrtdk.tracing.tensors import CallTensors

ROUNDINGS = {"scale": 1, "softcap": 3, "bias": 1, "mask": 1}  # of the logits, where each is an operation of its own
ONE_INPUT = 128.0  # roundings of the coarser dtype within which two inputs are taken for one
CANCELS = "differs and makes no difference: by the whole way, from the input to the output, both are the same"


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
    """

    same: bool | None
    parts: tuple[tuple[Segment, Explained], ...] = ()
    stages: tuple[StageDiff, ...] = ()
    before: Gap | None = None
    after: Gap | None = None
    reason: str | None = None
    sides: Sides | None = None
    seen: Mapping[str, Seen] | None = None


def judge(a: CallTensors, b: CallTensors, causes: Causes, earlier: Sides | None = None) -> Judged:
    """Compare what two calls do to one input: B's own at every stage, through A's program.

    `earlier` are the programs of the pair before this one.
    """
    reason = _unfit(a, b)
    if reason is not None:
        return Judged(None, reason=reason)
    a, b = in_order(a), in_order(b)
    seen_a, seen_b = observe(a), observe(b)
    reason = _unlike_heads(seen_a, seen_b)
    if reason is not None:
        return Judged(None, reason=reason)
    first = (None, None) if earlier is None else (earlier.a.formula, earlier.b.formula)
    told = completed(a, b, seen_a, seen_b, first)
    (program_a, program_b), seen_b = (side.program for side in told), told[1].seen
    precisions = Precisions(precision_of(a), precision_of(b))
    program_a, program_b, seen_b = _past_unknown(program_a, program_b, told[0].seen, seen_b)
    sides = Sides(
        a=program_a,
        b=program_b,
        head_dim=seen_b["query"].used.shape[-1],
        model_dim=_model_dim(seen_a) or _model_dim(seen_b),
        heads=seen_b["query"].used.shape[1],
        self_attention=seen_b["query"].used.shape[2] == seen_b["key"].used.shape[2],
    )
    rows = ~(hidden_rows(program_a.formula, *_sizes(b)) | hidden_rows(program_b.formula, *_sizes(b)))
    every = segments(b, seen_b, program_a, precisions, rows)
    told = [replace(side, program=program) for side, program in zip(told, (program_a, program_b), strict=True)]
    direct = compare_directly(told, program_a, {part.name for part in every}, rows)
    if program_a.formula is None:
        return _without_formula(told, sides, every, direct, causes, rows)
    whole_way = whole(b, seen_b, program_a, precisions, rows)
    before = gap(whole_way, program_a)
    if None in (a.terms, b.terms) and outputs_alike(told, rows, TIGHT):
        before = replace(before, within=True)  # a formula that was found on numbers may be off by their rounding
    parts, program = _explained(every, sides, None if before.within else causes)
    alike = before.within or all(explained.before.within for _, explained in parts)
    after = before if alike else gap(whole_way, program)
    stages = [stage for segment, explained in parts for stage in _stages(segment, explained, sides, alike)]
    if direct.parts and alike and same_output(told, rows):
        # q and k that differ alike, by a permutation say, leave their product as it is
        direct = replace(direct, parts=tuple((part, replace(found, causes=())) for part, found in direct.parts))
    cancels = not any(explained.causes for _, explained in direct.parts)
    stages += [stage for segment, explained in direct.parts for stage in _stages(segment, explained, sides, cancels)]
    same: bool | None = alike and cancels
    reason = None
    if same and direct.reasons:
        same, reason = None, "; ".join(direct.reasons)
    return Judged(same, (*direct.parts, *parts), tuple(stages), before, after, reason, sides, seen_b)


def _explained(
    every: list[Segment], sides: Sides, causes: Causes | None
) -> tuple[list[tuple[Segment, Explained]], Program]:
    """Every segment with its causes, and A's program with all of them; no causes are asked where there are none."""
    parts = []
    program = sides.a
    for segment in every:
        if causes is None:
            # what differs and makes no difference to the output needs no cause
            own = gap(segment, program)
            explained = Explained((), program, own, own)
        else:
            explained = explain(segment, replace(sides, a=program), causes)
        program = explained.program
        parts.append((segment, explained))
    return parts, program


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
    return Judged(same, tuple(parts), tuple(stages), last, last, None if same is not None else reason, sides, seen)


def _sizes(call: CallTensors) -> tuple[int, int]:
    return call.output.shape[0], call.output.shape[2]


def _unknown(told: list[Told]) -> str:
    missing = [f"{label}: {side.call.missing}" for label, side in zip("AB", told, strict=True) if side.call.missing]
    if missing:
        return "; ".join(missing)
    label, side = next((x, y) for x, y in zip("AB", told, strict=True) if y.program.formula is None)
    return f"the formula of {label} is not known: {', '.join(side.program.unknown)}"


def _unfit(a: CallTensors, b: CallTensors) -> str | None:
    for label, call in (("A", a), ("B", b)):
        vectors = (call.query.values, call.key.values, call.value.values, call.output)
        if call.missing is not None and any(x.dim() != 4 or not x.numel() for x in vectors):
            return f"{label}: {call.missing}"
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


def _near(one: Tensor | None, other: Tensor | None) -> bool:
    """`near`, in the roundings of the coarser of the dtypes that the two are held in."""
    dtypes = [x.dtype for x in (one, other) if x is not None and x.is_floating_point()]
    return near(one, other, max(dtypes, key=lambda x: torch.finfo(x).eps, default=torch.float32), ONE_INPUT)


def _past_unknown(
    a: Program, b: Program, seen_a: Mapping[str, Seen], seen_b: Mapping[str, Seen]
) -> tuple[Program, Program, dict[str, Seen]]:
    """Ways that have one and the same step that is not known begin after it, with what B had there.

    Where both sides had the same input, what they had there is compared first: a step that gave something else stays.
    """
    seen = dict(seen_b)
    for name in NAMES:
        ways = way_of(a, name), way_of(b, name)
        last = [max((i for i, step in enumerate(way.steps) if isinstance(step, Opaque)), default=None) for way in ways]
        if last[0] is None or last[0] != last[1]:
            continue
        labels = [_labels(way, last[0]) for way in ways]
        points = [_after(vector[name], last[0]) for vector in (seen_a, seen_b)]
        if labels[0] != labels[1] or points[1] is None:
            continue
        if _near(seen_a[name].input, seen_b[name].input) and not _near(points[0], points[1]):
            continue
        seen[name] = replace(seen_b[name], projected=points[1].double(), input=None, borrowed=False)
        a, b = (
            with_way(program, name, replace(way, affine=None, steps=way.steps[last[0] + 1 :]))
            for program, way in zip((a, b), ways, strict=True)
        )
    return a, b, seen


def _labels(way: Way, last: int) -> list[str]:
    return [step.name if isinstance(step, Opaque) else type(step).__name__ for step in way.steps[: last + 1]]


def _after(seen: Seen, step: int) -> Tensor | None:
    return seen.steps[step].values if step < len(seen.steps) else None


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
        for stage in segment.stages:
            differs = not before.within and (stage in differing or (not differing and stage == segment.stages[0]))
            told = reason if differs else None
            found.append(StageDiff(stage, not differs, before.largest, before.allowed, reason=told))
        return found
    stages = [of_formula(stage, sides) for stage in segment.stages[:-1]]
    stages = [replace(stage, same=stage.stage not in differing) for stage in stages]
    return [*stages, StageDiff("output", before.within, before.largest, before.allowed, reason=reason)]


def first_difference(judged: Judged) -> str | None:
    """The first stage that differs; none where what differs there cancels."""
    known = first_stage([stage.stage for stage in judged.stages if stage.same is False and stage.reason is None])
    return known or first_stage([cause.stage for _, explained in judged.parts for cause in explained.causes])
