"""How far two correct computations of a projection, a normalisation, a rotation may be apart; see `rounding`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sqrtdk.compare import compute
from sqrtdk.compare.precision import Precision, least, sigmas, sum_variance, unit
from sqrtdk.compare.program import Affine, Norm, Rotation

STILL = 1e-3  # an angle that is none
ONE = 1e-5  # within which a frequency is 1, as well as a table of float32 tells it


def projection_allowed(affine: Affine, entering: Tensor, a: Precision, b: Precision) -> Tensor:
    """Of a projection, (B, H, L, E); of two dtypes, the side of the lesser one has its weights rounded to it."""
    result, squares = compute.project(affine, entering), _squared(affine, entering)
    bias = 0.0 if affine.bias is None else affine.bias.double().abs()[:, None]
    return sum(
        (
            _many(sum_variance(result - _plain_bias(affine), squares, entering.shape[-1]), p, result.numel())
            + unit(p.dtype) * (result.abs() + bias)
            + least(p.dtype)
            for p in (a, b)
        ),
        sigmas(result.numel()) * cast_unit(affine, a, b) * (squares / 3).sqrt(),
    )


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
