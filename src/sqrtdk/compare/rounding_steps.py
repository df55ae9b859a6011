"""How far two correct computations of a projection, a normalisation, a rotation may be apart; see `rounding`.

What the rounding of q, k and v, made on their way, comes to in the output of the attention.

The errors of one vector are of two kinds: those of each entry by itself, and one that all entries have in common, as
that of the length it was divided by. Both are standard deviations, those of both sides added up; a bound on an error
that is uniform below it is the root of 3 of them.

An error of q moves the logits of its row by slope (dq . k_j), an error of k one of them by slope (q . dk_j). Whatever
these errors have to do with one another, they move the output by no more than the deviation of v times theirs, both by
the weights of the row (Cauchy and Schwarz); what all logits of a row have in common cancels, as that of q with the mean
of the keys does. An error of v comes with its weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.compare import compute
from sqrtdk.compare.precision import Precision, least, sigmas, sum_variance, unit
from sqrtdk.compare.program import Affine, Norm, Rotation, Rounded, Way

STILL = 1e-3  # an angle that is none
ONE = 1e-5  # within which a frequency is 1, as well as a table of float32 tells it
UNIFORM = math.sqrt(3.0)  # a bound, in standard deviations of what is uniform below it
LENGTH = 4.5  # roundings that the length of a vector is off by at most, as `norm_allowed` counts them


def projection_allowed(affine: Affine, entering: Tensor, a: Precision, b: Precision) -> Tensor:
    """Of a projection, (B, H, L, E); of two dtypes, the side of the lesser one has its weights rounded to it."""
    result, squares = compute.project(affine, entering), _squared(affine, entering)
    bias = 0.0 if affine.bias is None else affine.bias.double().abs()[:, None]
    variance, sizes = sum_variance(result - _plain_bias(affine), squares, entering.shape[-1]), result.abs() + bias
    allowed = sigmas(result.numel()) * cast_unit(affine, a, b) * (squares / 3).sqrt()
    for p, times in ((a, 2),) if a == b else ((a, 1), (b, 1)):
        allowed += times * (_many(variance, p, result.numel()) + unit(p.dtype) * sizes + least(p.dtype))
    return allowed


def cast_unit(affine: Affine, a: Precision, b: Precision) -> float:
    """What weights that one side alone holds in a lesser dtype are off by, relative; 0 where there is none."""
    units = [unit(p.dtype) for p in (a, b)]
    return max(units) if max(units) > min(*units, unit(affine.weight.dtype)) else 0.0


def norm_allowed(norm: Norm, before: Tensor, a: Precision, b: Precision) -> Tensor:
    """Of a normalisation, (B, H, L, E): in the dtype throughout, as careless code computes it.

    The square, the mean, eps, the root: the length is off by half of these and by one rounding of its own; then
    division and gain round, and the shift; a mean that is taken off rounds by its own size.
    """
    result, x = compute.apply_norm(norm, before), before.double()
    middle, length = compute.centred(norm, before)
    count = x.shape[3] * (x.shape[1] if norm.over == "heads" else 1)
    factor = norm.gain.double().abs()[:, None] / length
    shift = torch.zeros(()) if norm.shift is None else norm.shift.double()[:, None].abs()
    mean, squares = (x - middle).abs(), x.square().mean((1, 3) if norm.over == "heads" else 3, keepdim=True) * count
    mean_variance = sum_variance(mean * count, squares, count) / count**2 if norm.kind == "layer" else squares * 0.0
    allowed = torch.zeros_like(result)
    for p in (a, b):
        u, summed = unit(p.dtype), sigmas(result.numel()) * unit(p.accumulator)
        off_mean = u * (mean + middle.abs()) + summed * (mean_variance / 3).sqrt() if norm.kind == "layer" else 0.0
        off_length = 4.5 * u + summed * math.sqrt(count / 9.0) / 2  # a sum of squares is of one sign
        allowed += factor * (off_mean + off_length * middle.abs()) + u * (result.abs() + shift) + least(p.dtype)
    return allowed


def rotation_allowed(rotation: Rotation, before: Tensor, a: Precision, b: Precision, position: int = 0) -> Tensor:
    """Of a rotation, (B, H, L, E): table, two products and their sum, and angles in float32 at such positions.

    Args:
        rotation: the step.
        before: values before it.
        a: one side.
        b: the other side.
        position: largest of a row; 0: that of the table's rows, as far as it says so, at most as many as there are.
    """
    result, x = compute.apply_rotation(rotation, before), before.double().abs()
    turning = slice(rotation.first, rotation.first + rotation.width)
    length = compute.apply_rotation(
        Rotation(rotation.table.abs().to(torch.complex128), rotation.layout, rotation.first), x
    )
    pairs = length[..., turning]
    half = rotation.width // 2
    angle = _angles_off(rotation, before.shape[-2], position)[:, None]
    if rotation.layout == "half":
        size, angle = torch.hypot(pairs[..., :half], pairs[..., half:]).repeat(1, 1, 1, 2), angle.repeat(1, 1, 1, 2)
    else:
        size = torch.hypot(pairs[..., ::2], pairs[..., 1::2]).repeat_interleave(2, -1)
        angle = angle.repeat_interleave(2, -1)
    allowed = torch.zeros_like(result)
    for p in (a, b):
        part = unit(p.dtype) * result.abs()
        part[..., turning] = unit(p.dtype) * (2.0 * math.sqrt(2.0) + 1.0) * size
        if p.dtype != torch.float64:
            part[..., turning] += angle * size
        allowed += part + least(p.dtype)
    return allowed


def _angles_off(rotation: Rotation, length: int, position: int) -> Tensor:
    """Of the angles, (B or 1, L, R / 2), position times frequency, each in float32: by three roundings of an angle.

    A frequency is by how much a pair turns more from one row to the next, at most; positions are those of the rows
    where the first does not turn.
    """
    table = rotation.table.to(torch.complex128)
    frequencies = torch.ones(1, 1, table.shape[-1], dtype=torch.float64)
    if table.shape[-2] > 1:
        frequencies = (table[:, 1:] * table[:, :-1].conj()).angle().abs().amax((0, 1), keepdim=True).clamp(max=1.0)
        frequencies = torch.where((frequencies - 1.0).abs() < ONE, 0.0, frequencies)  # base^0: no rounding is in it
    positions = torch.full((table.shape[-2],), float(position or length), dtype=torch.float64)
    if not position and bool((table[:, 0].angle().abs() < STILL).all()):
        positions = torch.arange(table.shape[-2], dtype=torch.float64)
    return (3.0 * unit(torch.float32) * positions[:, None] * frequencies).expand(table.shape)


def _many(variance: Tensor, p: Precision, entries: int) -> Tensor:
    return sigmas(entries) * unit(p.accumulator) * (variance / 3).sqrt()


def _squared(affine: Affine, entering: Tensor) -> Tensor:
    return compute.project(
        Affine("", affine.weight.double().square(), None, affine.features), entering.double().square()
    )


def _plain_bias(affine: Affine) -> Tensor | float:
    return 0.0 if affine.bias is None else affine.bias.double()[:, None]


# -- what it comes to in the output ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Off:
    """Standard deviations of the errors of q, k or v.

    Attributes:
        each: of every entry, (B, H, L, E).
        row: of what all entries of a vector have in common, relative, broadcasts to (B, H, L, 1).
    """

    each: Tensor
    row: Tensor

    @classmethod
    def none(cls, values: Tensor) -> Off:
        """Of values that are as they were recorded."""
        return cls(torch.zeros_like(values, dtype=torch.float64), torch.zeros((), dtype=torch.float64))

    def spread(self, count: int, heads: Tensor | None) -> Off:
        """For every query head, as `compute.spread`."""
        row = self.row.expand(*self.each.shape[:-1], 1)
        return Off(compute.spread(self.each, count, heads), compute.spread(row, count, heads))

    def rows(self, which: Tensor | slice) -> Off:
        """Of some rows."""
        return Off(self.each[..., which, :], self.row.expand(*self.each.shape[:-1], 1)[..., which, :])


class Offs(NamedTuple):
    """Errors of q, k and v, each for every query head."""

    query: Off
    key: Off
    value: Off


def projection_off(affine: Affine, entering: Tensor, a: Precision, b: Precision) -> Off:
    """Of a projection, (B, H, L, E): its sum, and the rounding of that and of the bias."""
    result, bias = compute.project(affine, entering), affine.bias
    plain = bias.double()[:, None] if bias is not None else torch.zeros((), dtype=torch.float64)
    squared = Affine("", affine.weight.double().square(), None, affine.features)
    squares = compute.project(squared, entering.double().square())
    summed, last = sum_variance(result - plain, squares, entering.shape[-1]), (result.abs() + plain.abs()).square()
    off = Off(cast_unit(affine, a, b) * (squares / 3).sqrt(), Off.none(result).row)
    for p in (a, b):
        off = Off(off.each + ((unit(p.accumulator) ** 2 * summed + unit(p.dtype) ** 2 * last) / 3).sqrt(), off.row)
    return off


def way_off(way: Way, before: Tensor, off: Off, a: Precision, b: Precision) -> Off:
    """After all steps of a way: what came into a step goes through it, and what it rounds itself is added."""
    values = before.double()
    for step in way.steps:
        after = compute.apply_step(step, values)
        if isinstance(step, Norm):
            off = _normed(step, values, after, off, (a, b))
        elif isinstance(step, Rotation):
            each = turned(step, off.each) + rotation_allowed(step, values, a, b) / UNIFORM
            off = Off(each, off.row)
        elif isinstance(step, Rounded):
            off = _stepped(step, values, off)
        values = after
    if not way.steps:
        off = Off(off.each + sum(unit(p.dtype) for p in (a, b)) / UNIFORM * values.abs(), off.row)
    scaled = abs(way.scaled) if isinstance(way.scaled, float) else way.scaled.abs()
    return Off(off.each * scaled, off.row)


def turned(rotation: Rotation, each: Tensor) -> Tensor:
    """Deviations after a rotation, of entries that are off by chance."""
    table = rotation.table.abs().square(), rotation.table.real.square(), rotation.table.imag.square()
    result, mixed = each.clone(), each.clone()
    span = slice(rotation.first, rotation.first + rotation.width)
    half = rotation.width // 2
    places = (
        (slice(0, half), slice(half, None)) if rotation.layout == "half" else (slice(0, None, 2), slice(1, None, 2))
    )
    one, other = (each[..., span][..., place].square() for place in places)
    cosine, sine = table[1].double()[:, None], table[2].double()[:, None]
    mixed[..., span][..., places[0]] = (one * cosine + other * sine).sqrt()
    mixed[..., span][..., places[1]] = (one * sine + other * cosine).sqrt()
    result[..., span] = mixed[..., span]
    return result


def _normed(norm: Norm, before: Tensor, after: Tensor, off: Off, sides: tuple[Precision, Precision]) -> Off:
    middle, length = compute.centred(norm, before)
    count = before.shape[3] * (before.shape[1] if norm.over == "heads" else 1)
    factor = norm.gain.double().abs()[:, None] / length.clamp(min=1e-300)
    shift = torch.zeros((), dtype=torch.float64) if norm.shift is None else norm.shift.double()[:, None].abs()
    mean = (before - middle).abs()
    each, row = off.each * factor, torch.zeros((), dtype=torch.float64)
    for p in sides:
        u, summed = unit(p.dtype), unit(p.accumulator)
        relative = math.sqrt((LENGTH * u) ** 2 / 3 + summed**2 * count / 36)
        each = each + u / UNIFORM * (after.abs() + shift) + least(p.dtype) + relative * shift
        if norm.kind == "layer":
            square = before.square().mean((1, 3) if norm.over == "heads" else 3, keepdim=True) * count
            variance = sum_variance(mean * count, square, count) / count**2
            each = each + factor * (u / UNIFORM * (mean + middle.abs()) + summed * (variance / 3).sqrt())
        row = row + relative
    return Off(each, row + off.row)


def _stepped(step: Rounded, values: Tensor, off: Off) -> Off:
    """Numbers that fall on the next one of a lesser dtype."""
    most = sigmas(values.numel())
    error = most * (off.each + off.row * values.abs())
    above, under = (compute.apply_step(step, values + way * error) for way in (1.0, -1.0))
    return Off((above - under) / most, torch.zeros((), dtype=torch.float64))


def of_logits(
    query: Tensor, key: Tensor, offs: Offs, product: Tensor, slope: Tensor, whole: Tensor, most: float
) -> Tensor:
    """Variance of the logits of a row by their weights, (B, Hq, l, 1), curved as the exponential is.

    Args:
        query: rows (B, Hq, l, E).
        key: (B, Hq, S, E).
        offs: of these rows.
        product: of both.
        slope: of the logits against it.
        whole: the weights.
        most: standard deviations that are allowed for.
    """
    own, other = offs.query, offs.key
    steep = slope.expand(product.shape)
    first, second = whole * steep, whole * steep.square()
    about = (second @ key.square() - (first @ key).square()).clamp(min=0.0)
    of_query = (own.each.square() * about).sum(-1, keepdim=True)
    spread = (second * product.square()).sum(-1, keepdim=True) - (first * product).sum(-1, keepdim=True).square()
    of_query = of_query + own.row.square() * spread.clamp(min=0.0)
    of_key = query.square() @ other.each.square().mT + other.row.square().mT * product.square()
    total = of_query + (second * of_key).sum(-1, keepdim=True)
    largest = most * (total + (steep.square() * of_key).amax(-1, keepdim=True)).sqrt()
    return total * (torch.expm1(largest.clamp(max=30.0)) / largest.clamp(min=1e-12)).clamp(min=1.0).square()


def of_values(value: Tensor, off: Off, weights: Tensor, times: Tensor) -> Tensor:
    """Variance of the output by errors of v, (B, Hq, l, Ev); a value that occurs several `times` is off as often."""
    return (weights.square() * times) @ (off.each.square() + off.row.square() * value.square())
