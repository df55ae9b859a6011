"""Reads the effective scale in two ways: as the product of the factors, and as the slope of the logits.

The slope is a regression of the logits on the product of the projections, over a sample of entries. It does not use the
factors, only the values and layout of the projections and the logits. A rotation cancels where q and k are turned by
the same position, so with rotary embeddings only the diagonal is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.messages import Message, joined
from sqrtdk.tracing.calls.formula import unknown_of
from sqrtdk.tracing.calls.visible_keys import NO_DATA, VisibleKeys, combined_masks
from sqrtdk.tracing.readback.orient import coordinates
from sqrtdk.tracing.readback.reading import Edges, Layout, Logits, Reading, Vectors
from sqrtdk.tracing.records import WITHOUT_PRODUCT, EffectiveScale, Factor
from sqrtdk.tracing.steps import Beside, Mix, Softcap, Step, Unknown
from sqrtdk.tracing.steps import Scale as Scaling
from sqrtdk.tracing.steps.placed import Sample
from sqrtdk.tracing.tape.graph import replay_all

AGREEMENT = 0.01  # relative difference up to which the two readings agree
LEAST_R2 = 0.99  # least R^2 with which a slope alone counts as the scale
_SLOPE_ERROR = 0.003  # largest relative error of a slope by rounding, well below `AGREEMENT`
_ROWS, _COLUMNS, _BATCH, _DIAGONAL = 8, 24, 2, 128  # size of the sample of logits
_NO_VARIATION = "trace.scale.no_variation"
_OTHER_POSITIONS = "trace.scale.positions"


@dataclass(frozen=True, slots=True)
class Slope:
    """The result of the regression of the logits on the product of the projections.

    Attributes:
        value: the slope over all heads.
        per_head: the slope of each head.
        r_squared: the share of the logits' variance that the regression explains, at most 1.
    """

    value: float
    per_head: tuple[float, ...]
    r_squared: float


def tell_scale(
    reading: Reading, steps: Iterable[Step], width: int, *, measure: bool, visible_keys: VisibleKeys | None = None
) -> EffectiveScale:
    """Return the scale from both readings.

    If the value of a factor is unknown, the slope gives the scale. If an operation could not be followed, it does not,
    because the effect on logits outside the sample is unknown.

    Args:
        reading: The attention.
        steps: Steps from the product to the softmax.
        width: E of the query, without padding.
        measure: Read the slope.
        visible_keys: Masks of the attention, if known already.
    """
    on_logits = (replace(step.factor, at=step.factor.at or step.at) for step in steps if isinstance(step, Scaling))
    factors = (*reading.query.factors, *reading.key.factors, *on_logits)
    unknown = unknown_of(reading)
    reason = _unreadable(reading, factors, unknown)
    symbolic = None if reason is not None else math.prod(f.value for f in factors if f.value is not None)
    # -c * |q - k|^2: `symbolic` is c. (a * q - k) has no single coefficient, so factors on q or k leave it unknown.
    if reading.distance is not None:
        symbolic = None if reading.query.factors or reading.key.factors else symbolic
        reason = reason or Message("trace.scale.distance")
        return EffectiveScale(None, None, symbolic, None, None, factors, reason=reason)
    slope: Slope | str | None = _why_no_slope(reading)
    if slope is None and measure:
        slope = _read_slope(reading, visible_keys or combined_masks(reading, counts=False))
    per_head = agree = None
    if symbolic is not None:
        per_head = each_head(factors, reading.layout.heads) if any(f.per_head for f in factors) else None
        if isinstance(slope, Slope):
            agree = _agree(slope, symbolic, per_head)
    if isinstance(slope, Slope) and _by_own_rows(reading) and not (agree and slope.r_squared >= LEAST_R2):
        # cat([past, k], 2) with a past as long as the rows: its first rows are not those of the query
        slope, agree = Message(_OTHER_POSITIONS), None
    no_slope = slope if isinstance(slope, str) else None
    slope = slope if isinstance(slope, Slope) else None
    if symbolic is not None and slope is not None and not agree:
        reason = Message("trace.scale.disagree", factors=f"{symbolic:.4g}", logits=f"{slope.value:.4g}")
    effective = symbolic
    if symbolic is None and slope is not None and not unknown:
        if slope.r_squared >= LEAST_R2:
            effective = slope.value
        else:
            reason = Message("trace.scale.not_linear", text=reason or "", value=f"{slope.r_squared:.3f}")
    if effective is None and no_slope is not None and reading.score is None:
        reason = joined([reason, no_slope]) if reason else no_slope
    return EffectiveScale(
        effective=effective,
        ratio=effective * math.sqrt(width) if effective is not None else None,
        symbolic=symbolic,
        numeric=slope.value if slope is not None else None,
        r_squared=slope.r_squared if slope is not None else None,
        factors=factors,
        per_head=per_head,
        agree=agree,
        reason=reason or no_slope,
    )


def _agree(slope: Slope, symbolic: float, per_head: tuple[float, ...] | None) -> bool:
    """Whether the slope is the product of the factors, in every head if they differ from head to head."""
    read, wanted = (slope.per_head, per_head) if per_head is not None else ((slope.value,), (symbolic,))
    return all(abs(a - b) <= AGREEMENT * abs(b) for a, b in zip(read, wanted, strict=True))


def each_head(factors: Sequence[Factor], heads: int) -> tuple[float, ...] | None:
    """Return the product of the factors for each head, H numbers.

    A factor with fewer numbers than heads is repeated over the heads. None if the value of a factor is unknown.
    """
    values = [factor.per_head or (factor.value,) for factor in factors]
    known = [[value for value in each if value is not None] for each in values]
    if any(len(each) < len(whole) for each, whole in zip(known, values, strict=True)):
        return None
    return tuple(math.prod(each[head % len(each)] for each in known) for head in range(heads))


def _unreadable(reading: Reading, factors: Sequence[Factor], unknown: Sequence[str]) -> str | None:
    """Return the reason why the factors do not determine the scale, or None."""
    if reading.score in WITHOUT_PRODUCT:
        return Message("trace.scale.additive" if reading.score == "additive" else "trace.scale.distance")
    if unknown:
        return Message("trace.scale.not_followed", what=joined(unknown, "comma"))
    missing = next((f for f in factors if f.value is None), None)
    return None if missing is None else Message("trace.scale.factor", source=missing.source)


# -- the slope ---------------------------------------------------------------------------------------------------------


def _why_no_slope(reading: Reading) -> str | None:
    """Return a reason, known before measuring, why the slope can't be read; None if there is none."""
    if reason := reading.fault or reading.no_slope or (Message(NO_DATA) if reading.without_data else None):
        return reason
    eps = torch.finfo(reading.logits_dtype).eps
    for step in reading.steps:
        if isinstance(step, Beside):
            return step.text
        if isinstance(step, Softcap) and step.by_logits:
            return Message("trace.scale.no_inverse", step=step.detail)
        if isinstance(step, Mix) and (reason := step.fixed(reading.layout.heads, eps)) is not None:
            return reason
    if reading.weight_steps.changes:
        return Message("trace.scale.weights")
    unknown = [step.code for step in reading.steps if isinstance(step, Unknown)]
    if isinstance(reading.operands, Logits) and ("zero_one_factor" in unknown or (unknown and reading.query.moves)):
        return Message("trace.scale.others")
    return None


