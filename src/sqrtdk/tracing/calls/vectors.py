"""The values of q, k or v at every step from the projection to its use, in the layout of its use.

A norm or a rotation is one step of several operations (`_Span`). Values before and after a step are moved to the end by
the later views and writes. All other operations keep every element in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.tracing.lower.vectors import ROTATION
from sqrtdk.tracing.probe.norms import name_of_gain, norm_within
from sqrtdk.tracing.readback.lineage import follow_side, unprobed
from sqrtdk.tracing.readback.regroup import REJOINED, regrouped
from sqrtdk.tracing.readback.rotations import in_shape
from sqrtdk.tracing.tape import ops, places
from sqrtdk.tracing.tape.graph import before_writes, dominator, written_view
from sqrtdk.tracing.tape.node import Node
from sqrtdk.tracing.tensors import Projection, Vector, Waypoint

_MULTIPLE_ROUNDINGS = 8.0  # roundings of the dtype within which one tensor counts as a multiple of another
_FACTORS_AND_VIEWS = frozenset({"mul", "div", "neg", *ops.CASTS_AND_COPIES, *ops.VIEWS})
# Operations that may end a rotation, such as the add of `x * cos + rotate_half(x) * sin`.
_LAST_OF_A_ROTATION = frozenset(
    {"add", "sub", "addcmul", "cat", "stack", "overwrite", "complex", "mul", "sum", ROTATION}
)


@dataclass(frozen=True, slots=True, eq=False)
class VectorUse:
    """The use of q, k or v in an attention.

    Attributes:
        node: node of the tensor that is used.
        values: that tensor.
        arrange: a function that arranges a tensor of its shape as (B, H, L, E).
    """

    node: Node
    values: Tensor
    arrange: Callable[[Tensor], Tensor]


def first_columns(place: VectorUse, count: int) -> VectorUse:
    """Return the use of values without what stands behind them, such as a column of ones that gives a sum."""
    return replace(place, arrange=lambda tensor: place.arrange(tensor)[..., :count])


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Several operations that form one step, from `source` to `end`. `gain` is the name of a norm's gain."""

    name: str
    detail: str
    source: Node
    end: Node
    order: Tensor | None = None  # flat index in `source` of each element of `end`; None if all stay in place
    gain: str = ""


def vector(place: VectorUse) -> Vector:
    """Return q, k or v with its projection and the steps from the projection to its use, as far as they are known.

    If the way from the projection is unknown, the result has the values at the use alone. If one step is unknown, it
    has the projected values and the steps before that one.
    """
    way = _VectorPath(place)
    return replace(_followed(way), lines=_lines(way))


def _followed(way: _VectorPath) -> Vector:
    used, starts = way.used, {root: root.value for root in way.roots if root.value is not None}
    if len(starts) < len(way.roots):
        return Vector(used)
    if way.shift is not None:
        if len(way.roots) > 1 or way.shift.value is None:
            return Vector(used)
        starts = {way.shift: way.shift.value}  # the projection's output includes a bias that is added separately
    projected = way.replayed(starts)
    if projected is None:
        return Vector(used)
    steps: list[Waypoint] = []
    last, factor = projected, torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for span in reversed(way.spans):
        before, after = (
            None if node.value is None else way.replayed({**starts, node: node.value})
            for node in (span.source, span.end)
        )
        by = None if before is None else _factor(last, before)
        if after is None or by is None:
            return Vector(used, projected=projected, steps=(*steps, Waypoint("unknown", span.detail, None)))
        # A norm removes all factors before it.
        factor = torch.ones_like(factor) if span.name == "norm" else factor * by
        last = after
        plain = after if bool((factor == 1).all()) else (after.to(torch.float64) / factor).to(after.dtype)
        steps.append(Waypoint(span.name, span.detail, plain, span.gain))
    by = _factor(last, used)
    if by is None and (dtype := _rounded(last, used)) is not None:  # q.to(torch.bfloat16).to(torch.float32)
        steps.append(Waypoint("rounded", dtype, used))
        by = torch.ones_like(factor)
    if by is None:
        return Vector(used, projected=projected, steps=(*steps, Waypoint("unknown", "", None)))
    factor = factor * by
    if not steps and projected.dtype == used.dtype and torch.equal(projected, used):
        projected = used  # one tensor is kept instead of two equal ones
    number = float(factor) if factor.numel() == 1 else factor
    found = _projection(way, projected)
    projection, viewed = (None, found) if isinstance(found, Tensor) else (found, None)
    return Vector(used, number, projected, tuple(steps), projection, viewed=viewed)


