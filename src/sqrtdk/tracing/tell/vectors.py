"""Q, k or v of an attention at every step of its way, in the attention's layout, and the projection it came from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.tracing.tell.lineage import Lineage, lineage
from sqrtdk.tracing.tensors import Projection, Vector, Waypoint
from sqrtdk.tracing.watch.graph import Node

_SLACK = 8.0  # roundings of the dtype that a factor may have cost a number on its way


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a vector was used: its node, its values there, and how they are brought to (B, H, L, E)."""

    node: Node
    values: Tensor
    arrange: Callable[[Tensor], Tensor]


def vector(place: Place) -> Vector:
    """A vector with all that is known of its way."""
    way = lineage(place.node)
    used = own(place.arrange(place.values.detach()), place.values)
    starts: dict[Node, Tensor] = {root: root.value for root in way.roots if root.value is not None}
    if len(starts) < len(way.roots):
        return Vector(used)
    if way.shifted:
        shift = way.shifted[-1]
        if len(way.roots) > 1 or shift.value is None:
            return Vector(used)
        starts = {shift: shift.value}
    projected = _arranged(place, way.carried(starts), used)
    if projected is None:
        return Vector(used)
    steps: list[Waypoint] = []
    last, factor = projected, torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for span in reversed(way.spans):
        if span.end.value is None or span.source.value is None:
            return Vector(used, projected=projected, steps=(*steps, Waypoint("unknown", span.detail, None)))
        before = _arranged(place, way.carried({**starts, span.source: span.source.value}), used)
        after = _arranged(place, way.carried({**starts, span.end: span.end.value}), used)
        by = None if before is None else _factor(last, before)
        if after is None or by is None:
            return Vector(used, projected=projected, steps=(*steps, Waypoint("unknown", span.detail, None)))
        factor = torch.ones_like(factor) if span.name == "norm" else factor * by
        last = after
        steps.append(Waypoint(span.name, span.detail, _divided(after, factor), span.gain))
    by = _factor(last, used)
    if by is None and (dtype := _rounded(last, used)) is not None:
        steps.append(Waypoint("rounded", dtype, used))
        by = torch.ones_like(factor)
    if by is None:
        return Vector(used, projected=projected, steps=(*steps, Waypoint("unknown", "", None)))
    if not steps and projected.dtype == used.dtype and torch.equal(projected, used):
        projected = used  # kept once
    projection = None if way.shifted else _projection(place, way, used)
    if way.shifted:
        projection = _shifted(place, way, used, projected)
    return Vector(used, _number(factor * by), projected, tuple(steps), projection)


def sharing(vectors: list[Vector]) -> list[Vector]:
    """The same vectors: what several of them were projected from is kept once."""
    inputs: list[Tensor] = []
    shared = []
    for one in vectors:
        projection = one.projection
        if projection is not None:
            entering = next(
                (x for x in inputs if x.dtype == projection.input.dtype and torch.equal(x, projection.input)),
                projection.input,
            )
            inputs.append(entering)
            one = replace(one, projection=replace(projection, input=entering))
        shared.append(one)
    return shared


def own(arranged: Tensor, tensor: Tensor) -> Tensor:
    """Values that no later write of the model reaches: a copy, where they are a view of its tensor."""
    if arranged.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        return arranged.clone(memory_format=torch.contiguous_format)
    return arranged


def _arranged(place: Place, value: Tensor | None, used: Tensor) -> Tensor | None:
    """Carried values, as q, k or v are; None where they could not be carried."""
    if value is None or tuple(value.shape) != tuple(place.values.shape):
        return None
    arranged = own(place.arrange(value.detach()), value)
    return arranged if arranged.shape == used.shape else None


def _factor(before: Tensor, after: Tensor) -> Tensor | None:
    """By what `after` is `before`, a number, one a head or one a row, (1 or B, 1 or H, 1 or L, 1); None otherwise."""
    if before.dtype == after.dtype and torch.equal(before, after):
        return torch.ones(1, 1, 1, 1, dtype=torch.float64, device=after.device)
    x, y = before.to(torch.float64), after.to(torch.float64)
    eps = max(torch.finfo(t.dtype).eps for t in (before, after) if t.is_floating_point())
    for axes in ((0, 1, 2, 3), (0, 2, 3), (0, 1, 3), (3,)):
        size = (x * x).sum(axes, keepdim=True)
        by = torch.where(size > 0, (x * y).sum(axes, keepdim=True) / size, torch.ones_like(size))
        by = torch.where((by - 1).abs() <= eps, torch.ones_like(by), by)
        if bool(((y - by * x).abs() <= _SLACK * eps * y.abs().clamp_min(torch.finfo(torch.float32).tiny)).all()):
            return by
    return None


def _rounded(before: Tensor, after: Tensor) -> str | None:
    """The lesser dtype that values went through."""
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        if torch.equal(before.to(dtype).to(after.dtype), after):
            return str(dtype).removeprefix("torch.")
    return None


def _divided(values: Tensor, factor: Tensor) -> Tensor:
    if bool((factor == 1).all()):
        return values
    return (values.to(torch.float64) / factor).to(values.dtype)


def _number(factor: Tensor) -> Tensor | float:
    return float(factor) if factor.numel() == 1 else factor


def _projection(place: Place, way: Lineage, used: Tensor) -> Projection | None:
    """The one projection that all of a vector came from."""
    root = way.roots[0]
    if len(way.roots) != 1 or root.root is None or root.root.multiplied is None or root.value is None:
        return None
    multiplied, (rows, features) = root.root.multiplied, root.value.shape[-2:]
    if math.prod(root.value.shape[:-2]) != 1:
        return None
    # of a dtype that can be viewed as complex numbers
    numbers = torch.arange(rows * features, dtype=torch.float64, device=root.value.device)
    numbers = numbers.reshape(root.value.shape)
    numbered = _arranged(place, way.carried({root: numbers}), used)
    if numbered is None or bool(numbered.isnan().any()):
        return None
    at = numbered.long()
    row, feature = at // features, at % features
    if not bool((row == row[:, :1, :, :1]).all()) or not bool((feature == feature[:1, :, :1]).all()):
        return None
    feature = feature[0, :, 0].clone()  # a view would hold the number of every entry
    weight = multiplied.weight.mT[feature]
    bias = None if multiplied.bias is None else multiplied.bias.expand(features)[feature]
    given, part = multiplied.input[row[:, 0, :, 0]].detach(), root.root.part
    return Projection(root.label, given, weight.detach(), _kept(bias), feature, part)


def _shifted(place: Place, way: Lineage, used: Tensor, projected: Tensor) -> Projection | None:
    """The projection, with a bias that was added by an operation of its own."""
    root = way.roots[0]
    before = None if root.value is None else _arranged(place, way.carried({root: root.value}), used)
    plain = _projection(place, way, used)
    if plain is None or before is None:
        return None
    bias = (projected.to(torch.float64) - before.to(torch.float64)).mean((0, 2)).to(projected.dtype)
    bias = bias if plain.bias is None else bias + plain.bias
    return replace(plain, bias=bias)


def _kept(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()