def _read_slope(reading: Reading, visible_keys: VisibleKeys) -> Slope | str:
    """Return the slope of the logits against the product of the projections, or the reason why there is none."""
    query, key, layout, operands = reading.query, reading.key, reading.layout, reading.operands
    if query.basis is None or key.basis is None or query.basis.is_complex():
        return Message("trace.scale.layout")
    aligned = _aligned(reading) or layout.rows == key.own_rows
    if query.moves != key.moves or (query.moves and (reading.reordered or not aligned)):
        return Message(_OTHER_POSITIONS)
    if isinstance(operands, Vectors):
        return _by_vectors(reading, operands, query.basis, key.basis) or Message(_NO_VARIATION)
    if isinstance(operands, Edges):  # the ends of an edge have different positions, so a rotation does not cancel
        return Message(_OTHER_POSITIONS) if query.moves else _by_edges(reading, operands, query.basis, key.basis)
    assert operands is not None
    if not operands.axes.followed:
        return Message("trace.scale.views")
    return _by_logits(reading, operands, visible_keys, query.basis, key.basis)


def _aligned(reading: Reading) -> bool:
    """Whether it is known which key has the position of a row."""
    return reading.layout.rows == reading.layout.columns or reading.offset is not None


def _by_own_rows(reading: Reading) -> bool:
    """Whether the only hint that row i is at the position of key i is the number of rows of the first piece.

    Keys behind those of the rows, as DeepSeek-V4's compressed ones, leave it there; the keys of a past, a prefix or a
    look-back that has as many rows do not. The slope then counts only if it confirms the factors.
    """
    return reading.query.moves and not _aligned(reading)


def _by_vectors(reading: Reading, operands: Vectors, query: Tensor, key: Tensor) -> Slope | None:
    layout, diagonal, scale = reading.layout, reading.query.moves, operands.scale
    if 0 in (layout.batch, layout.heads, layout.rows, layout.columns):
        return None
    x = _products(query, key, layout, diagonal=diagonal)
    scaled, by = (operands.query * scale, 1.0) if isinstance(scale, Tensor) else (operands.query, scale)
    y = by * _products(scaled, operands.key, layout, diagonal=diagonal)
    rows = 1 if diagonal else min(layout.rows, _ROWS)
    return _regress(x, y, torch.ones_like(x, dtype=torch.bool), eps=torch.finfo(reading.dtype).eps, rows=rows)


