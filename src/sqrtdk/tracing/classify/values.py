"""Weights meet values: by a product, or by a multiplication and a sum over the keys or the edges of a node.

Here it is told whether the value product sums over the axis that the softmax runs over.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.tracing.classify.edges import INDEX, group_fault
from sqrtdk.tracing.classify.mixing import axes_along
from sqrtdk.tracing.classify.pairs import is_additive
from sqrtdk.tracing.classify.weights import OTHER_SUM, WHOLE
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.marks import Carried, Weighing
from sqrtdk.tracing.watch.recorder import Made, Scene

OTHER_AXIS = "softmax over another axis than the value product sums over"
QUERIES = "softmax over the queries"
_PARTIAL = 5e-2  # nearer to 1 than that the sum of what is no whole row never is


def is_scored(logits: Node) -> bool:
    """Whether logits are scores of queries and keys; a router's or a pooling's are not."""
    return bool(logits.products) or is_additive(logits)


def sum_values(scene: Scene, made: Made, weighted: Node) -> None:
    """Weighted values are summed, over the keys or for each node of a graph, the first time: who listens is told."""
    weights = weighted.weights
    assert weights is not None
    weighing, values = weights.weighing, weights.values
    if not weighing.entry.attention and values is not None:
        source, dims = weighted.args[0], len(weighted.shape)
        weighing.entry.attention = True
        weighing.carried = weights.carried
        if weighing.edges is not None:
            weighing.fault = group_fault(weighing, made.tensors.get(INDEX))
        else:
            over = made.node.args[1] if len(made.node.args) > 1 and made.node.args[1] else range(dims)
            weighing.fault = _sum_fault(source, {axis % dims - dims for axis in over}, weighing)
            values = _features_last(values, source)
        scene.listener.eager(weighing, values, made.tensor)
    scene.store.cut(made.node, made.tensor)


def _features_last(values: Tensor, weights: Node) -> Tensor:
    """The values with the axis last that the weights do not have."""
    for axis in range(-1, -1 - values.dim(), -1):
        if values.shape[axis] > 1 and (-axis > len(weights.shape) or weights.shape[axis] == 1):
            return values.movedim(axis, -1)
    return values


def over_their_sum(carried: Carried, tensor: Tensor | None, contracted: int) -> Carried:
    """What weights went through, where they were divided by their sum over the axis that the value product sums over.

    Slots compete for an input, and what each has of all inputs sums to 1 (Locatello et al. 2020, section 2.1).

    Args:
        carried: what they went through.
        tensor: their values as they meet those of v.
        contracted: the axis of it that the product sums over, -1 or -2.
    """
    if OTHER_SUM not in carried.changes or tensor is None or tensor.is_meta or not tensor.numel():
        return carried
    sums = tensor.detach().to(torch.float32).sum(contracted)
    if not bool(((sums - 1).abs() < WHOLE).all()):
        return carried
    return replace(carried, changes=tuple(name for name in carried.changes if name != OTHER_SUM)).over_sum()


def axis_fault(weights: Node, tensor: Tensor | None, contracted: int, weighing: Weighing) -> str | None:
    """What is wrong where the value product does not sum over the softmax's axis.

    Rows of one matrix that sum to 1 are right; where they do not (dropout, masks), the views since the softmax tell.

    Args:
        weights: the product's operand.
        tensor: its values.
        contracted: the axis of it that the product sums over, -1 or -2.
        weighing: the softmax.
    """
    if len(weights.shape) < 2 or weighing.edges is not None:
        return None
    other = -3 - contracted
    if tensor is not None and not tensor.is_meta and tensor.numel():
        matrix = tensor.detach().reshape(-1, *tensor.shape[-2:])[0].to(torch.float32)
        over, across = ((matrix.sum(axis) - 1).abs() for axis in (contracted, other))
        if bool((over < WHOLE).all()):
            return None
        if min(tensor.shape[-2:]) > 1 and bool((across < WHOLE).all()) and bool((over > _PARTIAL).any()):
            return QUERIES
    axes = _axes(weights, weighing)
    if not axes or contracted in axes:
        return None
    return QUERIES if axes == {other} else OTHER_AXIS


def _sum_fault(weights: Node, summed: set[int], weighing: Weighing) -> str | None:
    """The same, where weights and values were multiplied by broadcasting and then summed.

    Args:
        weights: the multiplication's operand.
        summed: axes of its result that the sum is over, counted from the end.
        weighing: the softmax.
    """
    axes = _axes(weights, weighing)
    if not axes or axes & summed:
        return None
    beside = {axis for axis in summed if -axis <= len(weights.shape) and weights.shape[axis] > 1}
    return QUERIES if any(abs(a - b) == 1 for a in axes for b in beside) else OTHER_AXIS


def _axes(weights: Node, weighing: Weighing) -> set[int]:
    """Axes of `weights`, counted from the end, along which the softmax's runs; none where that can't be followed."""
    way: list[Node] = []
    dims, shape = len(weights.shape), weighing.entry.shape
    while weights.args:
        parent = weights.args[0]
        if not isinstance(parent, Node) or parent.weighing is not weighing:
            return set()
        if weights.op in ops.VIEWS:
            way.insert(0, weights)
        elif weights.op not in ops.SAME and weights.shape != parent.shape:
            return set()
        weights = parent
    if weights.shape != shape:
        return set()
    line = torch.arange(shape[weighing.dim]) > 0
    place = line.view([-1 if d == weighing.dim % len(shape) else 1 for d in range(len(shape))]).expand(shape)
    return {axis - dims for axis in axes_along(place, way) or ()}
