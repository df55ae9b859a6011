"""Graph attention: one logit an edge, and a softmax over the edges of each node, by sums that are scattered.

A score is (q[target] * k[source]).sum(-1), or additive; the softmax is exp(z) over its sum for the edge's node
(Velickovic et al. 2018, arXiv:1710.10903; PyTorch Geometric's `softmax(src, index)`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.tracing.classify.gathered import LINEAR, rows_of
from sqrtdk.tracing.classify.softmax import begin
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, alias, origin
from sqrtdk.tracing.watch.marks import EdgeGroups, Product, Weighing, Weights
from sqrtdk.tracing.watch.recorder import Made, Scene


class _Arguments(NamedTuple):
    """Positions of arguments: of what is reduced, of the axis, and of the kind of reduction, or that kind."""

    reduced: int
    axis: int | None = None
    kind: int | str = "sum"


_GROUPED = {
    "scatter_add": _Arguments(3, 1),
    "index_add": _Arguments(3, 1),
    "scatter_reduce": _Arguments(3, 1, 4),
    "index_reduce": _Arguments(3, 1, 4),
    "index_put": _Arguments(2),
    "segment_reduce": _Arguments(0, None, 1),
    "scatter_max": _Arguments(0, 2, "amax"),  # this and the next of torch_scatter
    "segment_sum_csr": _Arguments(0),
    "segment_max_csr": _Arguments(0, None, "amax"),
}
_GUARDS = ops.CLAMPS | {"add"}
_BACK = ops.VIEWS | ops.SAME | {"gather", "gather_csr"}  # from the nodes to their edges
_INDEX = 2  # position of the numbers of the groups


class Reduction(NamedTuple):
    """A reduction by groups: what is reduced, along which axis, how ("sum", "mean", "amax"), to how many groups."""

    reduced: Node
    axis: int
    kind: str
    groups: int


def reduction(node: Node) -> Reduction | None:
    """The reduction by groups that a node is; None for any other."""
    arguments = _GROUPED.get(node.op)
    if arguments is None or len(node.args) <= arguments.reduced:
        return None
    reduced = node.args[arguments.reduced]
    overwrites = node.op == "index_put" and (len(node.args) < 4 or not node.args[3])
    if not isinstance(reduced, Node) or not reduced.shape or overwrites:
        return None
    axis = node.kwargs.get("axis", 0) if arguments.axis is None else node.args[arguments.axis]
    kind = arguments.kind if isinstance(arguments.kind, str) else str(node.args[arguments.kind])
    axis = int(axis) % len(reduced.shape)
    return Reduction(reduced, axis, {"max": "amax"}.get(kind, kind), node.shape[axis])


def sums_values(node: Node) -> bool:
    """Whether a node sums, or averages, what each group of edges brought."""
    grouped = reduction(node)
    return grouped is not None and grouped.kind in ("sum", "mean")


def is_of_groups(node: Node) -> bool:
    """Whether a node is the largest logit of each group of edges, or the logarithm of its sum of exponentials."""
    while node.op in _BACK | {"add"} and not node.is_root:
        parent = node.main()
        if parent is None:
            return False
        node = parent
    grouped = reduction(node)
    return _log_total(node) is not None or (grouped is not None and grouped.kind == "amax")


def _log_total(node: Node) -> _Total | None:
    inner = node.main() if node.op == "log" else None
    return None if inner is None else _total(inner)


# -- the score ---------------------------------------------------------------------------------------------------------


def pairs_rows(node: Node) -> bool:
    """Whether `node` multiplies the rows of two activations, edge by edge."""
    if node.op != "mul" or len(node.shape) < 2:
        return False
    sides = [arg for arg in node.args if isinstance(arg, Node) and arg.act and arg.shape == node.shape]
    if len(sides) != 2:
        return False
    left, right = (rows_of(side) for side in sides)
    return left != right


def score(made: Made) -> bool:
    """Whether a node is q . k on the edges, (q[target] * k[source]).sum(-1); factors before the sum are q's."""
    node = made.node
    if node.op != "sum" or len(node.args) < 2 or list(node.args[1] or []) not in ([-1], [len(node.args[0].shape) - 1]):
        return False
    way: list[Node] = []
    product: Node = node.args[0]
    while not pairs_rows(product):
        parent = product.main() if product.op in LINEAR and sum(p.act for p in product.parents()) == 1 else None
        if parent is None or product.is_root:
            return False
        way.append(product)
        product = parent
    query, key = product.args[0], product.args[1]
    for step in reversed(way):
        query = _moved(step, query)
    node.args = (query, key)
    node.product = Product(made.tensor.dtype, None, edges=True)
    return True


def _moved(step: Node, onto: Node) -> Node:
    """The same factor on another node."""
    main = step.main()
    args = tuple(onto if arg is main else arg for arg in step.args)
    node = Node(step.op, onto.shape, func=step.func, args=args, kwargs=step.kwargs, act=True, site=step.site)
    node.operands, node.roots = step.operands, onto.roots
    return node


# -- the softmax -------------------------------------------------------------------------------------------------------


