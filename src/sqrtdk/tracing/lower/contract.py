"""Classifies contractions: a projection, a product of queries and keys, or a product of weights and values.

A value product may also be a multiplication and a sum over the keys, or over the edges of a node. This module checks
that the value product sums over the axis of the softmax.

Nystroem attention multiplies weights as well: softmax(q k~) inv(softmax(q~ k~)) softmax(q~ k) v, with few landmarks
q~ and k~ (Xiong et al. 2021, arXiv:2102.03902). The steps to the inverse are not products of queries and keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sqrtdk.tracing.lower.finished import mark_finished
from sqrtdk.tracing.lower.mixing import axes_along, complete_softmaxes, mix_heads
from sqrtdk.tracing.lower.online import weigh_values
from sqrtdk.tracing.lower.pairs import is_additive, is_of_all_pairs, list_serial, pairs_queries_and_keys, reads_pairs
from sqrtdk.tracing.lower.softmax import INDEX_ARGUMENT, group_fault
from sqrtdk.tracing.lower.sums import as_matrix, largest_product, note_weighted_sum
from sqrtdk.tracing.lower.vectors import holds_angles, keep_rotation
from sqrtdk.tracing.lower.weights import WHOLE_ROW_TOLERANCE
from sqrtdk.tracing.records import CallFault
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import alias, capacity, replay_all
from sqrtdk.tracing.tape.node import Multiplied, Node, Product, SoftmaxRun, WeightSteps, back, origin
from sqrtdk.tracing.tape.recorder import RecordedOutput, Scene, Unweighted

_PARTIAL = 5e-2  # the sum over an axis other than the softmax's differs from 1 by more than this in some row


def contract(scene: Scene, made: RecordedOutput) -> None:
    """Set the role of a contraction's output: a projection, a product of queries and keys, or of weights and values.

    Args:
        scene: state of the trace.
        made: the output, whose node is changed.
    """
    node = made.node
    left, right = ops.CONTRACTIONS[node.op]
    a, b = node.args[left], node.args[right]
    _settle_matrices(scene, a, b)
    weights = a.weights or b.weights
    if (weights is not None or a.products or b.products) and mix_heads(node, made.tensors):
        return
    inverses = [_is_inverse(x) for x in (a, b)]
    # Nystroem's iteration starts with w @ w.mT of one softmax and goes on with products of its results and w.
    squared = a.weights is not None and a.softmax_run is b.softmax_run
    inverts = squared or (any(inverses) and all(i or x.weights for i, x in zip(inverses, (a, b), strict=True)))
    if weights is not None and _meets_values(scene, made, weights.softmax_run, a, b):
        _name_apart(weights.softmax_run, b if a.weights is weights else a)
        scene.store.cut(node, made.tensor, inverse=inverts, pooled=weights.softmax_run.entry)
        mark_finished(scene, made, weights.softmax_run)
    elif any(inverses):
        scene.store.cut(node, made.tensor, inverse=inverts)
    elif is_product(a, b) and not _is_adapted_weight(node.op, b):
        node.learned = a.learned or b.learned
        node.operands = {i: alias(x) for i, x in made.tensors.items() if i not in (left, right)}
        product = Product(made.tensor.dtype, largest_product(scene, made))
        if node.op == "mv":
            as_matrix(node, product)
        else:
            node.product = product
    elif not weigh_values(scene, made, a, b):
        _project(scene, made, a, b)


def _settle_matrices(scene: Scene, a: Node, b: Node) -> None:
    """Revokes a product with a square matrix from outside the model once it multiplies q or k.

    In `(q @ M) @ k.mT` the first product is a step on q, and the second is the product of queries and keys.
    """
    for side, other in ((a, b), (b, a)):
        if len(side.products) != 1 or not other.act:
            continue
        (product,) = side.products
        for i, arg in enumerate(product.args) if product.product is not None else ():
            matrix = origin(arg) if isinstance(arg, Node) else product
            square = matrix.op == "input" and len(matrix.shape) < 4 and matrix.shape[-1] == matrix.shape[-2]
            if square and matrix not in scene.store.projected and matrix.value is not None:
                value = replay_all(list(back(arg))[-2::-1], matrix.value)
                product.args = tuple(Node("constant", arg.shape) if j == i else x for j, x in enumerate(product.args))
                product.operands[i], product.product = value, None
        if product.product is None:
            start = next(arg for arg in product.parents() if arg.act)
            for node in back(side, ops.PASSING | {"mul", "div"}):
                node.products, node.roots = frozenset(), start.roots
                if node is product:
                    break


def is_product(a: Node, b: Node) -> bool:
    """Return whether a contraction of `a` and `b` is a product of queries and keys.

    It is one if both descend from activations, and neither carries logits or weights, nor holds only cosines and sines.
    """
    if a.products or b.products or a.weights is not None or b.weights is not None:
        return False
    if holds_angles(a) or holds_angles(b):
        return False  # a rotation by a table of matrices
    if is_of_all_pairs(a) or is_of_all_pairs(b):
        return False  # (q - k) @ M: q and k have met already
    return a.act and b.act  # a raw parameter times activations is a projection, even if it holds learned queries


def squares_rows(node: Node) -> bool:
    """Return whether the node multiplies each row with itself, as einsum("nd,nd->n", x, x) does.

    It is a batched product of (N, 1, E) and (N, E, 1), both from one tensor.
    """
    if node.op != "bmm":
        return False
    a, b = (arg for arg in node.args if isinstance(arg, Node))
    whole = math.prod(a.shape) == math.prod(b.shape) == math.prod(origin(a).shape)  # else q and k cut from one tensor
    return a.act and whole and origin(a) is origin(b) and a.shape[-2] == b.shape[-1] == 1 < a.shape[0]


def _is_inverse(node: Node) -> bool:
    """Whether the node is an inverse of weights, or a step to one."""
    return bool(node.roots) and all(root.root is not None and root.root.inverse for root in node.roots)


def _is_adapted_weight(op: str, right: Node) -> bool:
    """Whether the right operand is a weight with a product of parameters added: W + s B A (Hu et al. 2021)."""
    weight = origin(right)
    if op not in ("mm", "addmm") or not weight.learned or weight.op not in ("add", "sub"):
        return False
    raw = [parent for parent in weight.parents() if origin(parent).op == "parameter" and parent.shape == weight.shape]
    return len(raw) == 1 and all(parent.learned for parent in weight.parents() if parent is not raw[0])


def _meets_values(scene: Scene, made: RecordedOutput, softmax_run: SoftmaxRun, a: Node, b: Node) -> bool:
    """Whether weights multiply values for the first time; the listener is then called."""
    weights, value = (a, b) if a.softmax_run is softmax_run else (b, a)
    if softmax_run.entry.attention or not value.act or value.products:
        return False
    store, tensors = scene.store, made.tensors
    numbers = next((t for t in tensors.values() if store.is_node(t, weights)), None)
    assert weights.weights is not None
    contracted = -1 if weights is a else -2
    weight_steps = over_their_sum(weights.weights.weight_steps.settled(), numbers, contracted)
    fault = axis_fault(weights, numbers, contracted, softmax_run)
    values = next(t for t in tensors.values() if store.is_node(t, value))
    for attention in complete_softmaxes(weights.weights):
        attention.weight_steps, attention.fault = weight_steps, fault
        attention.values_first = contracted == -2 and values.dim() > 1
        met = None if numbers is None else alias(numbers if contracted == -1 else numbers.mT)
        if scene.keep:
            attention.used = met
        if weight_steps.stages and not weight_steps.combined and met is not None and not met.is_meta:
            attention.met = met
        scene.listener.eager(attention, values, made.tensor)
    return True


def _name_apart(softmax_run: SoftmaxRun, value: Node) -> None:
    """Marks two softmaxes, of q and of k apart, softmax(q) @ (softmax(k).mT @ v) (Shen et al. 2018, arXiv:1812.01243).

    The second softmax's weights multiply the first one's output. A second pooling of a first pooling's output does so
    too, but its logits come from that output, which excludes it here.
    """
    start, entry = origin(value), softmax_run.entry
    first = None if start.root is None else start.root.pooled
    if first is None or first is entry or not {first.code, entry.code} <= {"one_projection", "apart"}:
        return
    if not any(start.serial in root.root.lineage for root in softmax_run.node.roots if root.root is not None):
        first.code = entry.code = "apart"


def _is_tangent(scene: Scene, site: str) -> bool:
    """Whether forward-mode AD runs here and the site's attention is already read: this product is its derivative."""
    return forward_ad._current_level >= 0 and any(e.attention and e.site == site for e in scene.entries)