def _lines(way: _VectorPath) -> dict[str, str]:
    """Return the source lines of what `Vector.lines` names: the first of its kind, but the last that moves heads."""
    found: dict[str, Node] = {}
    for node in sorted(way.nodes, key=lambda node: node.serial):
        main = node.main()
        if node in way.roots or main is None:
            continue
        parents = [parent for parent in node.parents() if parent.act]
        if math.prod(node.shape) > math.prod(main.shape) and (node.op in ops.VIEWS or len(parents) > len({*parents})):
            found.setdefault("repeat", node)  # cat([k] * n, 1) too
        elif node.op in ops.SPLITTING:
            if main.shape and node.shape and node.shape[-1] < main.shape[-1]:
                found.setdefault("split", node)
            if len(node.shape) > max(4, len(main.shape)):  # q.view(B, L, KV, n, E)
                found["grouped"] = node
        elif node.op in ops.REORDERING:
            found["order"] = node
    if len(way.roots) == 1:
        found["projection"] = way.roots[0]
    return {name: at for name, node in found.items() if (at := places.place_text(node.place)) is not None}


def share_tensors(vectors: list[Vector]) -> list[Vector]:
    """Return the vectors with one shared tensor wherever the inputs of their projections are equal, to save memory.

    Inputs are equal if their dtypes and all their values agree. The given vectors are not changed.
    """
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


def owned_copy(arranged: Tensor, tensor: Tensor) -> Tensor:
    """Return values that later in-place writes of the model can't change.

    Args:
        arranged: the values, which may be a view of `tensor`.
        tensor: a tensor of the model.

    Returns:
        A contiguous copy if the two share storage, else `arranged` itself.
    """
    if arranged.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        return arranged.clone(memory_format=torch.contiguous_format)
    return arranged


def _factor(before: Tensor, after: Tensor) -> Tensor | None:
    """Return the factor from `before` to `after`, (1 or B, 1 or H, 1 or L, 1), or None if they differ otherwise.

    One factor for all is tried first, then one per head, one per row, and one per batch, head and row.
    """
    if before.dtype == after.dtype and torch.equal(before, after):
        return torch.ones(1, 1, 1, 1, dtype=torch.float64, device=after.device)
    x, y = before.to(torch.float64), after.to(torch.float64)
    eps = max(torch.finfo(t.dtype).eps for t in (before, after) if t.is_floating_point())
    # The least-squares factor counts if every element matches within rounding.
    for axes in ((0, 1, 2, 3), (0, 2, 3), (0, 1, 3), (3,)):
        size = (x * x).sum(axes, keepdim=True)
        by = torch.where(size > 0, (x * y).sum(axes, keepdim=True) / size, torch.ones_like(size))
        by = torch.where((by - 1).abs() <= eps, torch.ones_like(by), by)
        if bool(
            ((y - by * x).abs() <= _MULTIPLE_ROUNDINGS * eps * y.abs().clamp_min(torch.finfo(torch.float32).tiny)).all()
        ):
            return by
    return None


def _rounded(before: Tensor, after: Tensor) -> str | None:
    """Return the dtype of fewer bits that `before` was rounded to on its way to `after`, or None."""
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        if torch.equal(before.to(dtype).to(after.dtype), after):
            return str(dtype).removeprefix("torch.")
    return None


def _projection(way: _VectorPath, projected: Tensor) -> Projection | Tensor | None:
    """Return the projection of a vector, with a bias that was added separately, or None if there is not just one.

    Of a projection whose heads are a view of all its numbers, return what enters it; see `Vector.viewed`.
    """
    root = way.roots[0]
    if len(way.roots) != 1 or root.root is None or root.root.multiplied is None or root.value is None:
        return None
    multiplied, (rows, features) = root.root.multiplied, root.value.shape[-2:]
    if math.prod(root.value.shape[:-2]) != 1:
        return None
    # The element numbers of the projection's output are moved like values. float64 can be viewed as complex.
    numbers = torch.arange(rows * features, dtype=torch.float64, device=root.value.device)
    numbered = way.replayed({root: numbers.reshape(root.value.shape)})
    if numbered is None or bool(numbered.isnan().any()):
        return None
    at = numbered.long()
    row, feature = at // features, at % features
    if not bool((row == row[:, :1, :, :1]).all()) or not bool((feature == feature[:1, :, :1]).all()):
        if not torch.equal(at.flatten(), torch.arange(at.numel(), device=at.device)):
            return None
        return multiplied.input.detach().reshape(at.shape[0], at.shape[2], -1)
    feature = feature[0, :, 0].clone()  # a view would keep the numbers of all elements alive
    weight = _of_features(multiplied.weight.detach(), feature.flatten()).reshape(*feature.shape, -1)
    bias = None if multiplied.bias is None else multiplied.bias.expand(features)[feature].detach()
    if way.shift is not None:
        before = way.replayed({root: root.value})
        if before is None:
            return None
        late = (projected.to(torch.float64) - before.to(torch.float64)).mean((0, 2)).to(projected.dtype)
        bias = late if bias is None else late + bias
    return Projection(root.label, multiplied.input[row[:, 0, :, 0]].detach(), weight, bias, feature, root.root.part)


