"""The parts of an attention between two places where B's numbers are recorded; A's program is run over each by itself.

Every part begins with what B had there, so that what differs before it, and the rounding of that, does not count
against it. From there on the values of A's program and what they may be off by are carried on together: through the
projection, the steps of the way, and the attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from sqrtdk.compare.compute import attend, some_rows, spread
from sqrtdk.compare.observed import NAMES, Seen
from sqrtdk.compare.precision import Precision, Precisions, unit
from sqrtdk.compare.program import Affine, Opaque, Program, Way
from sqrtdk.compare.rounding import output_allowed
from sqrtdk.compare.rounding_steps import Off, followed, projected
from sqrtdk.compare.suspect import STAGES, way_of
from sqrtdk.tracing.tensors import CallTensors

MOST_KNOWN = 4  # programs whose gaps are kept
MOST_ROWS = 4  # that are looked at first: where these differ by more than is allowed, no others need be
OF_FORMULA = ("scale", "softcap", "bias", "mask", "sinks", "weights", "output")
Allowed = Callable[[Tensor | None], Tensor]  # of the rows of some numbers, or of all, (B, H, n, E)


@dataclass(frozen=True, slots=True, eq=False)
class Gap:
    """How far a program's values are from B's.

    Attributes:
        largest: the largest difference.
        size: root of the mean square of the differences.
        allowed: largest of what is allowed; where a difference is not, it may be that of the rows that differ most.
        within: every difference is allowed, and so are all together.
    """

    largest: float
    size: float
    allowed: float
    within: bool


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A part of the way.

    Attributes:
        name: of what it ends with: "query", "key", "value" as projected; "query used" and so on; "output".
        stages: those that it covers.
        target: B's values at its end.
        seen: B's q, k and v.
        begins: where those of them that it goes through begin: "input", "projected" or "used".
        precisions: in which both sides compute.
        rows: (B, L), True for those that are compared; None for all.
        asks: stages of the suspicions that may act on it.
        own: the projection that gave A what B had, bit for bit: its own arithmetic is not that of float64.
        most: root of the mean square that they may be from the target by, all together.
        known: gaps of the programs that were asked last, which are asked again from several sides.
    """

    name: str
    stages: tuple[str, ...]
    target: Tensor
    seen: Mapping[str, Seen] = field(default_factory=dict)
    begins: Mapping[str, str] = field(default_factory=dict)
    precisions: Precisions = (Precision(), Precision())
    rows: Tensor | None = None
    asks: tuple[str, ...] = STAGES
    own: Affine | None = None
    most: float = math.inf
    known: list[tuple[Program, Gap]] = field(default_factory=list)


# -- how far a program is from B over a segment ------------------------------------------------------------------------


def gap(segment: Segment, program: Program) -> Gap:
    """How far a program is from B over a segment; not a number counts as far."""
    known = next((own for other, own in segment.known if other is program), None)
    if known is None:
        known = _gap(segment, program)
        segment.known[:] = [*segment.known[1 - MOST_KNOWN :], (program, known)]
    return known


def apart(values: Tensor, target: Tensor) -> Tensor:
    """Differences; what is no number on one side is infinitely far."""
    difference = (values.double() - target.double()).abs()
    if math.isfinite(float(difference.sum())):
        return difference
    return difference.nan_to_num(nan=math.inf, posinf=math.inf)