def _multiplied(made: RecordedOutput, a: Node, source: Node) -> Multiplied | None:
    """Return the operands of a projection that is a matrix product, or None; einsum's batch of one is unwrapped."""
    left, right = ops.CONTRACTIONS[made.node.op]
    one, two = (
        tensor[0] if tensor is not None and tensor.dim() == 3 and len(tensor) == 1 else tensor
        for tensor in (made.tensors.get(left), made.tensors.get(right))
    )
    if one is None or two is None or one.dim() != 2 or two.dim() != 2 or source is not a:
        return None
    return Multiplied(alias(one), alias(two), made.tensors.get(0) if made.node.op == "addmm" else None)


def _project(scene: Scene, made: RecordedOutput, a: Node, b: Node) -> None:
    node = made.node
    unsoftened = (a.products or b.products) and a.act and b.act and not (a.products and b.products)
    if unsoftened and not _is_tangent(scene, node.site):
        logits = a if a.products else b
        numbers = next(t for i, t in made.tensors.items() if node.args[i] is logits)
        scene.listener.unsoftened(node.site, Unweighted(logits, alias(numbers), -1 if logits is a else -2))
    source, weight = (a, b) if a.act and not (b.act and holds_angles(a)) else (b, a)
    node.terms = 1 if len(node.shape) > 2 and a.shape[0] > 1 else 0
    node.label = origin(weight).label
    narrow = node.op == "mv" or node.shape[-1] == 1  # nn.Linear(d, 1)(tanh(q + k)): one number per pair
    if narrow and not weight.act:
        note_weighted_sum(scene, made, source, weight)
    values = next((t for i, t in made.tensors.items() if node.args[i] is weight), None)
    facts: dict[str, Any] = {
        "additive": narrow and pairs_queries_and_keys(source),
        "matrices": capacity(weight) // max(math.prod(weight.shape[-2:]), 1) if len(weight.shape) == 3 else 1,
        "paired": reads_pairs(source),
        "part": origin(weight) in scene.store.parts,
        "features": -2 if weight is a and node.op != "mv" else -1,
        "gathered_by": list_serial(source),
    }
    if scene.keep:
        facts["multiplied"] = _multiplied(made, a, source)
    scene.store.cut(node, made.tensor, source=source, width=a.shape[-1], **facts)
    if values is not None and not (source.products or source.weights):
        keep_rotation(node, source, weight, values)


