"""Everything elementwise, views and rearrangements included: steps on the way of logits, of weights, of q and k."""

from __future__ import annotations

from dataclasses import replace

from sqrtdk.tracing.classify.normalise import normalise
from sqrtdk.tracing.classify.scene import Made, Scene
from sqrtdk.tracing.classify.softmax import by_hand
from sqrtdk.tracing.classify.weights import carry, dropout
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, Weights, alias

_KEPT = frozenset({"exp", "exp2", "_log_softmax"})  # whose own input is needed when they turn out to be a softmax


def combine(scene: Scene, made: Made, parents: list[Node]) -> None:
    """Tell what a node carries on of what it was made from: logits, weights, or q, k and v."""
    node = made.node
    if node.op in ops.CACHE_WRITES and _written_to_cache(node):
        return
    active = [p for p in parents if p.act]
    node.products = frozenset[Node]().union(*(p.products for p in active))
    if node.products:
        if not by_hand(scene, made):
            _carry_logits(made)
    elif any(p.weights is not None for p in active):
        _carry_weights(scene, made, active)
    else:
        _carry_vectors(scene, made, active)


def _written_to_cache(node: Node) -> bool:
    """New keys go into a tensor of zeros or of earlier keys: the lineage is that of the new ones."""
    position = ops.CACHE_WRITES[node.op]
    new = node.args[position] if position < len(node.args) else None
    if not isinstance(new, Node) or not new.act or any(p.products or p.weights for p in node.parents()):
        return False
    node.args = (new,)
    node.roots, node.terms = new.roots, new.terms
    return True


def _carry_logits(made: Made) -> None:
    node = made.node
    main = node.main()
    kept = node.op in _KEPT
    node.operands = {i: alias(t) for i, t in made.tensors.items() if kept or node.args[i] is not main}


def _carry_weights(scene: Scene, made: Made, active: list[Node]) -> None:
    """Weights pass through casts, dropout and head masks; a broadcast product with values, summed, is a use."""
    node, tensors = made.node, made.tensors
    source = next(p for p in active if p.weights is not None)
    before = source.weights
    assert before is not None
    weighing = before.weighing
    others = [p for p in active if p.weighing is not weighing]
    if _sums(node) and node.shape[-1:] == (1,) and active[0].shape[-1:] != (1,):
        node.size = "sum"
    elif len(active) == 1:
        node.size = active[0].size
    carried = before.carried if others else carry(node, made.tensor, tensors, source, weighing)
    node.weights = Weights(weighing, carried)
    weighing.dropout = weighing.dropout or dropout(node)
    if node.op == "mul" and others and weighing.node.products and node.shape != weighing.entry.shape:
        values = next((t for i, t in tensors.items() if node.args[i] in others), None)
        node.weights = replace(node.weights, weighted=True, values=None if values is None else alias(values))
    elif node.op == "sum" and active[0].weights is not None and active[0].weights.weighted:
        values = active[0].weights.values
        if not weighing.entry.attention and values is not None:
            weighing.entry.attention = True
            weighing.carried = carried
            scene.listener.eager(weighing, values, made.tensor)
        scene.store.cut(node, made.tensor)
        return
    elif others:
        scene.store.cut(node, made.tensor)
        return
    if node.op in ops.VIEWS:
        node.operands = {i: alias(t) for i, t in tensors.items() if node.args[i] is not source}
    else:
        node.args = (source,)


def _sums(weights: Node) -> bool:
    """Whether weights are summed; `F.normalize(weights, p=1)` does it by their norm."""
    return weights.op == "sum" or (weights.op == "linalg_vector_norm" and weights.number(1) == 1)


def _carry_vectors(scene: Scene, made: Made, active: list[Node]) -> None:
    """Q, k or v on their way; a sum of two branches begins a new lineage."""
    node = made.node
    if len({p.roots for p in active}) > 1 and node.op not in ("cat", "stack"):
        node.terms = sum(p.terms for p in active)
        scene.store.cut(node, made.tensor)
        return
    node.roots = frozenset[Node]().union(*(p.roots for p in active))
    node.terms = max((p.terms for p in active), default=0)
    node.operands = {i: alias(t) for i, t in made.tensors.items() if not node.args[i].act}
    normalise(node, active)
    if node.norm:
        scene.store.keep(node, made.tensor)
