"""One pair of calls: their programs, what differs stage by stage, and the causes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.build import program_of
from sqrtdk.compare.compute import dtype_of
from sqrtdk.compare.explain import Causes, Explained, explain, first_stage
from sqrtdk.compare.heads import in_order
from sqrtdk.compare.infer_formula import infer
from sqrtdk.compare.infer_vectors import infer_way
from sqrtdk.compare.observed import NAMES, Seen, observe
from sqrtdk.compare.precision import Precision
from sqrtdk.compare.program import Formula, Opaque, Program, Way
from sqrtdk.compare.records import StageDiff
from sqrtdk.compare.segments import Gap, Precisions, Segment, gap, is_known, segments, way_of, whole
from sqrtdk.compare.stages import hidden_rows, of_formula
from sqrtdk.compare.suspect import Sides
from sqrtdk.tracing.tensors import CallTensors

ROUNDINGS = {"scale": 1, "softcap": 3, "bias": 1, "mask": 1}  # of the logits, where each is an operation of its own
_ALIKE = 64.0  # roundings of the coarser dtype within which two inputs are taken for one


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """What a pair is, apart from what comes in.

    Attributes:
        same: it does the same to the same input; None where that could not be judged.
        parts: every segment with its causes.
        stages: every stage but the input.
        output: the segment of the output before any cause, and with all.
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


def judge(a: CallTensors, b: CallTensors, causes: Causes) -> Judged:
    """Compare what two calls do to one input: B's own at every stage, through A's program."""
    reason = _unfit(a, b)
    if reason is not None:
        return Judged(None, reason=reason)
    a, b = in_order(a), in_order(b)
    seen_a, seen_b = observe(a), observe(b)
    reason = _unlike_heads(seen_a, seen_b)
    if reason is not None:
        return Judged(None, reason=reason)
    seen_a, seen_b = _completed(seen_a, seen_b)
    program_a, program_b = program_of(a, seen_a), program_of(b, seen_b)
    precisions = Precisions(precision_of(a), precision_of(b))
    program_a = _inferred(program_a, program_b, a, seen_a)
    program_b = _inferred(program_b, program_a, b, seen_b)
    program_a = _inferred(program_a, program_b, a, seen_a)
    program_a, program_b, seen_b = _past_unknown(program_a, program_b, seen_a, seen_b)
    sides = Sides(
        a=program_a,
        b=program_b,
        head_dim=seen_b["query"].used.shape[-1],
        model_dim=_model_dim(seen_a) or _model_dim(seen_b),
        heads=seen_b["query"].used.shape[1],
        self_attention=seen_b["query"].used.shape[2] == seen_b["key"].used.shape[2],
    )
    if program_a.formula is None:
        return Judged(None, reason=_unknown(sides), sides=sides, seen=seen_b)
    rows = ~(hidden_rows(program_a.formula, *_sizes(b)) | hidden_rows(program_b.formula, *_sizes(b)))
    whole_way = whole(b, seen_b, program_a, precisions, rows)
    before = gap(whole_way, program_a)
    parts = []
    program = program_a
    for segment in segments(b, seen_b, program_a, precisions, rows):
        own = gap(segment, program)
        # what differs and makes no difference to the output needs no cause
        explained = Explained((), program, own, own)
        if not before.within:
            explained = explain(segment, replace(sides, a=program), causes)
        program = explained.program
        parts.append((segment, explained))
    same = before.within or all(explained.before.within for _, explained in parts)
    after = before if same else gap(whole_way, program)
    stages = [stage for segment, explained in parts for stage in _stages(segment, explained, sides)]
    return Judged(same, tuple(parts), tuple(stages), before, after, sides=sides, seen=seen_b)


def _sizes(call: CallTensors) -> tuple[int, int]:
    return call.output.shape[0], call.output.shape[2]


def _unknown(sides: Sides) -> str:
    which = "A" if sides.a.formula is None else "B"
    return f"the formula of {which} is not known: {', '.join((sides.a if which == 'A' else sides.b).unknown)}"