def _products(query: Tensor, key: Tensor, layout: Layout, *, diagonal: bool) -> Tensor:
    """Return q . k of the sample in float64, (B', H, M), for q (..., H, L, E) and k (..., Hkv, S, E)."""
    q = query.reshape(layout.batch, layout.heads, layout.rows, query.shape[-1])[:_BATCH]
    k = key.reshape(layout.batch, -1, layout.columns, key.shape[-1])[:_BATCH]
    if diagonal:
        i = j = _spread(min(layout.rows, layout.columns), _DIAGONAL, query.device)
    else:
        i, j = _spread(layout.rows, _ROWS, query.device), _spread(layout.columns, _COLUMNS, query.device)
    q, k = q[:, :, i].to(torch.float64), k[:, :, j].to(torch.float64)
    k = k.repeat_interleave(layout.heads // k.shape[1], dim=1)
    return (q * k).sum(-1) if diagonal else (q @ k.mT).flatten(2)


def _by_edges(reading: Reading, operands: Edges, query: Tensor, key: Tensor) -> Slope | str:
    left, right = (x.reshape(-1, query.shape[-1]).to(torch.float64) for x in (query, key))
    product = replay_all(operands.views, (left * right).sum(-1).reshape(operands.product.shape))
    logits = operands.arrange(operands.values).to(torch.float64)
    rest = Sample(logits, lambda placed: operands.arrange(placed.at_softmax()).to(torch.float64))
    for step in reversed(reading.steps):
        rest = step.undo(rest)
    every = torch.ones_like(logits, dtype=torch.bool)
    eps = torch.finfo(reading.logits_dtype).eps
    return _regress(operands.arrange(product), rest.logits, every, eps=eps) or Message(_NO_VARIATION)


def _by_logits(
    reading: Reading, operands: Logits, visible_keys: VisibleKeys, query: Tensor, key: Tensor
) -> Slope | str:
    layout, diagonal = reading.layout, reading.query.moves
    places = coordinates(operands.product, operands.views, reading.device)
    sizes = (layout.batch, layout.heads, layout.rows, layout.columns)
    if places[0].numel() < math.prod(sizes):
        return Message("trace.kept.part_of_logits")
    at = _sample(layout, reading.offset or 0, reading.device, diagonal=diagonal)
    left, right = (key, query) if operands.axes.swapped else (query, key)
    left, right = (x.reshape(-1, *x.shape[-2:]) if x.dim() != 3 else x for x in (left, right))
    entry, row, column = (operands.arrange(axis)[at] for axis in places)
    product = (left[entry, row].to(torch.float64) * right.mT[entry, column].to(torch.float64)).sum(-1)
    logits = operands.arrange(operands.values)[at].to(torch.float64)
    rest = Sample(logits, lambda placed: operands.at_logits(placed)[at].to(torch.float64))
    for step in reversed(visible_keys.steps):
        rest = step.undo(rest)
    counted = torch.ones_like(logits, dtype=torch.bool)
    if visible_keys.visible is not None:
        counted = visible_keys.visible.expand(sizes)[at]
    if any(isinstance(step, Mix) for step in visible_keys.steps):
        # A key that one head hides is hidden in all heads after mixing.
        counted = counted.all(1, keepdim=True).expand_as(counted)
    rows = 1 if diagonal else min(layout.rows, _ROWS)
    eps = torch.finfo(reading.logits_dtype).eps
    return _regress(product, rest.logits, counted, eps=eps, rows=rows) or Message(_NO_VARIATION)


def _sample(layout: Layout, offset: int, device: torch.device, *, diagonal: bool) -> tuple[Tensor, ...]:
    """Return indices (b, h, i, j), each (B', H, M): a grid of rows and columns, or the diagonal i = j + offset."""
    b, h = (torch.arange(n, device=device) for n in (min(layout.batch, _BATCH), layout.heads))
    if diagonal:
        first, last = max(0, -offset), min(layout.columns, layout.rows - offset)
        j = first + _spread(max(last - first, 0), _DIAGONAL, device)
        i = j + offset
    else:
        lines = _spread(layout.rows, _ROWS, device), _spread(layout.columns, _COLUMNS, device)
        i, j = (axis.reshape(-1) for axis in torch.meshgrid(*lines, indexing="ij"))
    shape = (len(b), len(h), len(i))
    return b[:, None, None].expand(shape), h[:, None].expand(shape), i.expand(shape), j.expand(shape)


def _spread(n: int, limit: int, device: torch.device) -> Tensor:
    if n <= limit:
        return torch.arange(n, device=device)
    return torch.linspace(0, n - 1, limit, device=device).round().long()


def _regress(x: Tensor, y: Tensor, counted: Tensor, *, eps: float, rows: int = 1) -> Slope | None:
    """Return the slope and R^2 of y on x, or None if either varies too little to stand out from rounding.

    Args:
        x: Products of the projections, (B', H, M).
        y: Logits, (B', H, M).
        counted: True for entries to use, (B', H, M).
        eps: Relative rounding error of x and y.
        rows: Number of rows, with M = rows * columns. Each row has its own intercept, because a constant of a row
            cancels in the softmax. With 1 there is one intercept per head.
    """
    counted = counted & torch.isfinite(y) & torch.isfinite(x)
    shape = (*x.shape[:2], rows, x.shape[2] // (rows or 1))
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
    """Return whether rounding, eps * max |values| per entry, could change a slope by more than `_SLOPE_ERROR`."""
    largest = float(values.abs().masked_fill(~counted, 0.0).max())
    return not bool((squares.sqrt() * _SLOPE_ERROR > eps * largest).all())
