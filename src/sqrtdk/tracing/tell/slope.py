"""The numeric reading: regress the logits that ran on the product of the projections, on a sample of entries.

Independent of the factors that the lineage found: it uses the projections' values, their layout, and the logits.
A rotation of q and k cancels where both are turned alike, so with rotary embeddings only the diagonal is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.read.orient import coordinates
from sqrtdk.tracing.read.reading import Edges, Logits, Reading, Vectors
from sqrtdk.tracing.steps import ZERO_ONE_FACTOR, Beside, Mix, Unknown
from sqrtdk.tracing.steps.placed import Sample
from sqrtdk.tracing.tell.sight import Sight
from sqrtdk.tracing.tell.statistics import NO_DATA
from sqrtdk.tracing.watch.graph import replay_all

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
    batch: int, heads: int, rows: int, columns: int, *, diagonal: bool, device: torch.device, offset: int = 0
) -> tuple[Tensor, ...]:
    """Indices (b, h, i, j), each (B', H, M): a grid of rows and columns, or the diagonal i = j + offset."""
    b = torch.arange(min(batch, _BATCH), device=device)
    h = torch.arange(heads, device=device)
    if diagonal:
        first, last = max(0, -offset), min(columns, rows - offset)
        j = first + _spread(max(last - first, 0), _DIAGONAL, device)
        i = j + offset
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


def regress(x: Tensor, y: Tensor, counted: Tensor, *, eps: float, rows: int | None = None) -> Slope | None:
    """Slope and R^2 of y on x; None where they vary too little to stand out from rounding.

    Args:
        x: product of the projections, (B', H, M).
        y: logits, (B', H, M).
        counted: entries that count, (B', H, M).
        eps: relative rounding error of both.
        rows: with M = rows * columns, an intercept for every row (the softmax does not see what a row has in
            common); without, one for every head.
    """
    counted = counted & torch.isfinite(y) & torch.isfinite(x)
    groups = rows or 1
    shape = (*x.shape[:2], groups, x.shape[2] // groups)
    weight = counted.to(torch.float64).reshape(shape)
    dx, dy = (_centred(v.to(torch.float64).masked_fill(~counted, 0.0).reshape(shape), weight) for v in (x, y))
    sxx, sxy, syy = ((a * b).sum((0, 2, 3)) for a, b in ((dx, dx), (dx, dy), (dy, dy)))
    if int(weight.sum((0, 2, 3)).min()) < 3 or _is_noise(x, counted, sxx, eps) or _is_noise(y, counted, syy.sum(), eps):
        return None
    slopes = sxy / sxx
    residual = float((dy - slopes[None, :, None, None] * dx).square().sum())
    return Slope(float(sxy.sum() / sxx.sum()), tuple(float(s) for s in slopes), 1.0 - residual / float(syy.sum()))


def _centred(values: Tensor, weight: Tensor) -> Tensor:
    mean = values.sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp_min(1.0)
    return (values - mean) * weight


def _is_noise(values: Tensor, counted: Tensor, squares: Tensor, eps: float) -> bool:
    """Whether rounding alone, eps * max |values| an entry, could move a slope by more than `_SLOPE_ERROR`."""
    largest = float(values.abs().masked_fill(~counted, 0.0).max())
    return not bool((squares.sqrt() * _SLOPE_ERROR > eps * largest).all())


# -- an attention's ----------------------------------------------------------------------------------------------------


def unread(reading: Reading) -> str | None:
    """Why the slope of an attention can't be read from its numbers; None where nothing speaks against it yet."""
    if reason := reading.fault or reading.no_slope:
        return reason
    if reading.without_data:
        return NO_DATA
    beside = next((step.text for step in reading.steps if isinstance(step, Beside)), None)
    if beside is not None:
        return beside
    eps = torch.finfo(reading.logits_dtype).eps
    mixed = (step.fixed(reading.layout.heads, eps) for step in reading.steps if isinstance(step, Mix))
    if fixed := next((reason for reason in mixed if reason is not None), None):
        return fixed
    if reading.carried.changes:
        return "the weights were changed after the softmax"
    unknown = [step.name for step in reading.steps if isinstance(step, Unknown)]
    if isinstance(reading.operands, Logits) and (ZERO_ONE_FACTOR in unknown or (unknown and reading.query.moves)):
        return "the logits that could be compared do not show what that does to the others"
    return None


def read_slope(reading: Reading, sight: Sight) -> Slope | str:
    """The slope of the logits on the projections' product, or why there is none."""
    query, key, layout = reading.query, reading.key, reading.layout
    operands = reading.operands
    assert operands is not None
    if query.basis is None or key.basis is None:
        return "the projection's values could not be brought into the product's layout"
    told = layout.rows == layout.columns or reading.offset is not None
    if query.moves != key.moves or (query.moves and (reading.reordered or not told)):
        return "q and k are rotated by different positions"
    if query.moves and isinstance(operands, Edges):  # an edge leads from one position to another
        return "q and k are rotated by different positions"
    if isinstance(operands, Vectors):
        return _by_vectors(reading, operands, query.basis, key.basis) or NO_VARIATION
    if isinstance(operands, Edges):
        return _by_edges(reading, operands, query.basis, key.basis) or NO_VARIATION
    if not operands.axes.followed:
        return "the views between the product and the softmax could not be followed"
    return _by_logits(reading, operands, sight, query.basis, key.basis) or NO_VARIATION


def _by_vectors(reading: Reading, operands: Vectors, query: Tensor, key: Tensor) -> Slope | None:
    layout, diagonal = reading.layout, reading.query.moves
    sizes = (layout.batch, layout.heads, layout.rows, layout.columns)
    if 0 in sizes:
        return None
    scale, q = operands.scale, operands.query
    scaled, by = (q * scale, 1.0) if isinstance(scale, Tensor) else (q, scale)
    x = products(query, key, *sizes, diagonal=diagonal)
    y = by * products(scaled, operands.key, *sizes, diagonal=diagonal)
    every = torch.ones_like(x, dtype=torch.bool)
    in_rows = row_count(layout.rows, diagonal=diagonal)
    return regress(x, y, every, eps=torch.finfo(reading.dtype).eps, rows=in_rows)


def _by_edges(reading: Reading, operands: Edges, query: Tensor, key: Tensor) -> Slope | None:
    width = query.shape[-1]
    left, right = (x.reshape(-1, width).to(torch.float64) for x in (query, key))
    product = replay_all(operands.views, (left * right).sum(-1).reshape(operands.product.shape))
    logits = operands.arrange(operands.values).to(torch.float64)
    rest = Sample(logits, lambda placed: operands.arrange(placed.at_softmax()).to(torch.float64))
    for step in reversed(reading.steps):
        rest = step.undo(rest)
    every = torch.ones_like(logits, dtype=torch.bool)
    return regress(operands.arrange(product), rest.logits, every, eps=torch.finfo(reading.logits_dtype).eps)


def _by_logits(reading: Reading, operands: Logits, sight: Sight, query: Tensor, key: Tensor) -> Slope | str | None:
    layout, diagonal, device = reading.layout, reading.query.moves, reading.device
    places = coordinates(operands.product, operands.views, device)
    if places[0].numel() < layout.batch * layout.heads * layout.rows * layout.columns:
        return "the product does not hold all of the logits"
    sizes = (layout.batch, layout.heads, layout.rows, layout.columns)
    at = sample(*sizes, diagonal=diagonal, device=device, offset=reading.offset or 0)
    left, right = (key, query) if operands.axes.swapped else (query, key)
    left, right = (x.reshape(-1, *x.shape[-2:]) if x.dim() != 3 else x for x in (left, right))
    entry, row, column = (operands.arrange(axis)[at] for axis in places)
    rows = left[entry, row].to(torch.float64)
    columns = right.transpose(-1, -2)[entry, column].to(torch.float64)
    logits = operands.arrange(operands.values)[at].to(torch.float64)
    rest = Sample(logits, lambda placed: operands.at_logits(placed)[at].to(torch.float64))
    for step in reversed(sight.steps):
        rest = step.undo(rest)
    counted = torch.ones_like(logits, dtype=torch.bool)
    if sight.visible is not None:
        counted = sight.visible.expand(layout.batch, layout.heads, layout.rows, layout.columns)[at]
    if any(isinstance(step, Mix) for step in sight.steps):
        counted = counted.all(1, keepdim=True).expand_as(counted)  # what one head hides, all that it was mixed into do
    in_rows = row_count(layout.rows, diagonal=diagonal)
    eps = torch.finfo(reading.logits_dtype).eps
    return regress((rows * columns).sum(-1), rest.logits, counted, eps=eps, rows=in_rows)
