"""Along which axes of a tensor of logits, or of weights, the queries and the keys of its product run."""

from __future__ import annotations

import torch

from sqrtdk.tracing.steps.placed import to_softmax
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node


def paired_axes(node: Node) -> frozenset[int] | None:
    """Axes along which queries or keys run, counted from 0; None where the way from the product can't be followed.

    All other axes are heads, or batch.
    """
    way: list[Node] = []
    while node.product is None:
        parent = _before(node)
        if parent is None:
            return None
        if node.op in ops.VIEWS or (node.op in ops.CONTRACTIONS and node.shape != parent.shape):
            way.append(node)
        elif node.shape != parent.shape:
            return None
        node = parent
    rows, columns = (torch.arange(n) > 0 for n in node.shape[-2:])
    place = (rows[:, None] | columns[None, :]).expand(node.shape)
    try:
        place = to_softmax(place, reversed(way))
    except (RuntimeError, IndexError):
        return None
    return frozenset(axis for axis in range(place.dim()) if bool((place != place.narrow(axis, 0, 1)).any()))


def _before(node: Node) -> Node | None:
    """What logits or weights were made from; of weights that just left their softmax, its logits."""
    if node.products or node.args:
        return node.main()
    return None if node.weighing is None else node.weighing.node
