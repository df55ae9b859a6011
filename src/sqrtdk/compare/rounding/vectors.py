"""How far two correct computations of q, k or v may differ on their way: projection, normalisation, rotation.

Errors are propagated step by step: each step rounds its result, and earlier errors pass through it. Three numbers are
carried:

- `each`: standard deviation of the independent error of an entry;
- `row`: standard deviation of the relative error that all entries of a vector share, such as that of the length which
  divided them. These two decide how far the output moves (`rounding`);
- `bound`: the largest possible error of an entry. It decides whether the vector itself is equal.

A step makes errors with a bound, `hard` (one rounding, or a few that may have the same sign), and sums of many errors
with standard deviation `chance`. Their joint bound is hard + sigmas * chance. Their joint deviation is the root of
hard^2 / 3 + chance^2, because a uniform error deviates by its bound over sqrt(3). The errors of both sides are added.

How a step carries earlier errors on, where e is the error of x and h its bound:

- A norm, y = g x / l, gives g (e - x (x . e) / (x . x)) / l. The second part is the error of the length l. It is
  largest if e is parallel to x, and then as long as h. So g (h + |x| |h| / l) / l is a bound, where lengths are root
  mean squares if l is. The mean that "layer" subtracts moves by at most |h|. Random errors of many entries are not
  parallel to x, so each is multiplied by g / l.
- A rotation by c + i s gives c e1 - s e2: bound |c| h1 + |s| h2, deviation the root of c^2 e1^2 + s^2 e2^2.
- A rounding moves a number to a neighbour or not: the rounded x - h and x + h limit how far it goes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.compare.inside import compute
from sqrtdk.compare.inside.program import Affine, NormStep, PathStep, Rotation, RoundingStep, VectorPath
from sqrtdk.compare.rounding.precision import Precision, Precisions, least, rounding_unit, sigmas, sum_variance
from sqrtdk.tracing.probe.rotation import halves

STILL_RADIANS = 1e-3  # radians: smaller angles count as no rotation
UNIT_FREQUENCY_TOLERANCE = 1e-5  # distance within which a frequency is 1, as well as a float32 table shows it
# roundings of a length: half of those of square, mean, eps and root (the root halves them), and its own
LENGTH_ROUNDINGS = 4.5
# in units of a pair's length: cosine or sine and its product, for both channels
ROTATION_ROUNDINGS = 2.0 * math.sqrt(2.0)
PROJECTION_ROUNDINGS = 2.0  # roundings between two sides' projections
MOST_RELATIVE_ERROR = 0.5  # relative to their length; a norm and a rotation in bfloat16 are allowed less than a tenth
IN_FLOAT64 = Precision(torch.float64)
Steps = tuple[PathStep, ...]


class VectorErrors(NamedTuple):
    """Errors of q, k or v, in float64; the file's docstring defines them.

    Attributes:
        each: (B, H, L, E), standard deviation of each entry's independent error.
        row: (B, H, L, 1), standard deviation of the relative error that the entries of one vector share.
        bound: (B, H, L, E), largest absolute error of each entry.
    """

    each: Tensor
    row: Tensor
    bound: Tensor

    @classmethod
    def none(cls, values: Tensor) -> VectorErrors:
        """Return errors of 0 for values (B, H, L, E) that are exactly as recorded."""
        nothing = torch.zeros_like(values, dtype=torch.float64)
        return cls(nothing, nothing[..., :1], nothing)

    def plus(self, hard: Tensor | float, chance: Tensor | float = 0.0) -> VectorErrors:
        """Return the errors with another, independent error added to every entry.

        Args:
            hard: largest absolute value of an error that has a bound, broadcast to (B, H, L, E).
            chance: standard deviation of a sum of many errors, broadcast to (B, H, L, E).
        """
        hard, chance = (torch.as_tensor(error, dtype=torch.float64) for error in (hard, chance))
        deviation = (hard.square() / 3 + chance.square()).sqrt()
        return VectorErrors(self.each + deviation, self.row, self.bound + hard + sigmas(self.each.numel()) * chance)

    def spread(self, count: int, heads: Tensor | None) -> VectorErrors:
        """Return the errors for `count` query heads; head i takes those of `heads[i]` (see `compute.repeat_heads`)."""
        return VectorErrors(*(compute.repeat_heads(error, count, heads) for error in self))

    def rows(self, which: Tensor | slice) -> VectorErrors:
        """Return the errors of some rows (axis L), by indices, booleans or a slice."""
        return VectorErrors(*(error[..., which, :] for error in self))


def projection_errors(affine: Affine, entering: Tensor, sides: Precisions) -> tuple[Tensor, VectorErrors]:
    """Return the projection of an input and its rounding errors, those of both sides added.

    Args:
        affine: weight and bias of the projection.
        entering: the input, (B, L, D).
        sides: precision of A and of B. If one dtype is coarser, its side is taken to have rounded the weights to it.

    Returns:
        The heads (B, H, L, E) in float64, and their errors: of the sum of products, of its rounding, and of the bias.
    """
    result = compute.project_input(affine, entering)
    squared = replace(affine, weight=affine.weight.double().square(), bias=None)
    squares = compute.project_input(squared, entering.double().square())
    bias = torch.zeros(()) if affine.bias is None else affine.bias.double()[:, None]
    summed = (sum_variance(result - bias, squares, entering.shape[-1]) / 3).sqrt()
    units = [rounding_unit(p.dtype) for p in sides]
    # `linear.weight.bfloat16()` on the coarser side, the float32 weight on the other
    cast = max(units) if max(units) > min(*units, rounding_unit(affine.weight.dtype)) else 0.0
    off = VectorErrors.none(result).plus(0.0, cast * (squares / 3).sqrt())
    for p in sides:
        off = off.plus(
            rounding_unit(p.dtype) * (result.abs() + bias.abs()) + least(p.dtype), rounding_unit(p.accumulator) * summed
        )
    return result, off


def errors_along(path: VectorPath, before: Tensor, off: VectorErrors, sides: Precisions) -> tuple[Tensor, VectorErrors]:
    """Return the values after all steps of a path and their errors.

    Args:
        path: the steps and the factor after them.
        before: values before the first step, (B, H, L, E).
        off: errors of these values.
        sides: precision of A and of B; the errors of both are added.

    Returns:
        The values (B, H, L, E) in float64 and their errors.
    """
    values = before.double()
    for step in path.steps:
        after = compute.apply_step(step, values)
        off, values = _stepped(step, values, after, off, sides), after
    if not path.steps:
        off = off.plus(sum(rounding_unit(p.dtype) for p in sides) * values.abs())
    scaled = torch.as_tensor(path.scaled, dtype=torch.float64).abs()
    return values * path.scaled, VectorErrors(off.each * scaled, off.row, off.bound * scaled)


def allowed(steps: Steps, entered: Tensor, dtype: torch.dtype, bound: Tensor | None = None) -> Tensor:
    """Return the allowed absolute error (B, H, L, E) of values that one side computed by these steps.

    Args:
        steps: steps of a path.
        entered: values before them, (B, H, L, E).
        dtype: dtype in which they were computed.
        bound: absolute error of `entered`; None takes two relative roundings of it, those of a projection.
    """
    bound = PROJECTION_ROUNDINGS * rounding_unit(dtype) * entered.abs() if bound is None else bound
    return errors_along(
        VectorPath(steps=steps), entered, VectorErrors.none(entered).plus(bound), (IN_FLOAT64, Precision(dtype))
    )[1].bound


def agrees(steps: Steps, entered: Tensor, wanted: Tensor, dtype: torch.dtype, bound: Tensor | None = None) -> bool:
    """Return whether the steps turn `entered` into `wanted`, every entry within the error that `allowed` gives.

    Args:
        steps: steps of a path.
        entered: values before them, (B, H, L, E).
        wanted: values that they should give, (B, H, L, E).
        dtype: dtype in which `wanted` was computed.
        bound: absolute error of `entered`, as for `allowed`.
    """
    got = compute.follow_path(VectorPath(steps=steps), entered)[-1]
    apart = (got - wanted).abs()
    if float(apart.norm()) > MOST_RELATIVE_ERROR * float(got.norm()):
        return False  # nearly every candidate fails here, before any rounding has to be computed
    return bool((apart <= allowed(steps, entered, dtype, bound)).all())


def inverse(step: Rotation) -> Rotation:
    """Return the rotation that undoes this one: its table is the reciprocal, so the amplitude is undone too."""
    size = step.table.abs().square().clamp_min(torch.finfo(torch.float64).tiny)
    return replace(step, table=step.table.conj().resolve_conj() / size)


def _stepped(step: PathStep, before: Tensor, after: Tensor, off: VectorErrors, sides: Precisions) -> VectorErrors:
    if isinstance(step, NormStep):
        return _normed(step, before, after, off, sides)
    if isinstance(step, Rotation):
        return _turned(step, before, off, sides)
    if not isinstance(step, RoundingStep):
        return off
    above, under = (compute.apply_step(step, before + path * off.bound) for path in (1.0, -1.0))
    bound = torch.maximum((above - after).abs(), (after - under).abs())
    off = VectorErrors((above - under).abs() / sigmas(before.numel()), torch.zeros_like(off.row), bound)
    if isinstance(step.by, float) and step.by == 1.0:
        return off
    for p in sides:  # reading a stored number multiplies it by a scale, which was rounded too
        off = off.plus(2.0 * rounding_unit(p.dtype) * after.abs())
    return off


def _normed(norm: NormStep, before: Tensor, after: Tensor, off: VectorErrors, sides: Precisions) -> VectorErrors:
    """Return errors after a norm computed in the side's dtype throughout, as careless code does.

    The length, the division, the gain and the shift round. A subtracted mean rounds by its own size. A sum of squares
    has one sign, so nothing cancels in it.
    """
    layer, over = norm.kind == "layer", (1, 3) if norm.over == "heads" else (3,)
    middle, length = compute.centred(norm, before)
    _, error = compute.centred(replace(norm, kind="l2" if norm.kind == "l2" else "rms", eps=0.0), off.bound)
    factor = norm.gain.double().abs()[:, None] / length.clamp(min=1e-300)
    bound = off.bound + error * ((middle / length.clamp(min=1e-300)).abs() + float(layer))
    off = VectorErrors(off.each * factor, off.row, bound * factor)
    count = before.shape[3] * (before.shape[1] if norm.over == "heads" else 1)
    shift = torch.zeros(()) if norm.shift is None else norm.shift.double()[:, None]
    mean, squares = (before - middle).abs(), before.square().mean(over, keepdim=True) * count
    variance = sum_variance(mean * count, squares, count) / count**2
    for p in sides:
        u, summed = rounding_unit(p.dtype), rounding_unit(p.accumulator)
        off = off.plus(u * (after.abs() + shift.abs()) + least(p.dtype))
        if layer:
            off = off.plus(factor * u * (mean + middle.abs()), factor * summed * (variance / 3).sqrt())
        hard, chance = LENGTH_ROUNDINGS * u, summed * math.sqrt(count) / 6
        relative = math.sqrt(hard**2 / 3 + chance**2)
        most = (hard + sigmas(after.numel()) * chance) * (after - shift).abs()
        off = VectorErrors(off.each + relative * shift.abs(), off.row + relative, off.bound + most)
    return off


def _turned(rotation: Rotation, before: Tensor, off: VectorErrors, sides: Precisions) -> VectorErrors:
    """Return errors of table, two products and their sum, and of angles computed in float32 (three roundings each)."""
    real, imaginary = rotation.table.real.double().abs(), rotation.table.imag.double().abs()
    size = real.square() + imaginary.square()
    each = _mixed(rotation, off.each.square(), real.square(), imaginary.square()).sqrt()
    off = VectorErrors(each, off.row, _mixed(rotation, off.bound, real, imaginary))
    length = _mixed(rotation, before.square(), size, size).sqrt()
    turns = before.new_zeros(before.shape[-1])
    turns[rotation.first : rotation.first + rotation.width] = 1.0
    angle = 3.0 * rounding_unit(torch.float32) * _angles(rotation, before.shape[-2])
    by_angle = turns * _mixed(rotation, length, angle, torch.zeros_like(angle))
    for p in sides:
        rounded = rounding_unit(p.dtype) * (1.0 + ROTATION_ROUNDINGS * turns) * length + least(p.dtype)
        off = off.plus(rounded if p.dtype == torch.float64 else rounded + by_angle)
    return off


def _mixed(rotation: Rotation, values: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """Return values in which each rotating channel is `own` times itself plus `other` times its partner."""
    result = values.clone()
    places = halves(result[..., rotation.first : rotation.first + rotation.width], rotation.layout)
    one, two = (own[:, None] * places[i] + other[:, None] * places[1 - i] for i in (0, 1))
    places[0].copy_(one)
    places[1].copy_(two)
    return result


def _angles(rotation: Rotation, length: int) -> Tensor:
    """Return the angles that were rounded, (B or 1, L, R / 2): position times frequency.

    The frequency is the largest step of a pair from one row to the next. Positions are the row numbers if the first
    row does not rotate; otherwise every position is taken as large as the number of rows.
    """
    table = rotation.table.to(torch.complex128)
    frequencies = torch.ones(1, 1, table.shape[-1], dtype=torch.float64)
    if table.shape[-2] > 1:
        frequencies = (table[:, 1:] * table[:, :-1].conj()).angle().abs().amax((0, 1), keepdim=True).clamp(max=1.0)
        one = (frequencies - 1.0).abs() < UNIT_FREQUENCY_TOLERANCE  # the frequency base^0 is exact
        frequencies = torch.where(one, 0.0, frequencies)
    positions = torch.full((table.shape[-2],), float(length), dtype=torch.float64)
    if bool((table[:, 0].angle().abs() < STILL_RADIANS).all()):
        positions = torch.arange(table.shape[-2], dtype=torch.float64)
    return (positions[:, None] * frequencies).expand(table.shape)
