"""Reads the numbers of one call: distinct heads of k and v, without the factors that the code put on q and k.

A last step that both multiplied and rounded to a coarser dtype, in either order, is split. If it multiplied first, each
entry limits the factor to the range that rounds to that entry. All entries together leave almost no room, and any
factor in it gives exactly the recorded values. If it rounded first, the values are the rounded ones times one number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sqrtdk.compare.inside.program import QKV
from sqrtdk.compare.rounding.precision import COARSER_DTYPES
from sqrtdk.tracing.tensors import CallTensors, Vector, Waypoint

FACTOR_TOLERANCE = 1e-3  # relative difference of equal factors
# axes that share one factor: all entries, a head, a row, a vector
FACTOR_AXES = ((0, 1, 2, 3), (0, 2, 3), (0, 1, 3), (3,))
# roundings that a product and its factor are off by before they are rounded to the coarser dtype
PRODUCT_ROUNDINGS = 4.0


@dataclass(frozen=True, slots=True, eq=False)
class ObservedVector:
    """One of q, k and v.

    Attributes:
        heads: head that each query head reads, (Hq,).
        used: (B, H, L, E), at the product, without `factor`.
        factor: part of the scale that the values had been multiplied by.
        scaled: any other factor that the values had been multiplied by.
        projected: (B, H, L, E); None if unknown.
        steps: steps between the two.
        rounded_by: if a step rounds, the factor already on the values then; a part of `factor`.
        input: (B, L, D); None if unknown.
        name: name of the projection's weight.
        weight: (H, E, D); None if unknown.
        bias: (H, E).
        features: (H, E).
        borrowed: `projected` is the other side's, from the same input.
        alike: input and `projected` equal the other side's bit for bit, so both projections did the same.
        kv_scale: for k and v, the fixed scale of a quantised cache as the user gave it; None without one.
        viewed: (B, L, D), what enters a projection of which heads are a view; None for any other.
    """

    heads: Tensor
    used: Tensor
    factor: Tensor | float
    scaled: Tensor | float = 1.0
    projected: Tensor | None = None
    steps: tuple[Waypoint, ...] = ()
    rounded_by: Tensor | float = 1.0
    input: Tensor | None = None
    name: str = ""
    weight: Tensor | None = None
    bias: Tensor | None = None
    features: Tensor | None = None
    borrowed: bool = False
    alike: bool = False
    kv_scale: float | None = None
    viewed: Tensor | None = None


def observe(call: CallTensors, kv_scale: float | None = None) -> dict[str, ObservedVector]:
    """Return what was recorded of q, k and v, under the names "query", "key" and "value".

    Args:
        call: tensors of the call.
        kv_scale: fixed scale of the call's quantised cache; None if the user gave none.
    """
    count = call.query.values.shape[1]
    scales = {"query": True, "key": _is_scale(call.key, call.query), "value": False}
    seen = {
        name: _observe_vector(getattr(call, name), count, grouped=name != "query", scale=scales[name]) for name in QKV
    }
    return seen | {name: replace(seen[name], kv_scale=kv_scale) for name in ("key", "value")}


def projected_alike(one: ObservedVector, other: ObservedVector) -> bool:
    """Return whether two projections had equal inputs and outputs, bit for bit, each as recorded by its own side.

    Args:
        one: A's vector.
        other: B's.
    """
    pairs = [(one.input, other.input), (one.projected, other.projected)]
    known = not (one.borrowed or other.borrowed) and one.weight is not None and other.weight is not None
    return known and all(x is not None and y is not None and torch.equal(x.double(), y.double()) for x, y in pairs)


def amplitudes_apart(
    calls: tuple[CallTensors, CallTensors], seen: tuple[dict[str, ObservedVector], dict[str, ObservedVector]]
) -> tuple[dict[str, ObservedVector], dict[str, ObservedVector]]:
    """Return both sides' vectors with a factor on q and k alike apart from the scale, if it is all that differs in it.

    `rope(q) * m` and `rope(k) * m` with m = 0.1 * log(factor) + 1 is the amplitude of a rotation (YaRN): one side does
    not multiply k, and the scale of the logits is the same. A scale split between q and k is on k on both sides.
    """
    # a factor of k that is not that of q is no part of the scale from the start
    factors = [[side[name].factor * side[name].scaled for name in ("query", "key")] for side in seen]
    (of_q, of_k), (other_q, other_k) = factors
    if not (isinstance(of_q, float) and isinstance(of_k, float) and of_q * of_k != 0.0):
        return seen
    if not (isinstance(other_q, float) and isinstance(other_k, float)) or not all(map(_rotates, calls)):
        return seen
    ratios, width = (other_q / of_q, other_k / of_k), calls[0].query.values.shape[-1]
    alike = abs(ratios[0] - ratios[1]) <= FACTOR_TOLERANCE * abs(ratios[0])
    bare = min((0, 1), key=lambda side: abs(abs((of_k, other_k)[side]) - 1))
    if not alike or abs(abs((of_k, other_k)[bare]) - 1) > FACTOR_TOLERANCE or not _one_scale(*calls):
        return seen
    by = 1 / ratios[1] if bare else ratios[1]
    if abs(by - 1) <= FACTOR_TOLERANCE or is_power(by, width):
        return seen
    apart = list(seen)
    apart[1 - bare] = seen[1 - bare] | {name: _with_amplitude(seen[1 - bare][name], by) for name in ("query", "key")}
    return apart[0], apart[1]


def _rotates(call: CallTensors) -> bool:
    return all(any(step.name == "rope" for step in vector.steps) for vector in (call.query, call.key))


def _one_scale(a: CallTensors, b: CallTensors) -> bool:
    """Return whether the code multiplies the logits of both sides by the same numbers."""
    scales = [[term.value for term in call.terms or () if term.name == "scale"] for call in (a, b)]
    if any(isinstance(value, Tensor) or value is None for value in (*scales[0], *scales[1])):
        return False
    one, other = (math.prod(float(value) for value in values if value is not None) for values in scales)
    return abs(one - other) <= FACTOR_TOLERANCE * abs(one)


def _with_amplitude(vector: ObservedVector, by: float) -> ObservedVector:
    """Return a vector with a part of its factor as the amplitude of its values."""
    more = by / vector.scaled
    return replace(vector, used=vector.used * more, factor=vector.factor / more, scaled=vector.scaled * more)


def _is_scale(key: Vector, query: Vector) -> bool:
    """Return whether a factor of k is part of the scale: equal to q's, or a power of the head dimension.

    For example q and k each times d ** -0.25, or k alone times d ** -0.5.
    """
    if isinstance(key.factor, Tensor):
        return isinstance(query.factor, Tensor) and torch.equal(key.factor, query.factor)
    near = isinstance(query.factor, float) and abs(key.factor - query.factor) <= FACTOR_TOLERANCE * abs(query.factor)
    return (near and key.factor != 0) or is_power(abs(key.factor), key.values.shape[-1])


def is_power(factor: Tensor | float, width: int) -> bool:
    """Return whether a factor is a power of the width, in steps of a quarter.

    Example:
        >>> is_power(0.5, 16), is_power(0.3, 16)
        (True, False)
    """
    if isinstance(factor, Tensor) or factor <= 0 or width < 2:
        return False
    power = 4 * math.log(factor) / math.log(width)
    return abs(power - round(power)) <= FACTOR_TOLERANCE


def _observe_vector(vector: Vector, count: int, *, grouped: bool, scale: bool) -> ObservedVector:
    vector, by = _rounding(vector)
    order, heads = _groups(vector, grouped)
    every = torch.arange(vector.values.shape[1], device=order.device)
    first: Tensor | slice = slice(None) if torch.equal(order, every) else order  # usual case, without a copy
    there = vector.values.shape[1]
    of_queries = heads if there == count else heads.repeat_interleave(max(1, count // max(there, 1)))
    factor = _once(vector.factor, first)
    used = vector.values.detach()[:, first].double()
    projection = vector.projection
    return ObservedVector(
        heads=of_queries,
        used=_without_factor(used, factor, vector, first) if scale else used,
        factor=factor if scale else 1.0,
        scaled=1.0 if scale else factor,
        projected=None if vector.projected is None else vector.projected[:, first].double(),
        steps=tuple(Waypoint(s.name, s.detail, None if s.values is None else s.values[:, first]) for s in vector.steps),
        rounded_by=_once(by, first),
        input=None if projection is None else projection.input,
        name="" if projection is None else projection.name,
        weight=None if projection is None or projection.weight is None else projection.weight[first],
        bias=None if projection is None or projection.bias is None else projection.bias[first],
        features=None if projection is None else projection.features[first],
        viewed=vector.viewed,
    )


def _rounding(vector: Vector) -> tuple[Vector, Tensor | float]:
    """Return the vector with a last step split into factor and rounding, and the factor before the rounding."""
    last = vector.steps[-1] if vector.steps else None
    if last is None or last.values is not None or (last.name, last.detail) != ("unknown", ""):
        return vector, vector.factor if last is not None and last.name == "rounded" else 1.0
    before = vector.projected if len(vector.steps) == 1 else vector.steps[-2].values
    found = None if before is None else rounded_factor(before, vector.values)
    if found is None:
        return vector, 1.0
    step = Waypoint("rounded", found.dtype, vector.values)
    vector = replace(vector, factor=found.factor, steps=(*vector.steps[:-1], step))
    return vector, found.factor if found.before else 1.0


def _without_factor(used: Tensor, factor: Tensor | float, vector: Vector, first: Tensor | slice) -> Tensor:
    """Return values without a factor; where it is 0 (log n of a row with one key), those of the last step."""
    if not isinstance(factor, Tensor) or bool((factor != 0).all()):
        return used / factor
    last = next((step.values for step in reversed(vector.steps) if step.values is not None), vector.projected)
    before = used if last is None else last[:, first].double()
    return torch.where(factor == 0, before, used / torch.where(factor == 0, 1.0, factor))


def _groups(vector: Vector, grouped: bool) -> tuple[Tensor, Tensor]:
    """Return the first head of each set of equal heads, and the number of each head's set: a k repeated for groups."""
    # `k.repeat_interleave(groups, 1)` makes equal heads; one of each set is kept
    heads: list[Any] = list(range(vector.values.shape[1]))  # equal for equal heads
    if grouped and vector.projection is not None:
        heads = [tuple(features) for features in vector.projection.features.tolist()]
    elif grouped:
        # Only heads of equal sums are compared: all pairs of a thousand heads take seconds.
        alike: dict[float, list[int]] = {}
        for i, (own, total) in enumerate(zip(vector.values.unbind(1), _sums(vector.values), strict=True)):
            others = alike.setdefault(total, [])
            heads[i] = next((j for j in others if torch.equal(vector.values[:, j], own)), i)
            others += [i] if heads[i] == i else []
    sets, device = sorted(set(heads)), vector.values.device
    order = torch.tensor([heads.index(one) for one in sets], device=device)
    return order, torch.tensor([sets.index(one) for one in heads], device=device)


