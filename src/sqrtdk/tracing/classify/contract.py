"""Contractions: a projection, a product of queries and keys, or a product of weights and values."""

from __future__ import annotations

import torch

from sqrtdk.tracing.classify.additive import pairs_queries_and_keys
from sqrtdk.tracing.classify.online import finished, weigh
from sqrtdk.tracing.classify.scene import Made, Scene
from sqrtdk.tracing.classify.weights import axis_fault
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.events import Weighing
from sqrtdk.tracing.watch.graph import Node, Product, Weights, alias, origin


def contract(scene: Scene, made: Made) -> None:
    """Tell which of the three a contraction is."""
    node = made.node
    left, right = ops.CONTRACTIONS[node.op]
    a, b = node.args[left], node.args[right]
    weights = a.weights or b.weights
    if weights is not None and _meets_values(scene, made, weights.weighing, a, b):
        scene.store.cut(node, made.tensor)
        finished(scene, made, weights.weighing)
    elif _mixes_heads(node.op, a, b):
        if weights is not None:
            node.weights = Weights(weights.weighing, weights.carried)
        node.products = a.products | b.products
    elif is_product(a, b):
        node.learned = a.learned or b.learned
        node.operands = {i: alias(x) for i, x in made.tensors.items() if i not in (left, right)}
        node.product = Product(made.tensor.dtype, _largest(scene, made))
    elif not weigh(scene, made, a, b):
        _project(scene, made, a, b)


def is_product(a: Node, b: Node) -> bool:
    """Whether a contraction is a product of queries and keys, and not a projection or a value product."""
    if a.products or b.products or a.weights is not None or b.weights is not None:
        return False
    return a.act and b.act  # a raw parameter against activations is a projection, whatever it stands for


def _meets_values(scene: Scene, made: Made, weighing: Weighing, a: Node, b: Node) -> bool:
    """Whether weights meet values, for the first time; who listens is told."""
    weights, value = (a, b) if a.weighing is weighing else (b, a)
    if weighing.entry.attention or not value.act or value.products:
        return False
    store, tensors = scene.store, made.tensors
    weighing.entry.attention = True
    held = next((t for t in tensors.values() if store.is_node(t, weights)), None)
    assert weights.weights is not None
    weighing.carried = weights.weights.carried
    weighing.fault = axis_fault(weights, held, -1 if weights is a else -2, weighing)
    position = next(i for i, t in tensors.items() if store.is_node(t, value))
    scene.listener.eager(weighing, tensors[position], made.tensor)
    return True


def _largest(scene: Scene, made: Made) -> torch.Tensor | None:
    """The largest |product|, as it was stored."""
    if not scene.products or made.tensor.is_meta or not made.tensor.numel():
        return None
    low, high = torch.aminmax(made.tensor.detach())
    return torch.maximum(high, -low)


def _mixes_heads(op: str, a: Node, b: Node) -> bool:
    """Logits or weights times a learned square matrix over the heads, as einsum writes it (talking heads)."""
    for matrix, other in ((a, b), (b, a)):
        if op == "bmm" and not matrix.act and (other.products or other.weights is not None):
            return matrix.shape[0] == 1 and matrix.shape[1] == matrix.shape[2] <= 256
    return False


def _project(scene: Scene, made: Made, a: Node, b: Node) -> None:
    node = made.node
    if (a.products or b.products) and a.act and b.act and not (a.products and b.products):
        scene.listener.missed(node.site, "a product of activations meets values without a softmax")
    source, weight = (a, b) if a.act else (b, a)
    node.terms = 1 if len(node.shape) > 2 and a.shape[0] > 1 else 0
    node.label = origin(weight).label
    additive = (node.op == "mv" or node.shape[-1] == 1) and pairs_queries_and_keys(source)
    scene.store.cut(node, made.tensor, source=source, width=a.shape[-1], additive=additive)
