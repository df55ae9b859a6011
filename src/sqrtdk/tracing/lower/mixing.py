"""Reads talking heads: logits or weights mixed over the heads by a matrix (Shazeer et al. 2020, arXiv:2003.02436).

The matrix is a linear layer, an einsum, a matrix product or a 1x1 convolution. Weights may also be averaged over the
heads, or normalised over them (DeepViT's re-attention, arXiv:2103.11886). Weights of several softmaxes may be combined
before the value product: ConViT (d'Ascoli et al. 2021, arXiv:2103.10697) adds positions to content, and the
Differential Transformer (Ye et al. 2024, arXiv:2410.05258) subtracts one softmax from another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.steps.placed import to_softmax
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import alias, distinct
from sqrtdk.tracing.tape.node import Node, SoftmaxEntry, SoftmaxRun, Weights, WeightSteps, back, origin

OVER_HEADS = "over the heads"
HEADS_BY_DATA = "trace.step.heads_by_data"
CONVOLUTIONS = frozenset({"convolution", "_convolution"})
_LARGEST_HEAD_MATRIX = 256  # a square matrix up to this size is taken to mix heads if the axes can't be followed
_NORM_KINDS = {**ops.NORM_OPERATIONS, **dict.fromkeys(ops.AFFINE, "batch")}
_SUMS_AND_MEANS = frozenset({"mean", "sum"})
_COMBINED = {
    "add": "trace.combined.added",
    "sub": "trace.combined.subtracted",
    "rsub": "trace.combined.subtracted",
    "mul": "trace.combined.multiplied",
    "lerp": "trace.combined.averaged",
    "where": "trace.combined.replaced",
    "cat": "trace.combined.beside",
    "stack": "trace.combined.beside",
}
_SLICES = frozenset(
    {"select", "slice", "split", "split_with_sizes", "chunk", "unbind", "narrow", "index", "index_select"}
)
_SIDE_BY_SIDE = frozenset({"cat", "stack"})


def mix_heads(node: Node, tensors: dict[int, Tensor]) -> bool:
    """Return whether a contraction or a convolution mixes the heads of logits or weights.

    If it does, its node is filled in: with the products of the logits, and with the steps on the weights.

    Args:
        node: node of the result.
        tensors: the operands by position.
    """
    operands = mixing_operands(node)
    if operands is None:
        return False
    other, matrix = (node.args[i] for i in operands)
    node.products = other.products
    node.operands = {i: alias(x) for i, x in tensors.items() if node.args[i] is not other}
    if other.weights is not None:
        before = other.weights.weight_steps
        weight_steps = (
            before.changed(Message(HEADS_BY_DATA)) if mixed_by_data(matrix) else before.then("mix", OVER_HEADS)
        )
        node.weights = replace(other.weights, weight_steps=weight_steps)
        node.args = (other,)
    return True


def mixing_operands(node: Node) -> tuple[int, int] | None:
    """Return the positions of the operands of a contraction or convolution that mixes heads.

    Returns:
        (position of the logits or weights, position of the matrix that mixes them); None if it mixes no heads.
    """
    if node.op in CONVOLUTIONS:
        return (0, 1) if _carries(node.args[0]) and _leaves_pairs(node) else None
    left, right = ops.CONTRACTIONS[node.op]
    for mixed, matrix, contracted in ((left, right, -1), (right, left, -2)):
        other, by = node.args[mixed], node.args[matrix]
        if _carries(other) and not _carries(by) and _over_heads(other, by, contracted):
            return mixed, matrix
    return None


def _carries(node: Node) -> bool:
    return bool(node.products or node.weights)


def _over_heads(mixed: Node, matrix: Node, contracted: int) -> bool:
    """Whether a product with `matrix` sums over an axis of logits or weights that holds neither queries nor keys."""
    if len(mixed.shape) < 2 or (matrix.act and mixed.shape[contracted] in (1, *_lengths(mixed))):
        return False  # as long as the queries or keys, or a single one: an operand of activations is then the values
    if matrix.act and origin(mixed).op in ("exp", "exp2"):
        return False  # exp(z[..., :8] - m) @ v[:8]: a tile of a running softmax meets its values
    axes = paired_axes(mixed)
    if axes is not None:
        return contracted % len(mixed.shape) not in axes
    square = matrix.shape[:1] == (1,) and len(matrix.shape) == 3 and matrix.shape[1] == matrix.shape[2]
    return square and not matrix.act and matrix.shape[1] <= _LARGEST_HEAD_MATRIX


def _lengths(node: Node) -> tuple[int, ...]:
    """Return the numbers of queries and keys of the products behind the node."""
    products = node.products or (frozenset() if node.softmax_run is None else node.softmax_run.node.products)
    return tuple(n for product in products for n in product.shape[-2:])


def mixed_by_data(matrix: Node) -> bool:
    """Return whether the matrix that mixes heads is computed from the inputs, not from parameters alone."""
    return matrix.act and not matrix.learned


def is_bias_of_mixing(node: Node, position: int) -> bool:
    """Return whether `node` adds the bias of a linear layer that mixes heads, one number per head.

    Args:
        node: node of the sum.
        position: position of the addend among the arguments of the sum.
    """
    addend, main = node.args[position], node.main()
    mixed = None if main is None else origin(main, ops.VIEWS)
    mixes = mixed is not None and mixed.product is None and mixed.op in ops.CONTRACTIONS
    return mixes and isinstance(addend, Node) and not addend.act and addend.shape == node.shape[-1:]


def over_heads(node: Node, weights: Node, before: WeightSteps) -> WeightSteps | None:
    """Return the steps on weights after an average or a normalisation over their heads, or None if it is neither.

    Args:
        node: node of the result.
        weights: the operand that carries the weights.
        before: the steps on the weights so far.
    """
    if node.op == "add" and len(node.args) > 1 and is_bias_of_mixing(node, 1):
        return before
    if node.op not in _SUMS_AND_MEANS and node.op not in _NORM_KINDS:
        return None
    pairs, axes = paired_axes(weights), _axes(node, len(weights.shape))
    if pairs is None or not axes or pairs & axes:
        return None
    if node.op in _NORM_KINDS:
        return before.then("norm", f"{_NORM_KINDS[node.op]} {OVER_HEADS}")
    after, several = before.then(node.op, OVER_HEADS), math.prod(weights.shape[axis] for axis in axes)
    return after if node.op == "mean" else after.times(several, node.op)


def _axes(node: Node, dims: int) -> frozenset[int]:
    """Return the axes over which an operation reduces or normalises."""
    if node.op in ops.AFFINE:
        return frozenset({1})
    given: Any = node.args[1] if len(node.args) > 1 else None
    if node.op in ops.NORM_OPERATIONS:
        return frozenset(range(dims - len(given), dims)) if isinstance(given, (list, tuple)) else frozenset()
    axes = [given] if isinstance(given, int) else given or ()
    return frozenset(axis % dims for axis in axes)


def _leaves_pairs(convolution: Node) -> bool:
    """Whether a convolution is 1x1 with one group, so that the axes of queries and keys stay as they are."""
    kernel = convolution.args[1].shape[2:]
    groups = convolution.args[8] if len(convolution.args) > 8 else 1
    return kernel == (1,) * len(kernel) and groups == 1 and convolution.shape[2:] == convolution.args[0].shape[2:]


# -- several softmaxes -------------------------------------------------------------------------------------------------


def combine_weights(node: Node, active: Sequence[Node], entries: list[SoftmaxEntry]) -> bool:
    """Return whether `node` combines weights of several softmaxes, or two parts of one; it is then filled in.

    Args:
        node: node of the result.
        active: operands that descend from activations.
        entries: every softmax so far; a softmax of constants is appended.
    """
    combined = _COMBINED.get(node.op)
    carriers = [p for p in active if p.weights is not None]
    if combined is None or not carriers:
        return False
    if (mixed := _plus_their_mixing(node, carriers)) is not None:
        node.weights, node.args = mixed.weights, (mixed,)
        return True
    # (1 - g) * softmax(q k^T) + g * softmax(positions): the second softmax consists of constants.
    constants = [] if len(carriers) > 1 else [p for p in node.parents() if not p.act and _is_weights(p)]
    if not constants and not _several(node, carriers):
        return False
    first = next((p for p in carriers if holds_weights(p)), carriers[0])
    assert first.weights is not None
    softmax_runs = dict.fromkeys(softmax_run for p in carriers for softmax_run in _softmax_runs(p))
    weight_steps = first.weights.weight_steps
    for other in [p for p in carriers if p is not first] or [first]:
        assert other.weights is not None
        weight_steps = weight_steps.beside(other.weights.weight_steps, Message(combined))
    others = tuple(softmax_run for softmax_run in softmax_runs if softmax_run is not first.softmax_run)
    node.weights = replace(first.weights, weight_steps=weight_steps, beside=others)
    node.args = (first,)
    entries += [SoftmaxEntry(node.site, constant.shape, "positional") for constant in constants]
    return True


def complete_softmaxes(weights: Weights) -> list[SoftmaxRun]:
    """Return the softmaxes that become attentions when combined weights multiply values.

    They are those over a product of queries and keys, or all if none is. The entries of the others get the code
    "positional".
    """
    both = [weights.softmax_run, *weights.beside]
    attentions = [softmax_run for softmax_run in both if softmax_run.node.products] or both
    for softmax_run in both:
        if softmax_run in attentions:
            softmax_run.entry.attention = True
        else:
            softmax_run.entry.code = "positional"
    return attentions


def _plus_their_mixing(node: Node, carriers: Sequence[Node]) -> Node | None:
    """Return the mixed operand of `w + mix(w)`, weights plus their own mixing over the heads, else None."""
    if node.op != "add" or len(carriers) != 2 or any(p.shape != node.shape for p in carriers):
        return None
    first, second = (p.weights for p in carriers)
    if first is None or second is None or first.softmax_run is not second.softmax_run:
        return None
    for mixed, plain, node_of in ((first, second, carriers[0]), (second, first, carriers[1])):
        if mixed.weight_steps == plain.weight_steps.then("mix", OVER_HEADS) != plain.weight_steps:
            return node_of
    return None


def _several(node: Node, carriers: Sequence[Node]) -> bool:
    """Whether the operands carry weights of several softmaxes, or groups of heads of one: `w[:, ::2] - w[:, 1::2]`.

    Parts that are only put side by side again do not count.
    """
    if len(carriers) < 2:
        return False
    if len({softmax_run for p in carriers for softmax_run in _softmax_runs(p)}) > 1:
        return True
    if node.op in _SIDE_BY_SIDE or len(set(carriers)) < 2:
        return False
    whole = carriers[0].softmax_run
    pairs = whole is not None and node.shape[-2:] == whole.entry.shape[-2:]  # heads were split, not queries or keys
    return pairs and all(map(_is_part, carriers))


def _softmax_runs(node: Node) -> tuple[SoftmaxRun, ...]:
    return () if node.weights is None else (node.weights.softmax_run, *node.weights.beside)


def holds_weights(node: Node) -> bool:
    """Return whether the node is of weights whose softmax runs over a product of queries and keys."""
    return node.softmax_run is not None and bool(node.softmax_run.node.products)


def _is_part(node: Node) -> bool:
    """Whether weights were sliced out of the weights of more heads."""
    part = next((at for at in back(node, None) if at.op in _SLICES), None)
    return part is not None and bool(part.args)


def _is_weights(constant: Node) -> bool:
    """Whether a tensor made of constants is a softmax, or a part of one."""
    passed = ops.PASSING | {"mul", "div"}
    made = (p for p in constant.parents() if p.op not in ("parameter", "buffer", "constant"))
    return constant.op in ops.SOFTMAX_OPERATIONS or (constant.op in passed and any(map(_is_weights, made)))


# -- axes --------------------------------------------------------------------------------------------------------------


def paired_axes(node: Node) -> frozenset[int] | None:
    """Return the axes of logits or weights along which queries or keys run, or None if they can't be followed.

    All other axes are heads or batch.
    """
    way: list[Node] = []
    while node.product is None:
        # A softmax node has no arguments: the walk goes on at its logits.
        left = node.softmax_run is not None and not node.args
        parent = node.softmax_run.node if left and node.softmax_run is not None else node.main()
        if parent is None:
            return None
        if node.op in ops.VIEWS or (node.op in ops.CONTRACTIONS and node.shape != parent.shape):
            way.insert(0, node)
        elif node.shape != parent.shape:
            return None
        node = parent
    rows, columns = (torch.arange(n) > 0 for n in node.shape[-2:])
    return axes_along((rows[:, None] | columns[None, :]).expand(node.shape), way)


def axes_along(place: Tensor, way: Iterable[Node]) -> frozenset[int] | None:
    """Return the axes along which a tensor varies after some views.

    Args:
        place: the tensor before the views.
        way: the nodes of the views, in the order in which they ran.

    Returns:
        The axes of the result; None if the views can't be replayed.
    """
    try:
        place = distinct(to_softmax(place, way), last=0)  # broadcast axes can't vary: shrinking them saves time
    except (RuntimeError, IndexError):
        return None
    return frozenset(axis for axis in range(place.dim()) if bool((place != place.narrow(axis, 0, 1)).any()))
