"""The parts of an attention between two places where B's numbers are recorded; A's program is run over each by itself.

Every part begins with what B had there, so that what differs before it, and the rounding of that, does not count
against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.compare import rounding
from sqrtdk.compare.compute import apply_step, attend, follow, project, spread
from sqrtdk.compare.observed import NAMES, Seen
from sqrtdk.compare.precision import Precision, sigmas, unit
from sqrtdk.compare.program import Norm, Opaque, Program, Rotation, Way
from sqrtdk.compare.suspect import STAGES
from sqrtdk.tracing.tensors import CallTensors

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
    """

    name: str
    stages: tuple[str, ...]
    target: Tensor
    run: Callable[[Program], Tensor]
    allowed: Callable[[Program], Tensor | float]
    rows: Tensor | None = None
    asks: tuple[str, ...] = STAGES


@dataclass(frozen=True, slots=True, eq=False)
class Gap:
    """How far a program's values are from B's.

    Attributes:
        largest: the largest difference.
        size: root of the mean square of the differences.
        allowed: largest of what is allowed.
        within: every difference is allowed.
    """

    largest: float
    size: float
    allowed: float
    within: bool


def gap(segment: Segment, program: Program) -> Gap:
    """How far a program is from B over a segment; not a number counts as far."""
    difference = (segment.run(program) - segment.target.double()).abs()
    allowed = torch.as_tensor(segment.allowed(program), dtype=torch.float64).expand(difference.shape)
    if segment.rows is not None:
        counted = segment.rows[:, None, :, None].expand(difference.shape)
        difference, allowed = difference[counted], allowed[counted]
    if not difference.numel():
        return Gap(0.0, 0.0, 0.0, True)
    difference = difference.nan_to_num(nan=float("inf"), posinf=float("inf"))
    within = bool((difference <= allowed).all())
    return Gap(float(difference.max()), float(difference.square().mean().sqrt()), float(allowed.max()), within)


def way_of(program: Program, name: str) -> Way:
    """The way of q, k or v by name."""
    way: Way = getattr(program, name)
    return way


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
    parts = [_projection(name, seen[name], precisions) for name in NAMES if _projects(seen[name], way_of(a, name))]
    parts += [_steps(name, seen[name], precisions) for name in NAMES if _steps_known(seen[name], way_of(a, name))]
    if a.formula is not None:
        parts.append(_output(b, {name: seen[name].used for name in NAMES}, precisions, rows))
    return parts


def whole(b: CallTensors, seen: Mapping[str, Seen], a: Program, precisions: Precisions, rows: Tensor | None) -> Segment:
    """All segments as one: from what came in, or the first that is recorded, to the output."""
    parts = {part.name: part for part in segments(b, seen, a, precisions, rows)}

    def vectors(program: Program) -> dict[str, Tensor]:
        found = {}
        for name in NAMES:
            values = parts[name].run(program) if name in parts else seen[name].projected
            known = f"{name} used" in parts and values is not None
            found[name] = follow(way_of(program, name), values)[-1] if known and values is not None else seen[name].used
        return found

    def run(program: Program) -> Tensor:
        return _output(b, vectors(program), precisions, rows).run(program)

    def allowed(program: Program) -> Tensor:
        values = vectors(program)
        errors = {
            name: _sum([parts[part].allowed(program) for part in (name, f"{name} used") if part in parts])
            for name in NAMES
        }
        limit = torch.as_tensor(_output(b, values, precisions, rows).allowed(program))
        return limit + _carried(program, values, errors)

    return Segment("whole", STAGES, b.output, run, allowed, rows)


def _sum(limits: list[Tensor | float]) -> Tensor | float:
    return sum(limits[1:], limits[0]) if limits else 0.0


