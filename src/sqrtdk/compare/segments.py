"""The parts of an attention between two places where B's numbers are recorded; A's program is run over each by itself.

Every part begins with what B had there, so that what differs before it, and the rounding of that, does not count
against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.compare.compute import attend, follow, project, some_rows, spread
from sqrtdk.compare.observed import NAMES, Seen
from sqrtdk.compare.precision import Precision, unit
from sqrtdk.compare.program import Opaque, Program, Way
from sqrtdk.compare.rounding import output_allowed
from sqrtdk.compare.rounding_steps import Off, projection_off, way_off
from sqrtdk.compare.suspect import STAGES, way_of
from sqrtdk.tracing.tensors import CallTensors

MOST_KNOWN = 4  # programs whose gaps are kept
MOST_ROWS = 4  # that are looked at first: where these differ by more than is allowed, no others need be
OF_FORMULA = ("scale", "softcap", "bias", "mask", "sinks", "weights", "output")


class Precisions(NamedTuple):
    """In which dtypes both sides compute."""

    a: Precision
    b: Precision


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A part of the way.

    Attributes:
        name: of what it ends with: "query", "key", "value" as projected; "query used" and so on; "output".
        stages: those that it covers.
        target: B's values at its end.
        run: a program's values there.
        allowed: how far they may be from the target by the rounding of both sides, each entry or all.
        rows: (B, L), True for those that are compared; None for all.
        asks: stages of the suspicions that may act on it.
        allowed_at: as `allowed`, (B, H, n, E) of the rows of n numbers; None where that is no less work.
        most: root of the mean square that they may be from the target by, all together.
        known: gaps of the programs that were asked last, which are asked again from several sides.
    """

    name: str
    stages: tuple[str, ...]
    target: Tensor
    run: Callable[[Program], Tensor]
    allowed: Callable[[Program], Tensor | float]
    rows: Tensor | None = None
    asks: tuple[str, ...] = STAGES
    allowed_at: Callable[[Program, Tensor], Tensor] | None = None
    most: float = math.inf
    known: list[tuple[Program, Gap]] = field(default_factory=list)


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


def gap(segment: Segment, program: Program) -> Gap:
    """How far a program is from B over a segment; not a number counts as far."""
    known = next((own for other, own in segment.known if other is program), None)
    if known is None:
        known = _gap(segment, program)
        segment.known[:] = [*segment.known[1 - MOST_KNOWN :], (program, known)]
    return known


def _gap(segment: Segment, program: Program) -> Gap:
    difference = (segment.run(program) - segment.target.double()).abs()
    if not math.isfinite(float(difference.sum())):
        difference = difference.nan_to_num(nan=float("inf"), posinf=float("inf"))
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
    if segment.allowed_at is not None and difference.shape[2] > MOST_ROWS:
        most = difference.amax((0, 1, 3)).topk(MOST_ROWS).indices
        allowed = segment.allowed_at(program, most)
        if bool((difference[:, :, most] > allowed).any()):
            return Gap(largest, size, float(counted(allowed, most).max()), False)
    allowed = torch.as_tensor(segment.allowed(program), dtype=torch.float64).expand(difference.shape)
    within = size <= segment.most and bool(counted(difference <= allowed).all())
    return Gap(largest, size, float(counted(allowed).max()), within)


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
    precisions = of_measured(precisions)
    parts = [_projection(name, seen[name], precisions, a) for name in NAMES if _projects(seen[name], way_of(a, name))]
    parts += [_steps(name, seen[name], precisions) for name in NAMES if _steps_known(seen[name], way_of(a, name))]
    if a.formula is not None:
        parts.append(_output(b, {name: seen[name].used for name in NAMES}, precisions, rows))
    return parts


def whole(
    b: CallTensors,
    seen: Mapping[str, Seen],
    a: Program,
    precisions: Precisions,
    rows: Tensor | None,
    changed: Program | None = None,
    every: Sequence[Segment] | None = None,
) -> Segment:
    """All segments as one: A's program from the first place on where it does not give what B had, to the output.

    Each of q, k and v begins as late as it can: where A gives what B had of it, at what met in the product; else as it
    was projected, where A gives that; else at the input; and before all that a `changed` program has otherwise. What is
    off on the way since then is carried on. `every` are the segments of A's program, where they are there already.
    """
    precisions = of_measured(precisions)
    parts = {part.name: part for part in (segments(b, seen, a, precisions, rows) if every is None else every)}
    begins = {name: _begin(name, parts, a, a if changed is None else changed) for name in NAMES}
    if set(begins.values()) == {"used"}:
        return replace(parts["output"], name="whole", stages=STAGES, asks=STAGES)
    latest: list[tuple[Program, dict[str, Tensor], dict[str, Off]]] = []

    def vectors(program: Program) -> tuple[dict[str, Tensor], dict[str, Off]]:
        if not latest or latest[0][0] is not program:
            ways = {name: _along(way_of(program, name), seen[name], begins[name], precisions) for name in NAMES}
            latest[:] = [(program, *({name: way[i] for name, way in ways.items()} for i in (0, 1)))]  # type: ignore[list-item]
        return latest[0][1:]

    def run(program: Program) -> Tensor:
        return _output(b, vectors(program)[0], precisions, rows).run(program)

    def allowed(program: Program) -> Tensor | float:
        values, offs = vectors(program)
        return _output(b, values, precisions, rows, offs).allowed(program)

    def allowed_at(program: Program, index: Tensor) -> Tensor:
        values, offs = vectors(program)
        part = _output(b, values, precisions, rows, offs)
        assert part.allowed_at is not None
        return part.allowed_at(program, index)

    return Segment("whole", STAGES, b.output, run, allowed, rows, allowed_at=allowed_at)