def _of_features(weight: Tensor, features: Tensor) -> Tensor:
    """Return a copy of some columns of a weight (D, N), as rows (n, D)."""
    first, count = int(features[0]) if len(features) else 0, len(features)
    if torch.equal(features, torch.arange(first, first + count, device=features.device)):
        # Columns side by side, as those of q in a projection of q, k and v, are copied twenty times as fast.
        return weight[:, first : first + count].clone().mT
    # A Conv1D weight is read in memory order, which is several times faster.
    return weight.index_select(1, features).mT if weight.stride(-1) == 1 else weight.mT.index_select(0, features)


# -- the way back ------------------------------------------------------------------------------------------------------


class _VectorPath:
    """The steps between a vector's projection and its use.

    Attributes:
        used: The values at the use, arranged.
        spans: Steps, last one first.
        nodes: All nodes of the way, without those inside of steps.
        roots: Nodes where the way begins, usually one projection.
        shift: First sum with a vector that is not an activation, such as a bias added separately: `x @ w.T + b`.
    """

    def __init__(self, place: VectorUse) -> None:
        self.place = place
        self.used = owned_copy(place.arrange(place.values.detach()), place.values)
        self.spans: list[_Span] = []
        self.roots: list[Node] = []
        self.shift: Node | None = None
        self.nodes: set[Node] = set()
        queue = [place.node]
        while queue:
            node = queue.pop(0)
            if node not in self.nodes:
                self.nodes.add(node)
                queue += self._before(node)

    def _before(self, node: Node) -> list[Node]:
        """Return the nodes before a node, and notes the step that it ends."""
        main = node.main()
        span = _rotation(node) if node.is_root or main is None else _span(node)
        if span is not None:
            self.spans.append(span)
            return [span.source]
        if node.is_root or not node.act or main is None:
            self.roots.append(node)
            return []
        if node.op in REJOINED:  # cat([x1, x2], -1): every part is followed
            return [parent for parent in node.parents() if parent.act]
        if (pieces := _pieces(node)) is not None:
            return [source for _, source in pieces]
        if node.op in ("add", "sub") and sum(parent.act for parent in node.parents()) == 1:
            self.shift = node
        elif node.op not in _FACTORS_AND_VIEWS:  # relu(q): neither a factor nor a view
            self.spans.append(_Span("unknown", node.op, main, node))
        return [main]

    def replayed(self, starts: Mapping[Node, Tensor]) -> Tensor | None:
        """Return values of nodes on the way, moved to the layout of the use, or None if they can't be moved."""
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
        arranged = owned_copy(self.place.arrange(value.detach()), value)
        return arranged if arranged.shape == self.used.shape else None


def _span(node: Node) -> _Span | None:
    if (within := norm_within(node)) is not None:
        norm, operations = within
        return _Span("norm", norm.kind, norm.part.source, node, gain=name_of_gain(operations))
    return _rotation(node) if node.op in _LAST_OF_A_ROTATION and node.act else None


def _rotation(node: Node) -> _Span | None:
    """Return the rotation that ends in a node, or None. The readers of q and k find one after it and none before."""
    if node.is_root:  # a rotation written as a product with matrices, (x[..., None, :] @ R), is a root itself
        source = node.branches[0][0] if len(node.branches) == 1 and node.op != "convolution" else None
    else:
        source = dominator(node)[0]
        if node.op == "sum" and source is not None:  # (R * x[..., None, :]).sum(-1)
            source = dominator(source)[0]
    if source is None:
        return None
    with unprobed():
        before, after = follow_side(source, "q"), follow_side(node, "q")
    if not after.rope or before.rope or len(after.unknown) > len(before.unknown):
        return None
    return _Span("rope", "by its effect" if node.op == ROTATION else "", source, node, _order(node, source))


def _order(node: Node, source: Node) -> Tensor | None:
    """Return the flat index in the source of each element if a rotation also reordered channels, or None if not."""
    count = math.prod(source.shape)
    numbers = torch.arange(count, dtype=torch.float64).reshape(source.shape)
    moved = regrouped(node, lambda other: numbers if other is source else None)
    if moved is None or moved.numel() != count or moved.is_complex():
        return None
    order = moved.reshape(-1).long()
    in_place = torch.arange(count)
    return order if torch.equal(order.sort().values, in_place) and not torch.equal(order, in_place) else None


def _pieces(node: Node) -> list[tuple[Node, Node]] | None:
    """Return (target, source) of each write into a new tensor, in order, or None if the node is anything else.

    Example of the pattern: `y = torch.empty_like(x); y[..., :n] = a; y[..., n:] = b`.
    """
    base, writes = before_writes(node)
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
    """Return a tensor assembled from the values of its pieces. Elements that were not written are NaN, or -1."""
    whole: Tensor | None = None
    for write, source in _pieces(node) or ():
        value = valued(source)
        if value is None:
            return None
        if whole is None:
            whole = value.new_full(node.shape, float("nan") if value.is_floating_point() else -1)
        written_view(write, whole).copy_(value)
    return whole
