"""Q, k or v of an attention at every step from its projection to where it is used, in the layout that it is used in.

A norm or a rotation is one step of several operations (`_Span`). Values before or after a step are carried to the end
by the views and pieces on the way; what else lies there keeps every number in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.tracing.lower.vectors import ROTATION
from sqrtdk.tracing.probe.norms import name_of_gain, norm_within
from sqrtdk.tracing.spine.lineage import follow, unasked
from sqrtdk.tracing.spine.regroup import REJOINED, regrouped
from sqrtdk.tracing.spine.rotations import in_shape
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import dominator, part, written
from sqrtdk.tracing.tape.node import Node
from sqrtdk.tracing.tensors import Projection, Vector, Waypoint

_SLACK = 8.0  # roundings of the dtype that a factor may have cost a number on its way
_LINEAR = frozenset({"mul", "div", "neg", *ops.SAME, *ops.VIEWS})
# the last operation of a rotation
_TURNS = frozenset({"add", "sub", "addcmul", "cat", "stack", "overwrite", "complex", "mul", "sum", ROTATION})


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a vector was used: its node, its values there, and how they are brought to (B, H, L, E)."""

    node: Node
    values: Tensor
    arrange: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Several operations that are one step: `end` is made from `source`; of a norm `gain` is the gain's name."""

    name: str
    detail: str
    source: Node
    end: Node
    order: Tensor | None = None  # the number in `source` of each of the end's; None if each is in its place
    gain: str = ""


def vector(place: Place) -> Vector:
    """A vector with all that is known of its way."""
    way = _Way(place)
    used, starts = way.used, {root: root.value for root in way.roots if root.value is not None}
    if len(starts) < len(way.roots):
        return Vector(used)
    if way.shift is not None:
        if len(way.roots) > 1 or way.shift.value is None:
            return Vector(used)
        starts = {way.shift: way.shift.value}
    projected = way.carried(starts)
    if projected is None:
        return Vector(used)
    steps: list[Waypoint] = []
    last, factor = projected, torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for span in reversed(way.spans):
        before, after = (
            None if node.value is None else way.carried({**starts, node: node.value})
            for node in (span.source, span.end)
        )
        by = None if before is None else _factor(last, before)
        if after is None or by is None:
            return Vector(used, projected=projected, steps=(*steps, Waypoint("unknown", span.detail, None)))
        factor = torch.ones_like(factor) if span.name == "norm" else factor * by
        last = after
        plain = after if bool((factor == 1).all()) else (after.to(torch.float64) / factor).to(after.dtype)
        steps.append(Waypoint(span.name, span.detail, plain, span.gain))
    by = _factor(last, used)
    if by is None and (dtype := _rounded(last, used)) is not None:
        steps.append(Waypoint("rounded", dtype, used))
        by = torch.ones_like(factor)
    if by is None:
        return Vector(used, projected=projected, steps=(*steps, Waypoint("unknown", "", None)))
    factor = factor * by
    if not steps and projected.dtype == used.dtype and torch.equal(projected, used):
        projected = used  # kept once
    number = float(factor) if factor.numel() == 1 else factor
    return Vector(used, number, projected, tuple(steps), _projection(way, projected))


def sharing(vectors: list[Vector]) -> list[Vector]:
    """The same vectors: what several of them were projected from is kept once."""
    inputs: list[Tensor] = []
    shared = []
    for one in vectors:
        if one.projection is not None:
            own_input = one.projection.input
            same = (x for x in inputs if x.dtype == own_input.dtype and torch.equal(x, own_input))
            inputs.append(next(same, own_input))
            one = replace(one, projection=replace(one.projection, input=inputs[-1]))
        shared.append(one)
    return shared


def own(arranged: Tensor, tensor: Tensor) -> Tensor:
    """Values that no later write of the model reaches: a copy, where they are a view of its tensor."""
    if arranged.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        return arranged.clone(memory_format=torch.contiguous_format)
    return arranged


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


def _projection(way: _Way, projected: Tensor) -> Projection | None:
    """The one projection that all of a vector came from, with a bias that was added by an operation of its own."""
    root = way.roots[0]
    if len(way.roots) != 1 or root.root is None or root.root.multiplied is None or root.value is None:
        return None
    multiplied, (rows, features) = root.root.multiplied, root.value.shape[-2:]
    if math.prod(root.value.shape[:-2]) != 1:
        return None
    # of a dtype that can be viewed as complex numbers
    numbers = torch.arange(rows * features, dtype=torch.float64, device=root.value.device)
    numbered = way.carried({root: numbers.reshape(root.value.shape)})
    if numbered is None or bool(numbered.isnan().any()):
        return None
    at = numbered.long()
    row, feature = at // features, at % features
    if not bool((row == row[:, :1, :, :1]).all()) or not bool((feature == feature[:1, :, :1]).all()):
        return None
    feature = feature[0, :, 0].clone()  # a view would hold the number of every entry
    weight, rows_of = multiplied.weight.detach(), feature.flatten()
    side_by_side = weight.stride(-1) == 1  # a Conv1D's is read as it lies, which is several times faster
    weight = weight.index_select(1, rows_of).mT if side_by_side else weight.mT.index_select(0, rows_of)
    weight = weight.reshape(*feature.shape, -1)
    bias = None if multiplied.bias is None else multiplied.bias.expand(features)[feature].detach()
    if way.shift is not None:
        before = way.carried({root: root.value})
        if before is None:
            return None
        late = (projected.to(torch.float64) - before.to(torch.float64)).mean((0, 2)).to(projected.dtype)
        bias = late if bias is None else late + bias
    return Projection(root.label, multiplied.input[row[:, 0, :, 0]].detach(), weight, bias, feature, root.root.part)