def _gap(segment: Segment, program: Program) -> Gap:
    values, allowed = reach(segment, program)
    difference = apart(values, segment.target)
    if not difference.numel() or (segment.rows is not None and not bool(segment.rows.any())):
        return Gap(0.0, 0.0, 0.0, True)
    left_out = None
    if segment.rows is not None and not bool(segment.rows.all()):
        left_out = ~segment.rows[:, None, :, None].expand(difference.shape)

    def counted(values: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        return values if left_out is None else values[~left_out[:, :, rows]]

    size = float(counted(difference).square().mean().sqrt())
    difference = difference if left_out is None else difference.masked_fill(left_out, 0.0)
    largest = float(difference.max())
    if len(segment.begins) > 1 and difference.shape[2] > MOST_ROWS:
        most = difference.amax((0, 1, 3)).topk(MOST_ROWS).indices
        limits = allowed(most)
        if bool((difference[:, :, most] > limits).any()):
            return Gap(largest, size, float(counted(limits, most).max()), False)
    limits = allowed(None)
    within = size <= segment.most and bool(counted(difference <= limits).all())
    return Gap(largest, size, float(counted(limits).max()), within)


def reach(segment: Segment, program: Program) -> tuple[Tensor, Allowed]:
    """A program's values at the end of a segment, and how far they may be from the target by rounding on both sides."""
    vectors = [_vector(segment, program, name) for name in segment.begins]
    if len(vectors) == 1:
        values, of_one = vectors[0]
        assert of_one is not None
        return values, lambda index: of_one.bound if index is None else of_one.bound[:, :, index]
    formula, count = program.formula, vectors[0][0].shape[1]
    assert formula is not None
    heads = (None, program.key.heads, program.value.heads)
    query, key, value = (spread(x, count, which) for (x, _), which in zip(vectors, heads, strict=True))
    offs: list[Off] = []
    if any(off is not None for _, off in vectors):
        whole = [Off.none(x) if off is None else off for x, off in vectors]
        offs = [off.spread(count, which) for off, which in zip(whole, heads, strict=True)]

    def allowed(index: Tensor | None) -> Tensor:
        queries, cut, off = query, formula, offs
        if index is not None:
            queries, cut = query[:, :, index], some_rows(formula, index, query.shape[2])
            off = [offs[0].rows(index), *offs[1:]] if offs else offs
        return output_allowed(queries, key, value, cut, segment.precisions, off, segment.target.numel())

    return attend(query, key, value, formula)[0], allowed


def _vector(segment: Segment, program: Program, name: str) -> tuple[Tensor, Off | None]:
    """q, k or v where the segment ends, or where they meet, and by what it may be off; None: it is as B had it."""
    seen, way, begin = segment.seen[name], way_of(program, name), segment.begins[name]
    if begin == "used" or seen.projected is None:
        return seen.used, None
    values, off = seen.projected, _borrowed(seen, seen.projected, segment.precisions)
    if begin == "input":
        assert way.affine is not None
        assert seen.input is not None
        values, off = projected(way.affine, seen.input, segment.precisions)
        if segment.name == name:
            return (seen.projected if way.affine is segment.own else values), off
    return followed(way, values, off, segment.precisions)


def _borrowed(seen: Seen, values: Tensor, precisions: Precisions) -> Off:
    """What the projected values are off by where they are the other side's, of one input: two projections."""
    off = Off.none(values)
    if not seen.borrowed:
        return off
    size = float(values.double().square().mean().sqrt())
    width = values.shape[1] * values.shape[-1]
    sums = sum(unit(p.accumulator) for p in precisions) * math.sqrt(width / 6) * size
    return off.plus(sum(unit(p.dtype) for p in precisions) * values.abs(), sums)


# -- the segments of a pair --------------------------------------------------------------------------------------------


def is_known(way: Way) -> bool:
    """Whether all its steps are."""
    return not any(isinstance(step, Opaque) for step in way.steps)


def segments(
    b: CallTensors, seen: Mapping[str, Seen], a: Program, precisions: Precisions, rows: Tensor | None
) -> list[Segment]:
    """The segments of a pair that can be run.

    Args:
        b: tensors of B.
        seen: its q, k and v, what is not recorded of them being A's where both had the same input.
        a: program of A.
        precisions: in which both sides compute.
        rows: (B, L), True where the output is compared.
    """
    part = partial(Segment, seen=seen, precisions=of_measured(precisions))
    found, steps = [], []
    for name in NAMES:
        vector, way = seen[name], way_of(a, name)
        if vector.projected is None:
            continue
        heads = vector.projected.shape[1:4:2]
        if way.affine is not None and vector.input is not None and way.affine.weight.shape[:2] == heads:
            own, begins = way.affine if vector.alike else None, {name: "input"}
            found.append(part(name, (name,), vector.projected, begins=begins, asks=(name,), own=own))
        if is_known(way) and vector.projected.shape == vector.used.shape:
            stages = (f"{name} norm", f"{name} rotation") if name != "value" else ("value",)
            begins = {name: "projected"}
            steps.append(part(f"{name} used", stages, vector.used, begins=begins, asks=(name, *stages)))
    found += steps
    if a.formula is not None:
        begins, asks = dict.fromkeys(NAMES, "used"), ("key", "value", *OF_FORMULA)
        found.append(part("output", OF_FORMULA, b.output, begins=begins, asks=asks, rows=rows))
    return found


def whole(every: Sequence[Segment], a: Program, changed: Program | None = None) -> Segment:
    """All segments of A's program as one: from the first place on where it does not give what B had, to the output.

    Each of q, k and v begins as late as it can: where A gives what B had of it, at what met in the product; else as it
    was projected, where A gives that; else at the input; and before all that a `changed` program has otherwise. What is
    off on the way since then is carried on.
    """
    parts = {part.name: part for part in every}
    begins = {name: _begin(name, parts, a, a if changed is None else changed) for name in NAMES}
    output = parts["output"]
    known = output.known if begins == output.begins else []
    return replace(output, name="whole", stages=STAGES, asks=STAGES, begins=begins, known=known)


def _begin(name: str, parts: Mapping[str, Segment], a: Program, changed: Program) -> str:
    """Where q, k or v begins: "used", "projected" or "input"."""
    if f"{name} used" not in parts:
        return "used"
    own, other = way_of(a, name), way_of(changed, name)
    if name in parts and not (own.affine is other.affine and gap(parts[name], a).within):
        return "input"
    return "used" if own is other and gap(parts[f"{name} used"], a).within else "projected"


def of_measured(precisions: Precisions) -> Precisions:
    """What is allowed for, B being what was measured: a lesser dtype of A's logits or weights counts where B has it."""
    a, b = precisions

    def no_less(own: torch.dtype | None, other: torch.dtype | None) -> torch.dtype | None:
        if own is None or unit(own) <= unit(a.dtype):
            return own
        return min(own, max(a.dtype, other or b.dtype, key=unit), key=unit)

    logits, weights = no_less(a.logits_dtype, b.logits_dtype), no_less(a.weights_dtype, b.weights_dtype)
    return replace(a, logits_dtype=logits, weights_dtype=weights), b
