"""Whether steps give values, as near as rounding allows.

`ENTERS` roundings of the dtype are allowed for what came in and what is written, and `STEP` more for each step, of the
size of what an entry was made of: both channels of a pair, both terms of a shifted norm.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.compute import apply_step, follow
from sqrtdk.compare.program import Norm, Rotation, Step, Way

ENTERS, STEP = 2.0, 8.0  # roundings: a norm takes six, a rotation five
Steps = tuple[Step, ...]


def agrees(steps: Steps, entered: Tensor, wanted: Tensor, unit: float, sizes: Tensor | None = None) -> bool:
    """Whether the steps give the values, as near as rounding allows.

    Args:
        steps: of a way.
        entered: (B, H, L, E), before them.
        wanted: after them.
        unit: relative size of a rounding.
        sizes: of what the entries of `entered` were made of; None: their own.
    """
    got, allowed = follow(Way(steps=steps), entered)[-1], sizes_of(steps, entered, sizes) * roundings(steps) * unit
    return bool(((got - wanted).abs() <= allowed).all())


def roundings(steps: Steps) -> float:
    """How many an entry may be off by."""
    return ENTERS + STEP * len(steps)


def sizes_of(steps: Steps, entered: Tensor, sizes: Tensor | None = None) -> Tensor:
    """(B, H, L, E): the sizes of what an entry was made of, its rounding is relative to them."""
    values, sizes = entered, entered.abs() if sizes is None else sizes
    for step in steps:
        if isinstance(step, Norm):
            sizes = _normed(step, values, sizes)
        elif isinstance(step, Rotation):
            sizes = _paired(step, sizes)
        values = apply_step(step, values)
    return sizes


def _normed(step: Norm, values: Tensor, sizes: Tensor) -> Tensor:
    """Sizes divided by what the norm divides by, with what it subtracts and adds."""
    axes = (1, 3) if step.over == "heads" else (3,)
    mean = values.mean(axes, keepdim=True) if step.kind == "layer" else values.new_zeros(1)
    ones = replace(step, gain=torch.ones_like(step.gain), shift=None)
    least = torch.finfo(torch.float64).tiny
    by = apply_step(ones, values).abs().sum(axes, keepdim=True) / (values - mean).abs().sum(
        axes, keepdim=True
    ).clamp_min(least)
    normed = (sizes + mean.abs()) * by * step.gain.abs()[:, None]
    return normed if step.shift is None else normed + step.shift.abs()[:, None]


def undone(step: Rotation, values: Tensor) -> Tensor:
    """Values before a rotation."""
    size = step.table.abs().square().clamp_min(torch.finfo(torch.float64).tiny)
    return apply_step(replace(step, table=step.table.conj().resolve_conj() / size), values)


def _paired(step: Rotation, sizes: Tensor) -> Tensor:
    """The length of each pair at both of its channels."""
    result, width = sizes.clone(), step.width
    part = result[..., step.first : step.first + width]
    first, second = (
        (part[..., : width // 2], part[..., width // 2 :])
        if step.layout == "half"
        else (part[..., ::2], part[..., 1::2])
    )
    length = torch.hypot(first, second) * step.table.abs()[:, None]
    first.copy_(length)
    second.copy_(length)
    return result