# -- weights meet values -----------------------------------------------------------------------------------------------


def is_scored(logits: Node) -> bool:
    """Return whether logits are scores of queries and keys, by a product or an additive score.

    The logits of a router or a pooling are not.
    """
    return bool(logits.products) or is_additive(logits)


def sum_values(scene: Scene, made: RecordedOutput, weighted: Node) -> None:
    """End weights that were multiplied with values by broadcasting, at the sum over the keys or over edges.

    The first such sum of a softmax makes it an attention, which goes to the listener.

    Args:
        scene: state of the trace.
        made: the sum.
        weighted: the node of the weighted values that are summed.
    """
    weights = weighted.weights
    assert weights is not None
    softmax_run, values = weights.softmax_run, weights.values
    if not softmax_run.entry.attention and values is not None:
        source, dims = weighted.args[0], len(weighted.shape)
        softmax_run.entry.attention = True
        softmax_run.weight_steps = weights.weight_steps
        if softmax_run.edges is not None:
            softmax_run.fault = group_fault(softmax_run, made.tensors.get(INDEX_ARGUMENT))
        else:
            over = made.node.args[1] if len(made.node.args) > 1 and made.node.args[1] else range(dims)
            softmax_run.fault = _sum_fault(source, {axis % dims - dims for axis in over}, softmax_run)
            values = _features_last(values, source)
        scene.listener.eager(softmax_run, values, made.tensor)
    scene.store.cut(made.node, made.tensor)