def _unfit(a: CallTensors, b: CallTensors) -> str | None:
    for label, call in (("A", a), ("B", b)):
        if call.missing is not None:
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


def _completed(a: Mapping[str, Seen], b: Mapping[str, Seen]) -> tuple[dict[str, Seen], dict[str, Seen]]:
    """What one side did not record of q, k and v, from the other, where what came in is the same."""
    one_input = _near(a["value"].used, b["value"].used)
    whole_a, whole_b = dict(a), dict(b)
    for name in NAMES:
        one, other = a[name], b[name]
        alike = one_input or _near(one.input, other.input)
        if one.projected is None and other.projected is not None and (alike or other.projected is other.used):
            whole_a[name] = replace(one, projected=other.projected, borrowed=True)
        if other.projected is None and one.projected is not None and alike:
            whole_b[name] = replace(other, projected=one.projected, borrowed=True)
    return whole_a, whole_b


def _near(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or not one.numel():
        return False
    eps = max(torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0 for x in (one, other))
    eps = max(eps, torch.finfo(torch.float32).eps)
    difference = (one.double() - other.double()).norm()
    return bool(difference <= _ALIKE * eps * other.double().norm())


def _inferred(program: Program, other: Program, call: CallTensors, seen: Mapping[str, Seen]) -> Program:
    """The program with what it does not tell, from its numbers and the other side's program."""
    for name in NAMES:
        way = way_of(program, name)
        vector = seen[name]
        if is_known(way) or vector.projected is None or not is_known(way_of(other, name)):
            continue
        found = infer_way(vector.projected, vector.used, way_of(other, name))
        if found is not None:
            program = with_way(program, name, Way(way.affine, found.steps, way.heads, found.scaled))
    if program.formula is None and other.formula is not None:
        count = seen["query"].used.shape[1]
        formula: Formula | None = infer(
            seen["query"].used,
            _spread(seen["key"], count),
            _spread(seen["value"], count),
            call.output,
            call.lse,
            None,
            other.formula,
        )
        if formula is not None:
            program = replace(program, formula=formula)
    return program


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


def with_way(program: Program, name: str, way: Way) -> Program:
    """The program with another way of q, k or v."""
    if name == "query":
        return replace(program, query=way)
    return replace(program, key=way) if name == "key" else replace(program, value=way)


def _spread(vector: Seen, count: int) -> Tensor:
    return vector.used[:, vector.heads] if vector.used.shape[1] != count else vector.used


def _model_dim(seen: Mapping[str, Seen]) -> int | None:
    entering = seen["query"].input
    return None if entering is None else entering.shape[-1]


def precision_of(call: CallTensors) -> Precision:
    """In which dtypes a call computes, and how often its logits were rounded."""
    steps = 2 if call.terms is None else 1 + sum(ROUNDINGS.get(term.name, 0) for term in call.terms)
    return Precision(dtype_of(call.dtype), dtype_of(call.logits_dtype), dtype_of(call.weights_dtype), max(2, steps))


def _stages(segment: Segment, explained: Explained, sides: Sides) -> list[StageDiff]:
    before = explained.before
    differing = {cause.stage for cause in explained.causes}
    if segment.name != "output":
        found = []
        for stage in segment.stages:
            differs = not before.within and (stage in differing or (not differing and stage == segment.stages[0]))
            found.append(StageDiff(stage, not differs, before.largest, before.allowed))
        return found
    stages = [of_formula(stage, sides) for stage in segment.stages[:-1]]
    stages = [replace(stage, same=stage.stage not in differing) for stage in stages]
    return [*stages, StageDiff("output", before.within, before.largest, before.allowed)]


def first_difference(judged: Judged) -> str | None:
    """The first stage that differs."""
    return first_stage([stage.stage for stage in judged.stages if stage.same is False])


def opaque(way: Way) -> bool:
    """Whether a step of it is not known."""
    return any(isinstance(step, Opaque) for step in way.steps)