# -- the way back ------------------------------------------------------------------------------------------------------


class _Way:
    """The steps on the way to a place.

    Attributes:
        used: the values there, as they are kept.
        spans: steps, nearest to the end first.
        roots: where it begins.
        shift: the first sum with a vector that is no activation: a bias that came late.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.used = own(place.arrange(place.values.detach()), place.values)
        self.spans: list[_Span] = []
        self.roots: list[Node] = []
        self.shift: Node | None = None
        queue, known = [place.node], set[Node]()
        while queue:
            node = queue.pop(0)
            if node not in known:
                known.add(node)
                queue += self._before(node)

    def _before(self, node: Node) -> list[Node]:
        """What a node was made of; notes the step that it ends."""
        main = node.main()
        span = _rotation(node) if node.is_root or main is None else _span(node)
        if span is not None:
            self.spans.append(span)
            return [span.source]
        if node.is_root or not node.act or main is None:
            self.roots.append(node)
            return []
        if node.op in REJOINED:
            return [parent for parent in node.parents() if parent.act]
        if (pieces := _pieces(node)) is not None:
            return [source for _, source in pieces]
        if node.op in ("add", "sub") and sum(parent.act for parent in node.parents()) == 1:
            self.shift = node
        elif node.op not in _LINEAR:
            self.spans.append(_Span("unknown", node.op, main, node))
        return [main]

    def carried(self, starts: Mapping[Node, Tensor]) -> Tensor | None:
        """Values of some nodes on the way, as q, k or v are; None if they can't be carried there."""
        ends = {span.end: span for span in self.spans}

        def start(node: Node) -> Tensor | None:
            if node in starts:
                return starts[node]
            span = ends.get(node)
            if span is None:
                return _written(node, valued) if node.op == "overwrite" else None
            value = valued(span.source)
            if value is not None and span.order is not None:
                value = value.reshape(-1)[span.order.to(value.device)]
            return in_shape(value, node)

        def valued(node: Node) -> Tensor | None:
            value = start(node)
            return regrouped(node, start) if value is None else value

        value = valued(self.place.node)
        if value is None or tuple(value.shape) != tuple(self.place.values.shape):
            return None
        arranged = own(self.place.arrange(value.detach()), value)
        return arranged if arranged.shape == self.used.shape else None


def _span(node: Node) -> _Span | None:
    if (within := norm_within(node)) is not None:
        norm, operations = within
        return _Span("norm", norm.kind, norm.part.source, node, gain=name_of_gain(operations))
    return _rotation(node) if node.op in _TURNS and node.act else None


def _rotation(node: Node) -> _Span | None:
    """A rotation that ends in a node, by what the readers of q and k say of it and of what it was made from."""
    if node.is_root:  # a product with matrices: a root of its own
        source = node.branches[0][0] if len(node.branches) == 1 and node.op != "convolution" else None
    else:
        source = dominator(node)[0]
        if node.op == "sum" and source is not None:  # (R * x[..., None, :]).sum(-1)
            source = dominator(source)[0]
    if source is None:
        return None
    with unasked():
        before, after = follow(source, "q"), follow(node, "q")
    if not after.rope or before.rope or len(after.unknown) > len(before.unknown):
        return None
    return _Span("rope", "by its effect" if node.op == ROTATION else "", source, node, _order(node, source))


def _order(node: Node, source: Node) -> Tensor | None:
    """Where each number of a rotated vector was, where the channels of a pair were put in another order."""
    count = math.prod(source.shape)
    numbers = torch.arange(count, dtype=torch.float64).reshape(source.shape)
    moved = regrouped(node, lambda other: numbers if other is source else None)
    if moved is None or moved.numel() != count or moved.is_complex():
        return None
    order = moved.reshape(-1).long()
    in_place = torch.arange(count)
    return order if torch.equal(order.sort().values, in_place) and not torch.equal(order, in_place) else None


def _pieces(node: Node) -> list[tuple[Node, Node]] | None:
    """Where pieces were written, and what; the first one first. None of what is no new tensor written whole."""
    base, writes = written(node)
    if not writes or base.act:
        return None
    pieces = []
    for write in writes:
        source = write.args[1] if write.op == "copy" and len(write.args) > 1 else None
        if not isinstance(source, Node) or not source.act or write.args[0].op not in ops.VIEWS:
            return None
        pieces.append((write, source))
    return pieces


def _written(node: Node, valued: Callable[[Node], Tensor | None]) -> Tensor | None:
    """The values of pieces, each in its place; what was not written is no number, or -1."""
    whole: Tensor | None = None
    for write, source in _pieces(node) or ():
        value = valued(source)
        if value is None:
            return None
        if whole is None:
            whole = value.new_full(node.shape, float("nan") if value.is_floating_point() else -1)
        part(write, whole).copy_(value)
    return whole
