"""Contractions: a projection, a product of queries and keys, or a product of weights and values."""

from __future__ import annotations

import math

import torch

from sqrtdk.tracing.classify.additive import pairs_queries_and_keys
from sqrtdk.tracing.classify.combined import complete
from sqrtdk.tracing.classify.mixing import mix_heads
from sqrtdk.tracing.classify.scene import Made, Scene
from sqrtdk.tracing.classify.weights import axis_fault
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.events import Weighing
from sqrtdk.tracing.watch.graph import Node, Product, alias, held, origin


def contract(scene: Scene, made: Made) -> None:
    """Tell which of the three a contraction is."""
    node = made.node
    left, right = ops.CONTRACTIONS[node.op]
    a, b = node.args[left], node.args[right]
    weights = a.weights or b.weights
    if (weights is not None or a.products or b.products) and mix_heads(node, made.tensors):
        return
    if weights is not None and _meets_values(scene, made, weights.weighing, a, b):
        scene.store.cut(node, made.tensor)
    elif is_product(a, b):
        node.learned = a.learned or b.learned
        node.operands = {i: alias(x) for i, x in made.tensors.items() if i not in (left, right)}
        node.product = Product(made.tensor.dtype, _largest(scene, made))
    else:
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
    held = next((t for t in tensors.values() if store.is_node(t, weights)), None)
    assert weights.weights is not None
    carried = weights.weights.carried.settled()
    contracted = -1 if weights is a else -2
    fault = axis_fault(weights, held, contracted, weighing)
    values = next(t for t in tensors.values() if store.is_node(t, value))
    for attention in complete(weights.weights):
        attention.carried, attention.fault = carried, fault
        if carried.stages and not carried.combined and held is not None and not held.is_meta:
            attention.met = alias(held if contracted == -1 else held.mT)
        scene.listener.eager(attention, values, made.tensor)
    return True


def _largest(scene: Scene, made: Made) -> torch.Tensor | None:
    """The largest |product|, as it was stored."""
    if not scene.products or made.tensor.is_meta or not made.tensor.numel():
        return None
    low, high = torch.aminmax(made.tensor.detach())
    return torch.maximum(high, -low)


def _project(scene: Scene, made: Made, a: Node, b: Node) -> None:
    node = made.node
    if (a.products or b.products) and a.act and b.act and not (a.products and b.products):
        scene.listener.missed(node.site, "a product of activations meets values without a softmax")
    source, weight = (a, b) if a.act else (b, a)
    node.terms = 1 if len(node.shape) > 2 and a.shape[0] > 1 else 0
    node.label = origin(weight).label
    additive = (node.op == "mv" or node.shape[-1] == 1) and pairs_queries_and_keys(source)
    matrices = held(weight) // max(math.prod(weight.shape[-2:]), 1) if len(weight.shape) == 3 else 1
    scene.store.cut(node, made.tensor, source=source, width=a.shape[-1], additive=additive, matrices=matrices)