def _features_last(values: Tensor, weights: Node) -> Tensor:
    """Return the values with their feature axis last: the axis that the weights lack."""
    for axis in range(-1, -1 - values.dim(), -1):
        if values.shape[axis] > 1 and (-axis > len(weights.shape) or weights.shape[axis] == 1):
            return values.movedim(axis, -1)
    return values


def over_their_sum(weight_steps: WeightSteps, tensor: Tensor | None, contracted: int) -> WeightSteps:
    """Return the steps on weights, with a division by the sum over the value product's axis as a normalisation.

    In slot attention the softmax runs over the slots, which compete for each input. The weights of a slot are then
    divided by their sum over the inputs (Locatello et al. 2020, section 2.1).

    Args:
        weight_steps: the steps on the weights.
        tensor: the weights' numbers at the value product; None if they are unknown.
        contracted: the axis of `tensor` that the product sums over, -1 or -2.
    """
    if not weight_steps.has("other_sum") or tensor is None or tensor.is_meta or not tensor.numel():
        return weight_steps
    sums = tensor.detach().to(torch.float32).sum(contracted)
    if not bool(((sums - 1).abs() < WHOLE_ROW_TOLERANCE).all()):
        return weight_steps
    return weight_steps.without("other_sum").over_sum()


def axis_fault(weights: Node, tensor: Tensor | None, contracted: int, softmax_run: SoftmaxRun) -> CallFault | None:
    """Return the fault if the value product does not sum over the softmax's axis, else None.

    Rows of a matrix that sum to 1 are right. If they do not (dropout, masks), the views since the softmax decide.

    Args:
        weights: the weights' node, an operand of the product.
        tensor: the weights' numbers; None if they are unknown.
        contracted: the axis of `tensor` that the product sums over, -1 or -2.
        softmax_run: the softmax.
    """
    if len(weights.shape) < 2 or softmax_run.edges is not None:
        return None
    other = -3 - contracted
    if tensor is not None and not tensor.is_meta and tensor.numel():
        matrix = tensor.detach().reshape(-1, *tensor.shape[-2:])[0].to(torch.float32)
        over, across = ((matrix.sum(axis) - 1).abs() for axis in (contracted, other))
        if bool((over < WHOLE_ROW_TOLERANCE).all()):
            return None
        if min(tensor.shape[-2:]) > 1 and bool((across < WHOLE_ROW_TOLERANCE).all()) and bool((over > _PARTIAL).any()):
            return "over_queries"
    axes = _axes(weights, softmax_run)
    if not axes or contracted in axes:
        return None
    return "over_queries" if axes == {other} else "other_axis"


def _sum_fault(weights: Node, summed: set[int], softmax_run: SoftmaxRun) -> CallFault | None:
    """Return the same for weights and values that are multiplied by broadcasting and then summed.

    Args:
        weights: the weights' node, an operand of the multiplication.
        summed: the axes of its result that the sum is over, negative.
        softmax_run: the softmax.
    """
    axes = _axes(weights, softmax_run)
    if not axes or axes & summed:
        return None
    beside = {axis for axis in summed if -axis <= len(weights.shape) and weights.shape[axis] > 1}
    return "over_queries" if any(abs(a - b) == 1 for a in axes for b in beside) else "other_axis"


def _axes(weights: Node, softmax_run: SoftmaxRun) -> set[int]:
    """Return the axes of `weights` (negative) that hold the softmax's axis; empty if it can't be followed."""
    way: list[Node] = []
    dims, shape = len(weights.shape), softmax_run.entry.shape
    while weights.args:
        parent = weights.args[0]
        if not isinstance(parent, Node) or parent.softmax_run is not softmax_run:
            return set()
        if weights.op in ops.VIEWS:
            way.insert(0, weights)
        elif weights.op not in ops.CASTS_AND_COPIES and weights.shape != parent.shape:
            return set()
        weights = parent
    if weights.shape != shape:
        return set()
    line = torch.arange(shape[softmax_run.dim]) > 0
    place = line.view([-1 if d == softmax_run.dim % len(shape) else 1 for d in range(len(shape))]).expand(shape)
    return {axis - dims for axis in axes_along(place, way) or ()}
