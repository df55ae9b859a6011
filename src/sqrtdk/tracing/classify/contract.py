"""Contractions: a projection, a product of queries and keys, or a product of weights and values.

Nystroem's attention has products of weights as well, softmax(q k~) times the inverse of softmax(q~ k~) times softmax(q~
k) v, with few landmarks q~ and k~ (Xiong et al. 2021, arXiv:2102.03902): the steps to an inverse are no products of
queries and keys.
"""

from __future__ import annotations

import math
from typing import Any

from torch.autograd import forward_ad

from sqrtdk.tracing.classify.combine import holds_angles, keep_rotation
from sqrtdk.tracing.classify.mixing import complete, mix_heads
from sqrtdk.tracing.classify.online import finished, weigh
from sqrtdk.tracing.classify.pairs import list_of, pairs_queries_and_keys, reads_pairs
from sqrtdk.tracing.classify.sums import as_matrix, largest, note_weighted_sum
from sqrtdk.tracing.classify.values import axis_fault, over_their_sum
from sqrtdk.tracing.records import APART, ONE_PROJECTION
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, alias, capacity, origin
from sqrtdk.tracing.watch.marks import Multiplied, Product, Weighing
from sqrtdk.tracing.watch.recorder import Made, Scene, Unweighted

WITHOUT_SOFTMAX = "a product of activations meets values without a softmax"


def contract(scene: Scene, made: Made) -> None:
    """Tell which of the three a contraction is."""
    node = made.node
    left, right = ops.CONTRACTIONS[node.op]
    a, b = node.args[left], node.args[right]
    weights = a.weights or b.weights
    if (weights is not None or a.products or b.products) and mix_heads(node, made.tensors):
        return
    inverses = [_is_inverse(x) for x in (a, b)]
    squared = a.weights is not None and a.weighing is b.weighing
    inverts = squared or (any(inverses) and all(i or x.weights for i, x in zip(inverses, (a, b), strict=True)))
    if weights is not None and _meets_values(scene, made, weights.weighing, a, b):
        _name_apart(weights.weighing, b if a.weights is weights else a)
        scene.store.cut(node, made.tensor, inverse=inverts, pooled=weights.weighing.entry)
        finished(scene, made, weights.weighing)
    elif any(inverses):
        scene.store.cut(node, made.tensor, inverse=inverts)
    elif is_product(a, b) and not _is_adapted_weight(node.op, b):
        node.learned = a.learned or b.learned
        node.operands = {i: alias(x) for i, x in made.tensors.items() if i not in (left, right)}
        product = Product(made.tensor.dtype, largest(scene, made))
        if node.op == "mv":
            as_matrix(node, product)
        else:
            node.product = product
    elif not weigh(scene, made, a, b):
        _project(scene, made, a, b)


def is_product(a: Node, b: Node) -> bool:
    """Whether a contraction is a product of queries and keys, and not a projection or a value product."""
    if a.products or b.products or a.weights is not None or b.weights is not None:
        return False
    if holds_angles(a) or holds_angles(b):
        return False  # a rotation by a table of matrices
    return a.act and b.act  # a raw parameter against activations is a projection, whatever it stands for


def squares_rows(node: Node) -> bool:
    """Whether it multiplies each row with itself, (N, 1, E) by (N, E, 1), as einsum("nd,nd->n", x, x) does."""
    if node.op != "bmm":
        return False
    a, b = (arg for arg in node.args if isinstance(arg, Node))
    whole = math.prod(a.shape) == math.prod(b.shape) == math.prod(origin(a).shape)  # and not two pieces of one tensor
    return a.act and whole and origin(a) is origin(b) and a.shape[-2] == b.shape[-1] == 1 < a.shape[0]


def _is_inverse(node: Node) -> bool:
    """Whether it is an inverse of weights, or a step to one."""
    return bool(node.roots) and all(root.root is not None and root.root.inverse for root in node.roots)


def _is_adapted_weight(op: str, right: Node) -> bool:
    """Whether the right operand is a weight with a product of parameters added: W + s B A (Hu et al. 2021)."""
    weight = origin(right)
    if op not in ("mm", "addmm") or not weight.learned or weight.op not in ("add", "sub"):
        return False
    raw = [parent for parent in weight.parents() if origin(parent).op == "parameter" and parent.shape == weight.shape]
    return len(raw) == 1 and all(parent.learned for parent in weight.parents() if parent is not raw[0])


