"""Weights that meet values by a multiplication, by broadcasting, and a sum over the keys."""

from __future__ import annotations

from torch import Tensor

from sqrtdk.tracing.classify.additive import is_additive
from sqrtdk.tracing.classify.weights import sum_fault
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.recorder import Made, Scene


def is_scored(logits: Node) -> bool:
    """Whether logits are scores of queries and keys; a router's or a pooling's are not."""
    return bool(logits.products) or is_additive(logits)


def sum_values(scene: Scene, made: Made, weighted: Node) -> None:
    """Weighted values are summed, for the first time: who listens is told."""
    weights = weighted.weights
    assert weights is not None
    weighing, values = weights.weighing, weights.values
    if not weighing.entry.attention and values is not None:
        source, dims = weighted.args[0], len(weighted.shape)
        over = made.node.args[1] if len(made.node.args) > 1 and made.node.args[1] else range(dims)
        weighing.entry.attention = True
        weighing.carried = weights.carried
        weighing.fault = sum_fault(source, {axis % dims - dims for axis in over}, weighing)
        scene.listener.eager(weighing, _features_last(values, source), made.tensor)
    scene.store.cut(made.node, made.tensor)


def _features_last(values: Tensor, weights: Node) -> Tensor:
    """The values with the axis last that the weights do not have."""
    for axis in range(-1, -1 - values.dim(), -1):
        if values.shape[axis] > 1 and (-axis > len(weights.shape) or weights.shape[axis] == 1):
            return values.movedim(axis, -1)
    return values
