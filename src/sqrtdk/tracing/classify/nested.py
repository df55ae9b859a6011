"""Nested tensors: without a kernel, torch makes attention of operations on whole nested batches, and these are noted.

Nodes of nested tensors have no shape. Jagged ones are not among them: what torch does with their values is seen.
"""

from __future__ import annotations

from sqrtdk.tracing.classify.dropped import dropped
from sqrtdk.tracing.classify.softmax import begin
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, alias, ancestors
from sqrtdk.tracing.watch.marks import Root
from sqrtdk.tracing.watch.recorder import Made, Scene


def note_nested(scene: Scene, made: Made, parents: list[Node]) -> None:
    """A product of q and k, a softmax, its product with values, or what carries them on."""
    node = made.node
    node.act = any(p.act for p in parents)
    node.roots = frozenset[Node]().union(*(p.roots for p in parents))
    if node.op in ops.SOFTMAX:
        begin(scene, made, made.tensors[0], int(node.args[1]))
    elif node.op in ops.VIEWS | ops.SAME:
        node.weights = parents[0].weights
        if node.weights is not None:
            drop = dropped(node)
            node.weights.weighing.dropout = node.weights.weighing.dropout or (0.0 if drop is None else drop[0])
    elif node.op == "matmul":
        weights = node.args[0].weights
        if weights is None:
            _multiplied(scene, made)
        elif not weights.weighing.entry.attention:
            weights.weighing.entry.attention = True
            scene.listener.eager(weights.weighing, made.tensors[1], made.tensor)
            node.act = True
            node.make_root(Root(), None)


def _multiplied(scene: Scene, made: Made) -> None:
    """Q and k are kept, for the softmax that may come."""
    if any(ancestor.weights is not None for ancestor in ancestors(made.node.args[0])):
        scene.listener.missed(made.node.site, "weights of nested tensors were changed before they met values")
    made.node.operands = {i: alias(tensor) for i, tensor in made.tensors.items()}
