"""Weights that meet values by a multiplication, by broadcasting, and a sum over the keys."""

from __future__ import annotations

from torch import Tensor

from sqrtdk.tracing.classify.edges import INDEX, group_fault
from sqrtdk.tracing.classify.pairs import is_additive
from sqrtdk.tracing.classify.weights import sum_fault
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.scene import Made, Scene


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
            weighing.fault = sum_fault(source, {axis % dims - dims for axis in over}, weighing)
            values = _features_last(values, source)
        scene.listener.eager(weighing, values, made.tensor)
    scene.store.cut(made.node, made.tensor)


def _features_last(values: Tensor, weights: Node) -> Tensor:
    """The values with the axis last that the weights do not have."""
    for axis in range(-1, -1 - values.dim(), -1):
        if values.shape[axis] > 1 and (-axis > len(weights.shape) or weights.shape[axis] == 1):
            return values.movedim(axis, -1)
    return values
