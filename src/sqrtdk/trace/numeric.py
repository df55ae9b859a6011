"""The numeric reading: regress the logits that ran on the product of the projections, on a sample of entries.

Independent of the factors that the lineage found: it uses the projections' values, their layout, and the logits.
A rotation of q and k cancels where both are turned alike, so with rotary embeddings only the diagonal is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS = 8
_COLUMNS = 24
_BATCH = 2
_DIAGONAL = 128
NO_VARIATION = "the product of the projections does not vary"
_SLOPE_ERROR = 0.003  # well inside the 1% to which the two readings must agree


@dataclass(frozen=True, slots=True)
class Slope:
    """Result of the regression; `per_head` has one slope a head."""

    value: float
    per_head: tuple[float, ...]
    r_squared: float


def sample(
    batch: int, heads: int, rows: int, columns: int, *, diagonal: bool, device: torch.device
) -> tuple[Tensor, ...]:
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


def products(query: Tensor, key: Tensor, batch: int, heads: int, rows: int, columns: int, *, diagonal: bool) -> Tensor:
    """Q . k in float64 on the sample, (B', H, M), for q (..., H, L, E) and k (..., Hkv, S, E)."""
    q = query.reshape(batch, heads, rows, query.shape[-1])[:_BATCH]
    k = key.reshape(batch, -1, columns, key.shape[-1])[:_BATCH]
    if diagonal:
        i = j = _spread(min(rows, columns), _DIAGONAL, query.device)
    else:
        i, j = _spread(rows, _ROWS, query.device), _spread(columns, _COLUMNS, query.device)
    q, k = q[:, :, i].to(torch.float64), k[:, :, j].to(torch.float64)
    k = k.repeat_interleave(heads // k.shape[1], dim=1)
    return (q * k).sum(-1) if diagonal else (q @ k.transpose(-1, -2)).flatten(2)


def row_count(rows: int, *, diagonal: bool) -> int | None:
    """Rows in a sample; None for a diagonal, which has one entry a row."""
    return None if diagonal else min(rows, _ROWS)


def _spread(n: int, limit: int, device: torch.device) -> Tensor:
    if n <= limit:
        return torch.arange(n, device=device)
    return torch.linspace(0, n - 1, limit, device=device).round().long()


def regress(x: Tensor, y: Tensor, seen: Tensor, *, eps: float, rows: int | None = None) -> Slope | None:
    """Slope and R^2 of y on x; None where they vary too little to stand out from rounding.

    Args:
        x: product of the projections, (B', H, M).
        y: logits, (B', H, M).
        seen: entries that count, (B', H, M).
        eps: relative rounding error of both.
        rows: with M = rows * columns, an intercept for every row (the softmax does not see what a row has in
            common); without, one for every head.
    """
    seen = seen & torch.isfinite(y) & torch.isfinite(x)
    groups = rows or 1
    shape = (*x.shape[:2], groups, x.shape[2] // groups)
    weight = seen.to(torch.float64).reshape(shape)
    dx, dy = (_centred(v.to(torch.float64).masked_fill(~seen, 0.0).reshape(shape), weight) for v in (x, y))
    sxx, sxy, syy = ((a * b).sum((0, 2, 3)) for a, b in ((dx, dx), (dx, dy), (dy, dy)))
    if int(weight.sum((0, 2, 3)).min()) < 3 or _is_noise(x, seen, sxx, eps) or _is_noise(y, seen, syy.sum(), eps):
        return None
    slopes = sxy / sxx
    residual = float((dy - slopes[None, :, None, None] * dx).square().sum())
    return Slope(float(sxy.sum() / sxx.sum()), tuple(float(s) for s in slopes), 1.0 - residual / float(syy.sum()))


def _centred(values: Tensor, weight: Tensor) -> Tensor:
    mean = values.sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp_min(1.0)
    return (values - mean) * weight


def _is_noise(values: Tensor, seen: Tensor, squares: Tensor, eps: float) -> bool:
    """Whether rounding alone, eps * max |values| an entry, could move a slope by more than `_SLOPE_ERROR`."""
    largest = float(values.abs().masked_fill(~seen, 0.0).max())
    return not bool((squares.sqrt() * _SLOPE_ERROR > eps * largest).all())