def _sums(values: Tensor) -> list[float]:
    """Return the sum of each head of (B, H, L, E)."""
    totals: list[float] = values.double().sum((0, 2, 3)).tolist()
    return totals


def _once(factor: Tensor | float, first: Tensor | slice) -> Tensor | float:
    if not isinstance(factor, Tensor):
        return factor
    factor = factor if factor.dim() == 4 else factor[None]
    return factor[:, first] if factor.shape[1] > 1 else factor


# -- a factor and a rounding -------------------------------------------------------------------------------------------


class RoundedFactor(NamedTuple):
    """A factor and a rounding that happened to values.

    Attributes:
        dtype: dtype to which they were rounded.
        factor: a number, or (B or 1, H or 1, L or 1, 1).
        before: whether the factor came before the rounding.
    """

    dtype: str
    factor: Tensor | float
    before: bool


def rounded_factor(before: Tensor, after: Tensor) -> RoundedFactor | None:
    """Return the factor and rounding that lead from `before` to `after`, both (B, H, L, E); None if there are none.

    Example:
        >>> x = torch.randn(1, 2, 64, 8)
        >>> found = rounded_factor(x, (x * 0.3).bfloat16().float())
        >>> found.dtype, found.before, abs(found.factor - 0.3) < 1e-4
        ('bfloat16', True, True)
    """
    x, y = before.double(), after.double()
    if x.shape != y.shape or not x.numel() or not bool(torch.isfinite(y).all()):
        return None
    slack = PRODUCT_ROUNDINGS * torch.finfo(after.dtype).eps
    for dtype in COARSER_DTYPES:
        if torch.finfo(dtype).eps <= torch.finfo(after.dtype).eps:
            continue
        name, kept, stored = str(dtype).removeprefix("torch."), x.to(dtype).double(), after.to(dtype)
        if torch.equal(stored.double(), y) and (factor := _common(*_edges(stored), x, slack)) is not None:
            return RoundedFactor(name, factor, before=True)
        if (factor := _common(y, y, kept, slack)) is not None:
            return RoundedFactor(name, factor, before=False)
    return None