def _carried(program: Program, values: dict[str, Tensor], errors: dict[str, Tensor | float]) -> Tensor:
    """By how much errors of q, k and v move the output, at most: logits by dz move weights by a factor of e^(2 dz)."""
    formula, count = program.formula, values["query"].shape[1]
    assert formula is not None
    sizes = {name: torch.as_tensor(errors[name], dtype=torch.float64).expand(values[name].shape) for name in NAMES}
    key, value = (spread(values[name], count, way_of(program, name).heads).double() for name in ("key", "value"))
    of_key, of_value = (spread(sizes[name], count, way_of(program, name).heads) for name in ("key", "value"))
    query = values["query"].double()
    slope = float(torch.as_tensor(formula.scale, dtype=torch.float64).abs().max())
    slope *= float(torch.as_tensor(formula.after, dtype=torch.float64).abs().max())
    lengths = key.norm(dim=-1).amax(-1), of_key.norm(dim=-1).amax(-1)
    moved = slope * (sizes["query"].norm(dim=-1) * lengths[0][..., None] + query.norm(dim=-1) * lengths[1][..., None])
    reach = value.amax(-2, keepdim=True) - value.amin(-2, keepdim=True)
    return torch.expm1((2 * moved).clamp(max=1.0)).clamp(max=1.0)[..., None] * reach + of_value.amax(-2, keepdim=True)


def _projects(seen: Seen, way: Way) -> bool:
    fits = way.affine is not None and seen.input is not None and seen.projected is not None
    return fits and way.affine is not None and way.affine.weight.shape[:2] == seen.projected.shape[1:4:2]  # type: ignore[union-attr]


def _steps_known(seen: Seen, way: Way) -> bool:
    return seen.projected is not None and is_known(way) and seen.projected.shape == seen.used.shape


def _projection(name: str, seen: Seen, precisions: Precisions) -> Segment:
    entering = seen.input
    assert entering is not None
    assert seen.projected is not None

    def run(program: Program) -> Tensor:
        affine = way_of(program, name).affine
        assert affine is not None
        return project(affine, entering)

    def allowed(program: Program) -> Tensor | float:
        affine = way_of(program, name).affine
        assert affine is not None
        return rounding.projection_allowed(affine, entering, *precisions)

    return Segment(name, (name,), seen.projected, run, allowed, asks=(name,))


def _steps(name: str, seen: Seen, precisions: Precisions) -> Segment:
    before = seen.projected
    assert before is not None

    def run(program: Program) -> Tensor:
        return follow(way_of(program, name), before)[-1]

    def allowed(program: Program) -> Tensor | float:
        return _way_allowed(way_of(program, name), before, precisions) + _borrowed(seen, precisions)

    stages = (f"{name} norm", f"{name} rotation") if name != "value" else ("value",)
    return Segment(f"{name} used", stages, seen.used, run, allowed, asks=(name, *stages))


def _way_allowed(way: Way, before: Tensor, precisions: Precisions) -> Tensor:
    """Of all steps together: what one leaves is carried on by the next."""
    values, allowed = before, torch.zeros_like(before)
    for step in way.steps:
        after = apply_step(step, values)
        if isinstance(step, Norm):
            length = after.abs().amax(-1, keepdim=True) / values.abs().amax(-1, keepdim=True).clamp_min(1e-300)
            allowed = allowed * length + rounding.norm_allowed(step, values, *precisions)
        elif isinstance(step, Rotation):
            turned = allowed.square().sum(-1, keepdim=True).sqrt() * float(step.table.abs().max())
            still = allowed.clone()
            still[..., step.first : step.first + step.width] = turned
            allowed = still + rounding.rotation_allowed(step, values, *precisions)
        values = after
    if not way.steps:
        allowed = allowed + sum(unit(p.dtype) for p in precisions) * values.abs()
    scaled = abs(way.scaled) if isinstance(way.scaled, float) else way.scaled.abs()
    return allowed * scaled


def _borrowed(seen: Seen, precisions: Precisions) -> Tensor | float:
    """What the projected values are off by where they are the other side's, of one input: two projections."""
    if not seen.borrowed:
        return 0.0
    values = seen.projected
    assert values is not None
    size = float(values.double().square().mean().sqrt())
    width = values.shape[1] * values.shape[-1]
    sums = sum(unit(p.accumulator) for p in precisions) * math.sqrt(width / 6) * size
    return sigmas(values.numel()) * sums + sum(unit(p.dtype) for p in precisions) * values.abs()


def _output(b: CallTensors, values: Mapping[str, Tensor], precisions: Precisions, rows: Tensor | None) -> Segment:
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

    def allowed(program: Program) -> Tensor | float:
        assert program.formula is not None
        return rounding.output_allowed(query, *grouped(program), program.formula, *precisions)

    return Segment("output", OF_FORMULA, b.output, run, allowed, rows, ("key", "value", *OF_FORMULA))
