"""Nystroem's attention: softmax(q k~) times the inverse of softmax(q~ k~) times softmax(q~ k) v.

Landmarks q~ and k~ are few (Xiong et al. 2021, arXiv:2102.03902). The inverse is made of products of the weights with
themselves, which are no products of queries and keys.
"""

from __future__ import annotations

from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.marks import Weights
from sqrtdk.tracing.watch.recorder import Made, Scene

INVERSES = frozenset({"linalg_pinv", "linalg_inv_ex", "_linalg_svd", "_linalg_eigh", "_linalg_solve_ex"})


def inverts(a: Node, b: Node) -> bool:
    """Whether a product of the two is a step to an inverse of weights, or weights times an inverse."""
    same = a.weights is not None and a.weighing is b.weighing
    return same or (uses_inverse(a, b) and all(_is_inverse(x) or x.weights is not None for x in (a, b)))


def uses_inverse(a: Node, b: Node) -> bool:
    """Whether one of the two is an inverse of weights."""
    return _is_inverse(a) or _is_inverse(b)


def _is_inverse(node: Node) -> bool:
    roots = node.roots
    return bool(roots) and all(root.root is not None and root.root.inverse for root in roots)


def inverted(scene: Scene, made: Made, weights: Weights) -> None:
    """Weights are inverted by one operation: that is what they are for."""
    weighing = weights.weighing
    if not weighing.entry.attention:
        weighing.entry.attention = True
        weighing.carried = weights.carried
        scene.listener.eager(weighing, made.tensor, made.tensor)
    scene.store.cut(made.node, made.tensor, inverse=True)