def _edges(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the range of numbers that round to these."""
    paths = (torch.full_like(stored, path) for path in (float("-inf"), float("inf")))
    least, most = ((stored.double() + torch.nextafter(stored, path).double()) / 2 for path in paths)
    return least, most


def _common(least: Tensor, most: Tensor, values: Tensor, slack: float) -> Tensor | float | None:
    """Return the factor that brings all values between two bounds: a common one, or one by head, row or vector."""
    # a negative value swaps the bounds of its factor
    turned = values < 0
    bounds = torch.where(turned, most, least) / values, torch.where(turned, least, most) / values
    nothing = values == 0
    if bool((((least > 0) | (most < 0)) & nothing).any()):
        return None
    lower, upper = bounds[0].masked_fill(nothing, float("-inf")), bounds[1].masked_fill(nothing, float("inf"))
    for axes in FACTOR_AXES:
        low, high = lower.amax(axes, keepdim=True), upper.amin(axes, keepdim=True)
        middle = torch.where(low.isfinite() & high.isfinite(), (low + high) / 2, 1.0)
        # 1 if it is possible at all: then the step only rounded
        middle = torch.where((low <= 1.0 + slack) & (high >= 1.0 - slack), 1.0, middle)
        if bool((low - high <= slack * middle.abs()).all()) and bool((middle != 0).any()):
            return float(middle) if middle.numel() == 1 else middle
    return None