def softmax(scene: Scene, made: Made) -> bool:
    """Whether a node is exp(z) over the sum of exp(z) for the edge's node, or the values so weighted and summed."""
    node = made.node
    if node.op == "exp":
        return _from_logarithm(scene, made)
    if node.op != "div" or len(node.args) < 2 or not all(isinstance(arg, Node) for arg in node.args[:2]):
        return False
    top, total = origin(node.args[0]), _total(node.args[1])
    if total is None:
        return False
    if top.op == "exp" and origin(total.sum.reduced) is top:
        node.args = (top.args[0],)
        _begin(scene, made, top.operands.get(0, made.tensor), total)
        return True
    return _summed_before(scene, made, top, total)


def softmax_of_rows(scene: Scene, made: Made, parents: list[Node]) -> None:
    """PyTorch Geometric's own operation: softmax_csr(src, ptr, dim), a group from each number of `ptr` to the next."""
    node = made.node
    axis = int(node.args[2]) if len(node.args) > 2 else 0
    begin(scene, made, made.tensors[0], axis).edges = EdgeGroups(axis, max(math.prod(parents[1].shape) - 1, 0))


def _from_logarithm(scene: Scene, made: Made) -> bool:
    """Exp of z - log of the sum of exp(z) for the edge's node."""
    node = made.node
    inner = origin(node.args[0])
    other = inner.args[1] if inner.op == "sub" and not inner.is_root and len(inner.args) > 1 else None
    while isinstance(other, Node) and other.op in _BACK | {"add"} and not other.is_root:
        other = other.main()
    total = _log_total(other) if isinstance(other, Node) else None
    if total is None:
        return False
    node.args = (inner,)
    _begin(scene, made, made.tensors[0], total)
    return True


def _begin(scene: Scene, made: Made, logits: Tensor, total: _Total) -> Weighing:
    weighing = begin(scene, made, logits, total.sum.axis)
    known = total.index is not None and not total.index.is_meta and not total.index.is_floating_point()
    index = _column(total.index, total.sum.axis) if known and total.index is not None else None
    weighing.edges = EdgeGroups(total.sum.axis, total.sum.groups, index)
    return weighing


@dataclass(frozen=True, slots=True, eq=False)
class _Total:
    """A sum by groups, and the number of each edge's group."""

    sum: Reduction
    index: Tensor | None


def _total(node: Node) -> _Total | None:
    """The sum by groups that a divisor is, behind a guard against zero and the way back to the edges."""
    while node.op in _BACK | _GUARDS and not node.is_root:
        parent = node.main()
        if parent is None:
            return None
        node = parent
    grouped = reduction(node)
    if grouped is None or grouped.kind != "sum" or node.is_root:
        return None
    return _Total(grouped, node.operands.get(_INDEX))


def _summed_before(scene: Scene, made: Made, top: Node, total: _Total) -> bool:
    """The sum over the edges of exp(z) v, divided by that of exp(z): an attention that is complete."""
    above = reduction(top)
    bottom = origin(total.sum.reduced)
    weighted = origin(above.reduced) if above is not None and not top.is_root else None
    if weighted is None or weighted.op != "mul" or bottom.op != "exp" or 0 not in bottom.operands:
        return False
    place = next((i for i, arg in enumerate(weighted.args) if isinstance(arg, Node) and origin(arg) is bottom), None)
    values = None if place is None else weighted.operands.get(1 - place)
    if values is None:
        return False
    logits = bottom.operands[0]
    node = Node("div", tuple(logits.shape), args=(bottom.args[0],), act=True, site=made.node.site)
    weighing = _begin(scene, replace(made, node=node, tensor=logits), logits, total)
    _meet(scene, made, weighing, alias(values), top.operands.get(_INDEX))
    return True


def sum_values(scene: Scene, made: Made, weights: Weights) -> None:
    """Weighted values are summed for each node, for the first time: who listens is told."""
    weighing = weights.weighing
    if weighing.entry.attention or weights.values is None:
        scene.store.cut(made.node, made.tensor)
        return
    weighing.carried = weights.carried
    _meet(scene, made, weighing, weights.values, made.tensors.get(_INDEX))


def _meet(scene: Scene, made: Made, weighing: Weighing, values: Tensor, index: Tensor | None) -> None:
    weighing.entry.attention = True
    weighing.fault = _group_fault(weighing, index)
    scene.listener.eager(weighing, values, made.tensor)
    scene.store.cut(made.node, made.tensor)


OTHER_GROUPS = "softmax over the edges of other nodes than the values are summed for"


def _group_fault(weighing: Weighing, index: Tensor | None) -> str | None:
    """What is wrong where the values are summed by another grouping of the edges than the softmax's."""
    groups = weighing.edges
    if groups is None or groups.index is None or index is None or index.is_meta or index.is_floating_point():
        return None
    return None if torch.equal(groups.index, _column(index, groups.axis)) else OTHER_GROUPS


def _column(index: Tensor, axis: int) -> Tensor:
    """The number of each edge's group, of an index that was repeated over heads and features."""
    return index if index.dim() < 2 else index.movedim(axis, 0).flatten(1)[:, 0]