def of_measured(precisions: Precisions) -> Precisions:
    """What is allowed for, B being what was measured: a lesser dtype of A's logits or weights counts where B has it."""
    a, b = precisions

    def no_less(own: torch.dtype | None, other: torch.dtype | None) -> torch.dtype | None:
        if own is None or unit(own) <= unit(a.dtype):
            return own
        return min(own, max(a.dtype, other or b.dtype, key=unit), key=unit)

    logits, weights = no_less(a.logits_dtype, b.logits_dtype), no_less(a.weights_dtype, b.weights_dtype)
    return Precisions(replace(a, logits_dtype=logits, weights_dtype=weights), b)


def _begin(name: str, parts: Mapping[str, Segment], a: Program, changed: Program) -> str:
    """Where q, k or v begins: "used", "projected" or "input"."""
    if f"{name} used" not in parts:
        return "used"
    own, other = way_of(a, name), way_of(changed, name)
    if name in parts and not (own.affine is other.affine and gap(parts[name], a).within):
        return "input"
    return "used" if own is other and gap(parts[f"{name} used"], a).within else "projected"


def _along(way: Way, seen: Seen, begin: str, precisions: Precisions) -> tuple[Tensor, Off]:
    """Values of q, k or v from where they begin, and by what they may be off."""
    if begin == "used" or seen.projected is None:
        return seen.used, Off.none(seen.used)
    if begin == "input":
        assert way.affine is not None
        assert seen.input is not None
        values, off = project(way.affine, seen.input), projection_off(way.affine, seen.input, *precisions)
    else:
        values, off = seen.projected, _borrowed(seen, seen.projected, precisions)
    return follow(way, values)[-1], way_off(way, values, off, *precisions)


def _projects(seen: Seen, way: Way) -> bool:
    fits = way.affine is not None and seen.input is not None and seen.projected is not None
    return fits and way.affine is not None and way.affine.weight.shape[:2] == seen.projected.shape[1:4:2]  # type: ignore[union-attr]


def _steps_known(seen: Seen, way: Way) -> bool:
    return seen.projected is not None and is_known(way) and seen.projected.shape == seen.used.shape


def _projection(name: str, seen: Seen, precisions: Precisions, a: Program) -> Segment:
    entering, own = seen.input, way_of(a, name).affine
    assert entering is not None
    assert seen.projected is not None

    def run(program: Program) -> Tensor:
        affine = way_of(program, name).affine
        assert affine is not None
        if seen.alike and seen.projected is not None and affine is own:  # A ran it itself, in its own arithmetic
            return seen.projected.double()
        return project(affine, entering)

    def allowed(program: Program) -> Tensor | float:
        affine = way_of(program, name).affine
        assert affine is not None
        return projection_off(affine, entering, *precisions).bound

    return Segment(name, (name,), seen.projected, run, allowed, asks=(name,))


def _steps(name: str, seen: Seen, precisions: Precisions) -> Segment:
    before = seen.projected
    assert before is not None

    def run(program: Program) -> Tensor:
        return follow(way_of(program, name), before)[-1]

    def allowed(program: Program) -> Tensor | float:
        return way_off(way_of(program, name), before, _borrowed(seen, before, precisions), *precisions).bound

    stages = (f"{name} norm", f"{name} rotation") if name != "value" else ("value",)
    return Segment(f"{name} used", stages, seen.used, run, allowed, asks=(name, *stages))


def _borrowed(seen: Seen, values: Tensor, precisions: Precisions) -> Off:
    """What the projected values are off by where they are the other side's, of one input: two projections."""
    off = Off.none(values)
    if not seen.borrowed:
        return off
    size = float(values.double().square().mean().sqrt())
    width = values.shape[1] * values.shape[-1]
    sums = sum(unit(p.accumulator) for p in precisions) * math.sqrt(width / 6) * size
    return off.plus(sum(unit(p.dtype) for p in precisions) * values.abs(), sums)


def _output(
    b: CallTensors,
    values: Mapping[str, Tensor],
    precisions: Precisions,
    rows: Tensor | None,
    offs: Mapping[str, Off] | None = None,
) -> Segment:
    query = values["query"]
    count = query.shape[1]

    def grouped(program: Program) -> tuple[Tensor, Tensor]:
        return (
            spread(values["key"], count, program.key.heads),
            spread(values["value"], count, program.value.heads),
        )

    def run(program: Program) -> Tensor:
        assert program.formula is not None
        return attend(query, *grouped(program), program.formula)[0]

    def allowed(program: Program) -> Tensor:
        return allowed_at(program, None)

    def allowed_at(program: Program, index: Tensor | None) -> Tensor:
        formula, rows_of = program.formula, query
        assert formula is not None
        query_off, key_off, value_off = _of_heads(offs, program, count)
        if index is not None:
            formula, rows_of = some_rows(formula, index, query.shape[2]), query[:, :, index]
            query_off = None if query_off is None else query_off.rows(index)
        return output_allowed(
            rows_of,
            *grouped(program),
            formula,
            *precisions,
            query_off=query_off,
            key_off=key_off,
            value_off=value_off,
            entries=b.output.numel(),
        )

    asks = ("key", "value", *OF_FORMULA)
    return Segment("output", OF_FORMULA, b.output, run, allowed, rows, asks, allowed_at)


def _of_heads(
    offs: Mapping[str, Off] | None, program: Program, count: int
) -> tuple[Off | None, Off | None, Off | None]:
    """Errors of q, k and v for every query head."""
    if offs is None:
        return None, None, None
    key, value = (offs[name].spread(count, way_of(program, name).heads) for name in ("key", "value"))
    return offs["query"], key, value