def _meets_values(scene: Scene, made: Made, weighing: Weighing, a: Node, b: Node) -> bool:
    """Whether weights meet values, for the first time; who listens is told."""
    weights, value = (a, b) if a.weighing is weighing else (b, a)
    if weighing.entry.attention or not value.act or value.products:
        return False
    store, tensors = scene.store, made.tensors
    numbers = next((t for t in tensors.values() if store.is_node(t, weights)), None)
    assert weights.weights is not None
    contracted = -1 if weights is a else -2
    carried = over_their_sum(weights.weights.carried.settled(), numbers, contracted)
    fault = axis_fault(weights, numbers, contracted, weighing)
    values = next(t for t in tensors.values() if store.is_node(t, value))
    for attention in complete(weights.weights):
        attention.carried, attention.fault = carried, fault
        met = None if numbers is None else alias(numbers if contracted == -1 else numbers.mT)
        if scene.keep:
            attention.used = met
        if carried.stages and not carried.combined and met is not None and not met.is_meta:
            attention.met = met
        scene.listener.eager(attention, values, made.tensor)
    return True


def _name_apart(weighing: Weighing, value: Node) -> None:
    """Name the softmaxes of q and of k apart, without a product of the two (Shen et al. 2018, arXiv:1812.01243).

    The weights of the second meet what those of the first made of values; a second pooling of what a first one gave is
    none: its logits come from there.
    """
    start, entry = origin(value), weighing.entry
    first = None if start.root is None else start.root.pooled
    if first is None or first is entry or not {first.reason, entry.reason} <= {ONE_PROJECTION, APART}:
        return
    if not any(start.serial in root.root.lineage for root in weighing.node.roots if root.root is not None):
        first.reason = entry.reason = APART


def _is_tangent(scene: Scene, site: str) -> bool:
    """Whether derivatives are computed forwards, beside an attention that was read."""
    return forward_ad._current_level >= 0 and any(e.attention and e.site == site for e in scene.entries)


def _multiplied(made: Made, a: Node, source: Node) -> Multiplied | None:
    """The operands of a projection of rows, a matrix times a matrix; a batch of one (by einsum) is one matrix."""
    left, right = ops.CONTRACTIONS[made.node.op]
    one, two = (
        tensor[0] if tensor is not None and tensor.dim() == 3 and len(tensor) == 1 else tensor
        for tensor in (made.tensors.get(left), made.tensors.get(right))
    )
    if one is None or two is None or one.dim() != 2 or two.dim() != 2 or source is not a:
        return None
    return Multiplied(alias(one), alias(two), made.tensors.get(0) if made.node.op == "addmm" else None)


def _project(scene: Scene, made: Made, a: Node, b: Node) -> None:
    node = made.node
    unsoftened = (a.products or b.products) and a.act and b.act and not (a.products and b.products)
    if unsoftened and not _is_tangent(scene, node.site):
        logits = a if a.products else b
        numbers = next(t for i, t in made.tensors.items() if node.args[i] is logits)
        scene.listener.unsoftened(node.site, Unweighted(logits, alias(numbers)))
    source, weight = (a, b) if a.act and not (b.act and holds_angles(a)) else (b, a)
    node.terms = 1 if len(node.shape) > 2 and a.shape[0] > 1 else 0
    node.label = origin(weight).label
    narrow = node.op == "mv" or node.shape[-1] == 1
    if narrow and not weight.act:
        note_weighted_sum(scene, made, source, weight)
    values = next((t for i, t in made.tensors.items() if node.args[i] is weight), None)
    facts: dict[str, Any] = {
        "additive": narrow and pairs_queries_and_keys(source),
        "matrices": capacity(weight) // max(math.prod(weight.shape[-2:]), 1) if len(weight.shape) == 3 else 1,
        "paired": reads_pairs(source),
        "part": origin(weight) in scene.store.parts,
        "gathered_by": list_of(source),
    }
    if scene.keep:
        facts["multiplied"] = _multiplied(made, a, source)
    scene.store.cut(node, made.tensor, source=source, width=a.shape[-1], **facts)
    if values is not None and not (source.products or source.weights):
        keep_rotation(node, source, weight, values)
