"""Splits an attention into segments between places where B's numbers are recorded, and runs A's program over each.

Every segment starts from B's values, so earlier differences and their rounding don't count against it. From there the
values of A's program and their possible errors are propagated together: through the projection, the steps of the path,
and the attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from sqrtdk.compare.inside.call_numbers import ObservedVector
from sqrtdk.compare.inside.compute import compute_output, repeat_heads, some_rows
from sqrtdk.compare.inside.program import QKV, Affine, OpaqueStep, Program, VectorPath
from sqrtdk.compare.inside.suspect import STAGES, path_of
from sqrtdk.compare.rounding.attention import output_allowed
from sqrtdk.compare.rounding.precision import Precision, Precisions, rounding_unit
from sqrtdk.compare.rounding.vectors import VectorErrors, errors_along, projection_errors
from sqrtdk.tracing.tensors import CallTensors

MOST_GAPS_CACHED = 4  # programs whose gaps are cached
ROWS_CHECKED_FIRST = 4  # rows that are checked first: if these differ by more than is allowed, the others need no check
FORMULA_STAGES = ("scale", "softcap", "bias", "mask", "sinks", "weights", "output")
Allowed = Callable[[Tensor | None], Tensor]  # from row indices, or None for all rows, to (B, H, n, E)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentGap:
    """The distance of a program's values from B's.

    Attributes:
        largest: largest difference.
        size: root mean square of the differences.
        allowed: largest allowance; if not `within`, possibly only over the rows that differ most.
        within: every difference is allowed, and so are all together.
    """

    largest: float
    size: float
    allowed: float
    within: bool


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A part of the way from input to output.

    Attributes:
        name: what it ends with: "query", "key" or "value" as projected; "query used" and so on; "output".
        stages: stages that it covers.
        target: B's values at its end.
        seen: B's q, k and v.
        begins: for each of q, k and v that it passes, where that begins: "input", "projected" or "used".
        precisions: precisions of both sides.
        rows: (B, L), True at compared rows; None for all.
        stages_tried: stages of suspicions that may act on it.
        own: projection that gave A what B had bit for bit; float64 arithmetic would only add a difference.
        most: limit of the root mean square of all differences.
        known: gaps of the latest programs, which are asked for repeatedly.
    """

    name: str
    stages: tuple[str, ...]
    target: Tensor
    seen: Mapping[str, ObservedVector] = field(default_factory=dict)
    begins: Mapping[str, str] = field(default_factory=dict)
    precisions: Precisions = (Precision(), Precision())
    rows: Tensor | None = None
    stages_tried: tuple[str, ...] = STAGES
    own: Affine | None = None
    most: float = math.inf
    known: list[tuple[Program, SegmentGap]] = field(default_factory=list)


# -- how far a program is from B over a segment ------------------------------------------------------------------------


def segment_gap(segment: Segment, program: Program) -> SegmentGap:
    """Return the distance of a program's values from B's at the end of a segment; NaN on one side counts as infinite.

    The results for the last four programs are cached in `segment.known`.
    """
    known = next((own for other, own in segment.known if other is program), None)
    if known is None:
        known = _gap(segment, program)
        segment.known[:] = [*segment.known[1 - MOST_GAPS_CACHED :], (program, known)]
    return known


def entry_distances(values: Tensor, target: Tensor) -> Tensor:
    """Return |values - target| in float64, infinite where an entry of either is NaN or the difference is not finite."""
    difference = (values.double() - target.double()).abs()
    if math.isfinite(float(difference.sum())):
        return difference
    return difference.nan_to_num(nan=math.inf, posinf=math.inf)


