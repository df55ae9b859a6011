"""How far two correct computations of a projection, a normalisation, a rotation may be apart; see `rounding`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sqrtdk.compare import compute
from sqrtdk.compare.precision import Precision, least, sigmas, sum_variance, unit
from sqrtdk.compare.program import Affine, Norm, Rotation


def projection_allowed(affine: Affine, entering: Tensor, a: Precision, b: Precision) -> Tensor:
    """Of a projection, (B, H, L, E)."""
    result, squares = compute.project(affine, entering), _squared(affine, entering)
    bias = 0.0 if affine.bias is None else affine.bias.double().abs()[:, None]
    return sum(
        (
            _many(sum_variance(result - _plain_bias(affine), squares, entering.shape[-1]), p, result.numel())
            + unit(p.dtype) * (result.abs() + bias)
            + least(p.dtype)
            for p in (a, b)
        ),
        torch.zeros_like(result),
    )


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
        position: largest of a row; 0: as many as there are rows.
    """
    result, x = compute.apply_rotation(rotation, before), before.double().abs()
    turning = slice(rotation.first, rotation.first + rotation.width)
    length = compute.apply_rotation(
        Rotation(rotation.table.abs().to(torch.complex128), rotation.layout, rotation.first), x
    )
    pairs = length[..., turning]
    half = rotation.width // 2
    if rotation.layout == "half":
        size = torch.hypot(pairs[..., :half], pairs[..., half:]).repeat(1, 1, 1, 2)
    else:
        size = torch.hypot(pairs[..., ::2], pairs[..., 1::2]).repeat_interleave(2, -1)
    angle = 3.0 * unit(torch.float32) * (position or before.shape[-2])
    allowed = torch.zeros_like(result)
    for p in (a, b):
        part = unit(p.dtype) * result.abs()
        part[..., turning] = unit(p.dtype) * (2.0 * math.sqrt(2.0) + 1.0) * size
        if p.dtype != torch.float64:
            part[..., turning] += angle * size
        allowed += part + least(p.dtype)
    return allowed


def _many(variance: Tensor, p: Precision, entries: int) -> Tensor:
    return sigmas(entries) * unit(p.accumulator) * (variance / 3).sqrt()


def _squared(affine: Affine, entering: Tensor) -> Tensor:
    return compute.project(
        Affine("", affine.weight.double().square(), None, affine.features), entering.double().square()
    )


def _plain_bias(affine: Affine) -> Tensor | float:
    return 0.0 if affine.bias is None else affine.bias.double()[:, None]
