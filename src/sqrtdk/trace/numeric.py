"""The numeric reading: regress the logits that ran on the product of the projections, on a sample of entries.

Independent of the factors that the lineage found: it uses the projections' values, their layout, and the logits.
A rotation of q and k cancels where both are turned alike, so with rotary embeddings only the diagonal is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS = 16
_COLUMNS = 32
_BATCH = 2
_DIAGONAL = 128


@dataclass(frozen=True, slots=True)
class Slope:
    """Result of the regression; `per_head` has one slope a head."""

    value: float
    per_head: tuple[float, ...]
    r_squared: float


def sample(batch: int, heads: int, rows: int, columns: int, *, diagonal: bool, device: torch.device) -> tuple[Tensor, ...]:
    """Indices (b, h, i, j), each (B', H, M): a grid of rows and columns, or the diagonal."""
    b = torch.arange(min(batch, _BATCH), device=device)
    h = torch.arange(heads, device=device)
    if diagonal:
        i = j = _spread(min(rows, columns), _DIAGONAL, device)
    else:
        grid = torch.meshgrid(_spread(rows, _ROWS, device), _spread(columns, _COLUMNS, device), indexing="ij")
        i, j = (axis.reshape(-1) for axis in grid)
    shape = (len(b), len(h), len(i))
    return (
        b[:, None, None].expand(shape),
        h[None, :, None].expand(shape),
        i[None, None, :].expand(shape),
        j[None, None, :].expand(shape),
    )


def _spread(n: int, limit: int, device: torch.device) -> Tensor:
    if n <= limit:
        return torch.arange(n, device=device)
    return torch.linspace(0, n - 1, limit, device=device).round().long()


def regress(x: Tensor, y: Tensor, seen: Tensor) -> Slope | None:
    """Slope and R^2 of y on x with an intercept a head; x, y, seen are (B', H, M). None without variation."""
    seen = seen & torch.isfinite(y) & torch.isfinite(x)
    weight = seen.to(torch.float64)
    x = x.to(torch.float64).masked_fill(~seen, 0.0).transpose(0, 1).flatten(1)
    y = y.to(torch.float64).masked_fill(~seen, 0.0).transpose(0, 1).flatten(1)
    weight = weight.transpose(0, 1).flatten(1)
    count = weight.sum(1, keepdim=True).clamp_min(1.0)
    dx = (x - x.sum(1, keepdim=True) / count) * weight
    dy = (y - y.sum(1, keepdim=True) / count) * weight
    sxx, sxy, syy = (dx * dx).sum(1), (dx * dy).sum(1), (dy * dy).sum(1)
    if not bool((sxx > 0).all()) or int(count.min()) < 3:
        return None
    slopes = sxy / sxx
    total = float(syy.sum())
    residual = float((dy - slopes[:, None] * dx).square().sum())
    pooled = float(sxy.sum() / sxx.sum())
    if total <= 0:
        return None
    return Slope(pooled, tuple(float(s) for s in slopes), 1.0 - residual / total)