def _gap(segment: Segment, program: Program) -> SegmentGap:
    values, allowed = run_segment(segment, program)
    difference = entry_distances(values, segment.target)
    if not difference.numel() or (segment.rows is not None and not bool(segment.rows.any())):
        return SegmentGap(0.0, 0.0, 0.0, True)
    left_out = None
    if segment.rows is not None and not bool(segment.rows.all()):
        left_out = ~segment.rows[:, None, :, None].expand(difference.shape)

    def counted(values: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        return values if left_out is None else values[~left_out[:, :, rows]]

    size = float(counted(difference).square().mean().sqrt())
    difference = difference if left_out is None else difference.masked_fill(left_out, 0.0)
    largest = float(difference.max())
    # The allowance is the expensive part, so it is computed first for the rows that differ most.
    if len(segment.begins) > 1 and difference.shape[2] > ROWS_CHECKED_FIRST:
        most = difference.amax((0, 1, 3)).topk(ROWS_CHECKED_FIRST).indices
        limits = allowed(most)
        if bool((difference[:, :, most] > limits).any()):
            return _beyond(largest, size, counted(difference[:, :, most], most), counted(limits, most))
    limits = allowed(None)
    within = size <= segment.most and bool(counted(difference <= limits).all())
    if not within:
        return _beyond(largest, size, counted(difference), counted(limits))
    return SegmentGap(largest, size, float(counted(limits).max()), True)


def _beyond(largest: float, size: float, difference: Tensor, limits: Tensor) -> SegmentGap:
    """Return the gap of values that are too far, with a difference that is more than its own allowance.

    Entries have allowances of their own: where the largest difference is within the largest of these, the entry that is
    farthest beyond its own is told.
    """
    allowed = float(limits.max())
    if largest <= allowed:
        at = int((difference / limits.clamp_min(torch.finfo(torch.float64).tiny)).flatten().argmax())
        largest, allowed = float(difference.flatten()[at]), float(limits.flatten()[at])
    return SegmentGap(largest, size, allowed, False)


def run_segment(segment: Segment, program: Program) -> tuple[Tensor, Allowed]:
    """Return a program's values at the end of a segment, and a function for their allowed error.

    The values are (B, H, L, E). The function takes indices of rows, or None for all rows, and returns the allowed
    absolute error of these rows, (B, H, n, E).
    """
    vectors = [_vector(segment, program, name) for name in segment.begins]
    if len(vectors) == 1:
        values, of_one = vectors[0]
        assert of_one is not None
        return values, lambda index: of_one.bound if index is None else of_one.bound[:, :, index]
    formula, count = program.formula, vectors[0][0].shape[1]
    assert formula is not None
    heads = (None, program.key.heads, program.value.heads)
    query, key, value = (repeat_heads(x, count, which) for (x, _), which in zip(vectors, heads, strict=True))
    offs: list[VectorErrors] = []
    if any(off is not None for _, off in vectors):
        whole = [VectorErrors.none(x) if off is None else off for x, off in vectors]
        offs = [off.spread(count, which) for off, which in zip(whole, heads, strict=True)]

    def allowed(index: Tensor | None) -> Tensor:
        queries, cut, off = query, formula, offs
        if index is not None:
            queries, cut = query[:, :, index], some_rows(formula, index, query.shape[2])
            off = [offs[0].rows(index), *offs[1:]] if offs else offs
        return output_allowed(queries, key, value, cut, segment.precisions, off, segment.target.numel())

    return compute_output(query, key, value, formula)[0], allowed


def _vector(segment: Segment, program: Program, name: str) -> tuple[Tensor, VectorErrors | None]:
    """Return q, k or v at the end of the segment or at the product, and its error; None: exactly as B had it."""
    seen, path, begin = segment.seen[name], path_of(program, name), segment.begins[name]
    if begin == "used" or seen.projected is None:
        return seen.used, None
    values, off = seen.projected, _borrowed(seen, seen.projected, segment.precisions)
    if begin == "input":
        assert path.affine is not None
        assert seen.input is not None
        values, off = projection_errors(path.affine, seen.input, segment.precisions)
        if segment.name == name:
            # A's own result equals B's bit for bit; the float64 product would differ from both by their rounding.
            return (seen.projected if path.affine is segment.own else values), off
    return errors_along(path, values, off, segment.precisions)


def _borrowed(seen: ObservedVector, values: Tensor, precisions: Precisions) -> VectorErrors:
    """Return the error of projected values that are the other side's, from the same input: that of two projections."""
    off = VectorErrors.none(values)
    if not seen.borrowed:
        return off
    size = float(values.double().square().mean().sqrt())
    width = values.shape[1] * values.shape[-1]
    sums = sum(rounding_unit(p.accumulator) for p in precisions) * math.sqrt(width / 6) * size
    return off.plus(sum(rounding_unit(p.dtype) for p in precisions) * values.abs(), sums)


# -- the segments of a pair --------------------------------------------------------------------------------------------


def is_known(path: VectorPath) -> bool:
    """Return whether a path has no step of which only the name is known (`OpaqueStep`)."""
    return not any(isinstance(step, OpaqueStep) for step in path.steps)


def segments(
    b: CallTensors, seen: Mapping[str, ObservedVector], a: Program, precisions: Precisions, rows: Tensor | None
) -> list[Segment]:
    """Return the segments of a pair that can be run.

    Args:
        b: tensors of B.
        seen: q, k and v of B; parts that B did not record are A's if both had the same input.
        a: program of A.
        precisions: precisions of both sides.
        rows: (B, L), True where the output is compared.
    """
    part = partial(Segment, seen=seen, precisions=of_measured(precisions))
    found, steps = [], []
    for name in QKV:
        vector, path = seen[name], path_of(a, name)
        if vector.projected is None:
            continue
        heads = vector.projected.shape[1:4:2]
        if path.affine is not None and vector.input is not None and path.affine.weight.shape[:2] == heads:
            own, begins = path.affine if vector.alike else None, {name: "input"}
            found.append(part(name, (name,), vector.projected, begins=begins, stages_tried=(name,), own=own))
        if is_known(path) and vector.projected.shape == vector.used.shape:
            stages = (f"{name} norm", f"{name} rotation") if name != "value" else ("value",)
            begins = {name: "projected"}
            steps.append(part(f"{name} used", stages, vector.used, begins=begins, stages_tried=(name, *stages)))
    found += steps
    if a.formula is not None:
        begins, stages_tried = dict.fromkeys(QKV, "used"), ("key", "value", *FORMULA_STAGES)
        found.append(part("output", FORMULA_STAGES, b.output, begins=begins, stages_tried=stages_tried, rows=rows))
    return found


def joined_segments(every: Sequence[Segment], a: Program, changed: Program | None = None) -> Segment:
    """Return A's segments joined into one, from the first place where A does not give B's values to the output.

    Each of q, k and v begins as late as possible: at the product if A gives B's values there; else as projected if A
    gives those; else at the input. It begins before anything that a `changed` program changes. Errors on the way from
    there are propagated.
    """
    parts = {part.name: part for part in every}
    begins = {name: _begin(name, parts, a, a if changed is None else changed) for name in QKV}
    output = parts["output"]
    known = output.known if begins == output.begins else []
    return replace(output, name="whole", stages=STAGES, stages_tried=STAGES, begins=begins, known=known)


def _begin(name: str, parts: Mapping[str, Segment], a: Program, changed: Program) -> str:
    """Return where q, k or v begins: "used", "projected" or "input"."""
    if f"{name} used" not in parts:
        return "used"
    own, other = path_of(a, name), path_of(changed, name)
    # A projection that gives B's values, and that no cause changes, need not be run again.
    if name in parts and not (own.affine is other.affine and segment_gap(parts[name], a).within):
        return "input"
    return "used" if own is other and segment_gap(parts[f"{name} used"], a).within else "projected"


def of_measured(precisions: Precisions) -> Precisions:
    """Return the precisions from which the allowed errors are computed.

    A dtype of A's logits or weights that is coarser than A's own counts only as far as B's is as coarse: rounding more
    than B is a difference, and no error.
    """
    a, b = precisions

    def no_less(own: torch.dtype | None, other: torch.dtype | None) -> torch.dtype | None:
        if own is None or rounding_unit(own) <= rounding_unit(a.dtype):
            return own
        return min(own, max(a.dtype, other or b.dtype, key=rounding_unit), key=rounding_unit)

    logits, weights = no_less(a.logits_dtype, b.logits_dtype), no_less(a.weights_dtype, b.weights_dtype)
    return replace(a, logits_dtype=logits, weights_dtype=weights), b
