"""Contractions: a projection, a product of queries and keys, or a product of weights and values."""

from __future__ import annotations

from torch.autograd import forward_ad

from sqrtdk.tracing.classify import apart, landmarks
from sqrtdk.tracing.classify.adapted import is_adapted_weight
from sqrtdk.tracing.classify.additive import pairs_queries_and_keys, reads_pairs
from sqrtdk.tracing.classify.branches import holds_angles, keep_rotation
from sqrtdk.tracing.classify.edge_scores import reads_edges
from sqrtdk.tracing.classify.gathered import rows_of
from sqrtdk.tracing.classify.scene import Made, Scene
from sqrtdk.tracing.classify.sums import as_matrix, largest, note_weighted_sum
from sqrtdk.tracing.classify.weights import axis_fault
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.events import Unweighted, Weighing
from sqrtdk.tracing.watch.graph import Node, Product, Weights, alias, origin

WITHOUT_SOFTMAX = "a product of activations meets values without a softmax"


def contract(scene: Scene, made: Made) -> None:
    """Tell which of the three a contraction is."""
    node = made.node
    left, right = ops.CONTRACTIONS[node.op]
    a, b = node.args[left], node.args[right]
    weights = a.weights or b.weights
    inverts = landmarks.inverts(a, b)
    if weights is not None and _meets_values(scene, made, weights.weighing, a, b):
        apart.name(weights.weighing, b if a.weights is weights else a)
        scene.store.cut(node, made.tensor, inverse=inverts, pooled=weights.weighing.entry)
    elif landmarks.uses_inverse(a, b):
        scene.store.cut(node, made.tensor, inverse=inverts)
    elif _mixes_heads(node.op, a, b):
        if weights is not None:
            node.weights = Weights(weights.weighing, weights.carried)
        node.products = a.products | b.products
    elif is_product(a, b) and not is_adapted_weight(node.op, b):
        node.learned = a.learned or b.learned
        node.operands = {i: alias(x) for i, x in made.tensors.items() if i not in (left, right)}
        product = Product(made.tensor.dtype, largest(scene, made))
        if node.op == "mv":
            as_matrix(node, product)
        else:
            node.product = product
    else:
        _project(scene, made, a, b)


def is_product(a: Node, b: Node) -> bool:
    """Whether a contraction is a product of queries and keys, and not a projection or a value product."""
    if a.products or b.products or a.weights is not None or b.weights is not None:
        return False
    if holds_angles(a) or holds_angles(b):
        return False  # a rotation by a table of matrices
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


def _mixes_heads(op: str, a: Node, b: Node) -> bool:
    """Logits or weights times a learned square matrix over the heads, as einsum writes it (talking heads)."""
    for matrix, other in ((a, b), (b, a)):
        if op == "bmm" and not matrix.act and (other.products or other.weights is not None):
            return matrix.shape[0] == 1 and matrix.shape[1] == matrix.shape[2] <= 256
    return False


def _is_tangent(scene: Scene, site: str) -> bool:
    """Whether derivatives are computed forwards, beside an attention that was read."""
    return forward_ad._current_level >= 0 and any(e.attention and e.site == site for e in scene.entries)


def _project(scene: Scene, made: Made, a: Node, b: Node) -> None:
    node = made.node
    unsoftened = (a.products or b.products) and a.act and b.act and not (a.products and b.products)
    if unsoftened and not _is_tangent(scene, node.site):
        logits = a if a.products else b
        held = next(t for i, t in made.tensors.items() if node.args[i] is logits)
        scene.listener.unsoftened(node.site, Unweighted(logits, alias(held)))
    source, weight = (a, b) if a.act and not (b.act and holds_angles(a)) else (b, a)
    node.terms = 1 if len(node.shape) > 2 and a.shape[0] > 1 else 0
    node.label = origin(weight).label
    narrow = node.op == "mv" or node.shape[-1] == 1
    additive = narrow and pairs_queries_and_keys(source)
    if narrow and not weight.act:
        note_weighted_sum(scene, made, source, weight)
    values = next((t for i, t in made.tensors.items() if node.args[i] is weight), None)
    facts = {"additive": additive, "pairs": reads_pairs(source), "meets": reads_edges(source), "rows": rows_of(source)}
    scene.store.cut(node, made.tensor, source=source, width=a.shape[-1], **facts)
    if values is not None and not (source.products or source.weights):
        keep_rotation(node, source, weight, values)
