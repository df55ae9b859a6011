"""Values that were multiplied and rounded to a lesser dtype, in either order: by what, and to which dtype.

Rounded after the factor, each entry says between which two numbers the factor lies: those that would still round to it.
All entries together leave next to no room, and any factor in it gives just the values that there are. Rounded before,
the values are the rounded ones times one number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LESSER = (torch.bfloat16, torch.float16)
AXES = ((0, 1, 2, 3), (0, 2, 3), (0, 1, 3), (3,))  # of which all have one factor: all, a head, a row, a vector
PRODUCT = 4.0  # roundings of the dtype that a product and its factor are off by before they are rounded


class RoundedFactor(NamedTuple):
    """What happened to values.

    Attributes:
        dtype: to which they were rounded.
        factor: a number, or (B or 1, H or 1, L or 1, 1).
        before: the factor was there before the rounding.
    """

    dtype: str
    factor: Tensor | float
    before: bool


def rounded_factor(before: Tensor, after: Tensor) -> RoundedFactor | None:
    """What makes `after` of `before`, both (B, H, L, E); None where it is no factor with a rounding.

    Example:
        >>> x = torch.randn(1, 2, 64, 8)
        >>> found = rounded_factor(x, (x * 0.3).bfloat16().float())
        >>> found.dtype, found.before, abs(found.factor - 0.3) < 1e-4
        ('bfloat16', True, True)
    """
    x, y = before.double(), after.double()
    if x.shape != y.shape or not x.numel() or not bool(torch.isfinite(y).all()):
        return None
    slack = PRODUCT * torch.finfo(after.dtype).eps
    for dtype in LESSER:
        if torch.finfo(dtype).eps <= torch.finfo(after.dtype).eps:
            continue
        name, kept, stored = str(dtype).removeprefix("torch."), x.to(dtype).double(), after.to(dtype)
        if torch.equal(stored.double(), y) and (factor := _common(*_edges(stored), x, slack)) is not None:
            return RoundedFactor(name, factor, before=True)
        if (factor := _common(y, y, kept, slack)) is not None:
            return RoundedFactor(name, factor, before=False)
    return None


def _edges(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Between what all numbers lie that are rounded to these."""
    ways = (torch.full_like(stored, way) for way in (float("-inf"), float("inf")))
    least, most = ((stored.double() + torch.nextafter(stored, way).double()) / 2 for way in ways)
    return least, most


def _common(least: Tensor, most: Tensor, values: Tensor, slack: float) -> Tensor | float | None:
    """The factor that brings all values between two bounds: one of all, or one of each head, row, vector."""
    turned = values < 0
    bounds = torch.where(turned, most, least) / values, torch.where(turned, least, most) / values
    nothing = values == 0
    if bool((((least > 0) | (most < 0)) & nothing).any()):
        return None
    lower, upper = bounds[0].masked_fill(nothing, float("-inf")), bounds[1].masked_fill(nothing, float("inf"))
    for axes in AXES:
        low, high = lower.amax(axes, keepdim=True), upper.amin(axes, keepdim=True)
        middle = torch.where(low.isfinite() & high.isfinite(), (low + high) / 2, 1.0)
        middle = torch.where((low <= 1.0 + slack) & (high >= 1.0 - slack), 1.0, middle)
        if bool((low - high <= slack * middle.abs()).all()) and bool((middle != 0).any()):
            return float(middle) if middle.numel() == 1 else middle
    return None
