"""Handles steps that neither program knows: the paths before and after them, and vectors that no segment covers.

A step that both sides have but that can't be computed, such as the rounding of a quantised cache, splits a path. A's
program runs from B's input up to the step, and again from B's values behind it. Vectors that no segment covers are
compared directly, if both sides had the same input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.infer.missing import EQUAL_ROUNDINGS, KERNEL_ROUNDINGS, KnownSide, coarser, near
from sqrtdk.compare.inside.build import ONE_INPUT_ROUNDINGS
from sqrtdk.compare.inside.call_numbers import ObservedVector
from sqrtdk.compare.inside.explain import Explained, stage_of_vector, unknown_cause
from sqrtdk.compare.inside.program import QKV, OpaqueStep, Program, VectorPath
from sqrtdk.compare.inside.segments import Segment, SegmentGap, entry_distances
from sqrtdk.compare.inside.suspect import QKV_LETTERS, path_of, with_path
from sqrtdk.compare.records import Cause
from sqrtdk.messages import Message, joined

ExplainedSegments = list[tuple[Segment, Explained]]


@dataclass(frozen=True, slots=True, eq=False)
class PathSpan:
    """A part of the ways of q, k and v, as programs.

    Attributes:
        a: A's program over this part.
        b: B's program over this part.
        seen: B's q, k and v at its ends, by name.
    """

    a: Program
    b: Program
    seen: dict[str, ObservedVector]

    def of(self, name: str, paths: list[VectorPath], vector: ObservedVector) -> PathSpan:
        """Return a copy with other paths for one vector.

        Args:
            name: "query", "key" or "value".
            paths: path of A, path of B.
            vector: values of B at the ends of this part.
        """
        return PathSpan(
            with_path(self.a, name, paths[0]), with_path(self.b, name, paths[1]), self.seen | {name: vector}
        )


def past_unknown(
    a: Program, b: Program, seen_a: Mapping[str, ObservedVector], seen_b: Mapping[str, ObservedVector]
) -> tuple[PathSpan, PathSpan, list[str]]:
    """Return both programs before and after the unknown steps that both sides share.

    If both sides had equal values before the steps, their results are compared first. A step with another result is
    not passed.

    Returns:
        The part up to the first unknown step, without a formula; the part from the last one on; and the names of the
        vectors whose paths are split. The paths of other vectors are whole in both parts.
    """
    before = PathSpan(replace(a, formula=None), replace(b, formula=None), dict(seen_b))
    after, names = PathSpan(a, b, dict(seen_b)), []
    for name in QKV:
        paths, vectors = (path_of(a, name), path_of(b, name)), (seen_a[name], seen_b[name])
        spans = [span for path in paths if (span := _unknown(path)) is not None]
        # Only a step that both sides have can be passed; a step of one side is a difference to be explained.
        if len(spans) < 2 or _labels(paths[0], spans[0]) != _labels(paths[1], spans[1]):
            continue
        starts = [_values_after(vector, span.start) for vector, span in zip(vectors, spans, strict=True)]
        ends = [_values_after(vector, span.stop) for vector, span in zip(vectors, spans, strict=True)]
        if starts[1] is None or ends[1] is None:
            continue
        same = _near(vectors[0].input, vectors[1].input) and _near(*starts)
        # Equal before and unequal behind: the unknown step itself differs, and can't be passed over.
        if same and not _near(*ends):
            continue
        first = [
            replace(path, steps=path.steps[: span.start], scaled=1.0) for path, span in zip(paths, spans, strict=True)
        ]
        last = [
            replace(path, affine=None, steps=path.steps[span.stop :]) for path, span in zip(paths, spans, strict=True)
        ]
        before = before.of(name, first, replace(vectors[1], used=starts[1].double()))
        behind = replace(vectors[1], projected=ends[1].double(), input=None, borrowed=False)
        after = after.of(name, last, behind)
        names.append(name)
    return before, after, names


def _unknown(path: VectorPath) -> range | None:
    """Return the range from the first unknown step to the last; None if all are known."""
    places = [place for place, step in enumerate(path.steps) if isinstance(step, OpaqueStep)]
    return range(places[0], places[-1] + 1) if places else None


def _labels(path: VectorPath, span: range) -> list[str]:
    steps = path.steps[span.start : span.stop]
    return [step.name if isinstance(step, OpaqueStep) else type(step).__name__ for step in steps]


def _values_after(seen: ObservedVector, count: int) -> Tensor | None:
    """Return the values after the first `count` steps; None if not recorded."""
    if count == 0:
        return seen.projected
    return seen.steps[count - 1].values if count <= len(seen.steps) else None


def _near(one: Tensor | None, other: Tensor | None) -> bool:
    """Return `near` in roundings of the coarser dtype of the two tensors."""
    dtypes = [x.dtype for x in (one, other) if x is not None and x.is_floating_point()]
    return near(one, other, max(dtypes, key=lambda x: torch.finfo(x).eps, default=torch.float32), ONE_INPUT_ROUNDINGS)


# -- vectors as they are -----------------------------------------------------------------------------------------------


def compare_directly(
    sides: list[KnownSide], program: Program, covered: set[str], rows: Tensor | None
) -> tuple[ExplainedSegments, list[Message]]:
    """Compare directly what no segment covers.

    Args:
        sides: both sides.
        program: A's program.
        covered: names of the existing segments.
        rows: (B, L), True where the output is compared.

    Returns:
        Vectors that differ although both sides had the same input, and the reasons why others can't be compared.
    """
    one_input = same_input(sides, rows)
    parts: ExplainedSegments = []
    reasons = []
    for name in QKV:
        if (found := _split_otherwise(sides, name, program)) is not None:
            parts.append(found)
            continue
        if f"{name} used" in covered or equal_in_roundings(sides, name, rows):
            continue
        one, other = _vector_of_both(sides, name, rows)
        if one_input and one.shape == other.shape:
            stage = stage_of_vector(name, [side.program for side in sides])
            parts.append(differs(sides, name, (stage,), rows, program))
            continue
        reasons.append(Message("compare.vector.not_comparable", part=QKV_LETTERS[name], step=_step(sides, name)))
    return parts, reasons


def equal_in_roundings(
    sides: list[KnownSide], name: str, rows: Tensor | None, roundings: float = EQUAL_ROUNDINGS
) -> bool:
    """Return whether a vector, or the output, is equal on both sides by `near`, in the coarser dtype.

    Args:
        sides: both sides.
        name: "query", "key" or "value", as it enters q . k or meets the weights; or "output".
        rows: (B, L), True where it is compared; None for all.
        roundings: allowed number of roundings.
    """
    return near(*_vector_of_both(sides, name, rows), coarser(sides), roundings)


def same_input(sides: list[KnownSide], rows: Tensor | None) -> bool:
    """Return whether the inputs are known to be equal, directly or since a vector made from them is equal.

    Args:
        sides: both sides.
        rows: (B, L), True where they are compared; None for all.
    """
    one, other = (side.seen for side in sides)
    return any(
        near(one[name].input, other[name].input, coarser(sides), KERNEL_ROUNDINGS)
        or equal_in_roundings(sides, name, rows, KERNEL_ROUNDINGS)
        for name in QKV
    )


def outputs_alike(sides: list[KnownSide], rows: Tensor | None, roundings: float = EQUAL_ROUNDINGS) -> bool | None:
    """Return whether the outputs agree within some roundings; None if q, k and v do not agree themselves.

    Args:
        sides: both sides.
        rows: (B, L), True where they are compared; None for all.
        roundings: allowed number of roundings.
    """
    vectors = all(equal_in_roundings(sides, name, rows, roundings) for name in QKV)
    return equal_in_roundings(sides, "output", rows, roundings) if vectors else None


def differs(
    sides: list[KnownSide], name: str, stages: tuple[str, ...], rows: Tensor | None, program: Program
) -> tuple[Segment, Explained]:
    """Return a segment for a vector or output that differs, and its explanation: the cause "unknown".

    Args:
        sides: both sides.
        name: "query", "key", "value" or "output".
        stages: stages of the segment; the cause has the first.
        rows: (B, L), True where it is compared; None for all.
        program: A's program.
    """
    one, other = _vector_of_both(sides, name, rows)
    left = _gap(one, other, sides)
    part = Segment(f"{name} used", stages, other, stages_tried=())
    return part, Explained((unknown_cause(stages[0], left),), program, left, left)


def _split_otherwise(sides: list[KnownSide], name: str, program: Program) -> tuple[Segment, Explained] | None:
    """Return a vector that one side alone splits into heads by a view, `x.view(B, H, L, E)`; None for any other.

    Proven: the other side's projection, applied to what enters this one's and viewed like this, gives its values.
    """
    for text, known, side in (("by_view", sides[0], sides[1]), ("not_by_view", sides[1], sides[0])):
        affine, viewed = path_of(known.program, name).affine, side.seen[name]
        if affine is None or viewed.viewed is None or viewed.projected is None:
            continue
        right = torch.einsum("bld,hed->bhle", viewed.viewed.double(), affine.weight.double())
        if affine.bias is not None:
            right += affine.bias.double()[:, None]
        if right.shape != viewed.projected.shape or near(right, viewed.projected, coarser(sides), KERNEL_ROUNDINGS):
            continue
        mixed = right.transpose(1, 2).reshape(right.shape)
        if near(mixed, viewed.projected, coarser(sides), KERNEL_ROUNDINGS):
            a, b = (Message(f"causes.head_order.{word}") for word in ("in_order", "view"))
            a, b = (a, b) if text == "by_view" else (b, a)
            what = Message(f"causes.head_order.{text}", parts=QKV_LETTERS[name])
            cause = Cause("head_order", a, b, 1.0, what, name, mends=text == "by_view", codes=("view",))
            before, after = (_gap(x, viewed.projected, sides) for x in (right, mixed))
            part = Segment(f"{name} used", (name,), viewed.projected, stages_tried=())
            return part, Explained((cause,), program, before, replace(after, within=True))
    return None


def told_once(parts: ExplainedSegments) -> ExplainedSegments:
    """Return the parts with one cause, of the first, where several vectors are split by a view alike."""
    alike = [found.causes[0] for _, found in parts if found.causes and found.causes[0].codes == ("view",)]
    if len({cause.text.id for cause in alike if isinstance(cause.text, Message)}) != 1:
        return parts
    letters = joined([QKV_LETTERS[cause.stage] for cause in alike], "and")
    first = alike[0]
    assert isinstance(first.text, Message)
    one = replace(first, text=Message(first.text.id, parts=letters))
    told: ExplainedSegments = []
    for part, found in parts:
        causes = tuple(one if cause is first else cause for cause in found.causes if cause not in alike[1:])
        told.append((part, replace(found, causes=causes)))
    return told


def _gap(one: Tensor, other: Tensor, sides: list[KnownSide]) -> SegmentGap:
    """Return how far values are from those of a side, and how far roundings may move them."""
    unit = max(torch.finfo(coarser(sides)).eps, torch.finfo(torch.float32).eps) / 2
    difference = entry_distances(one, other)
    allowed = EQUAL_ROUNDINGS * unit * float(other.double().square().mean().sqrt())
    return SegmentGap(float(difference.max()), float(difference.square().mean().sqrt()), allowed, False)


def _vector_of_both(sides: list[KnownSide], name: str, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a vector, or the output, of both sides, reduced to compared rows; all rows if it has other rows."""
    one, other = (side.call.output if name == "output" else side.seen[name].used for side in sides)
    return _rows_of_vector(one, rows), _rows_of_vector(other, rows)


def _rows_of_vector(values: Tensor, rows: Tensor | None) -> Tensor:
    if rows is None or values.shape[0] != rows.shape[0] or values.shape[2] != rows.shape[1] or not bool(rows.any()):
        return values
    return values.transpose(1, 2)[rows][None].transpose(1, 2)


def _step(sides: list[KnownSide], name: str) -> Message:
    """Return what is unknown about a vector's path, as text."""
    for label, side in zip("AB", sides, strict=True):
        unknown = [step.name for step in path_of(side.program, name).steps if isinstance(step, OpaqueStep)]
        if unknown == ["not recorded"]:
            return Message("compare.vector.not_recorded", side=label, letter=QKV_LETTERS[name])
        if unknown:
            return Message("compare.vector.unknown_step", side=label, step=unknown[0])
    return Message("compare.vector.unknown_way")
