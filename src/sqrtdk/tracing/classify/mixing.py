"""Talking heads: logits or weights mixed over the heads by a matrix (Shazeer et al. 2020, arXiv:2003.02436).

The matrix stands in a linear layer, an einsum, a matrix product or a convolution of one pixel. Beside it, weights are
averaged over the heads, or normalised over them (DeepViT's re-attention, arXiv:2103.11886).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from sqrtdk.tracing.classify.axes import paired_axes
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, alias
from sqrtdk.tracing.watch.marks import Carried

OVER_HEADS = "over the heads"
BY_DATA = "heads mixed by the data"
CONVOLUTIONS = frozenset({"convolution", "_convolution"})
_LARGEST = 256  # heads that a matrix mixes where the axes could not be followed
_NORMS = {**ops.NORMS, **dict.fromkeys(ops.AFFINE, "batch")}
_REDUCED = frozenset({"mean", "sum"})


def mix_heads(node: Node, tensors: dict[int, Tensor]) -> bool:
    """Whether a contraction or a convolution mixes the heads of logits or weights; its node is then filled in."""
    operands = mixing_operands(node)
    if operands is None:
        return False
    other, matrix = (node.args[i] for i in operands)
    node.products = other.products
    node.operands = {i: alias(x) for i, x in tensors.items() if node.args[i] is not other}
    if other.weights is not None:
        before = other.weights.carried
        carried = before.changed(BY_DATA) if by_data(matrix) else before.then("mix", OVER_HEADS)
        node.weights = replace(other.weights, carried=carried)
        node.args = (other,)
    return True


def mixing_operands(node: Node) -> tuple[int, int] | None:
    """Positions of the logits, or weights, and of the matrix that mixes their heads; None where none does."""
    if node.op in CONVOLUTIONS:
        return (0, 1) if _carries(node.args[0]) and _leaves_pairs(node) else None
    left, right = ops.CONTRACTIONS[node.op]
    for mixed, matrix, contracted in ((left, right, -1), (right, left, -2)):
        other, by = node.args[mixed], node.args[matrix]
        if _carries(other) and not _carries(by) and _over_heads(other, by, contracted):
            return mixed, matrix
    return None


def _over_heads(mixed: Node, matrix: Node, contracted: int) -> bool:
    """Whether a product with `matrix` sums over an axis of logits or weights that holds neither queries nor keys."""
    if len(mixed.shape) < 2 or (matrix.act and mixed.shape[contracted] in (1, *_lengths(mixed))):
        return False  # values, as a rule
    axes = paired_axes(mixed)
    if axes is not None:
        return contracted % len(mixed.shape) not in axes
    square = matrix.shape[:1] == (1,) and len(matrix.shape) == 3 and matrix.shape[1] == matrix.shape[2]
    return square and not matrix.act and matrix.shape[1] <= _LARGEST


def _lengths(node: Node) -> tuple[int, ...]:
    """Of queries and keys."""
    products = node.products or (frozenset() if node.weighing is None else node.weighing.node.products)
    return tuple(n for product in products for n in product.shape[-2:])


def by_data(matrix: Node) -> bool:
    """Whether the matrix is computed from the inputs."""
    return matrix.act and not matrix.learned


def is_bias_of_mixing(node: Node, position: int) -> bool:
    """Whether `node` adds, from `position`, one number a head to what a matrix mixed: a linear layer's bias."""
    addend, mixed = node.args[position], node.main()
    while mixed is not None and mixed.op in ops.VIEWS:
        mixed = mixed.main()
    mixes = mixed is not None and mixed.product is None and mixed.op in ops.CONTRACTIONS
    return mixes and isinstance(addend, Node) and not addend.act and addend.shape == node.shape[-1:]


def over_heads(node: Node, weights: Node, before: Carried) -> Carried | None:
    """What weights have gone through after an average or a normalisation over their heads; None where it is neither.

    Args:
        node: of the result.
        weights: the operand that carries the weights.
        before: what they had gone through.
    """
    if node.op == "add" and len(node.args) > 1 and is_bias_of_mixing(node, 1):
        return before
    if node.op not in _REDUCED and node.op not in _NORMS:
        return None
    pairs, axes = paired_axes(weights), _axes(node, len(weights.shape))
    if pairs is None or not axes or pairs & axes:
        return None
    if node.op in _NORMS:
        return before.then("norm", f"{_NORMS[node.op]} {OVER_HEADS}")
    after = before.then(node.op, OVER_HEADS)
    several = 1
    for axis in axes:
        several *= weights.shape[axis]
    return after if node.op == "mean" else after.times(several, node.op)


def _axes(node: Node, dims: int) -> frozenset[int]:
    """Axes over which an operation reduces, or normalises."""
    if node.op in ops.AFFINE:
        return frozenset({1})
    given: Any = node.args[1] if len(node.args) > 1 else None
    if node.op in ops.NORMS:
        return frozenset(range(dims - len(given), dims)) if isinstance(given, (list, tuple)) else frozenset()
    axes = [given] if isinstance(given, int) else given or ()
    return frozenset(axis % dims for axis in axes)


def _carries(node: Any) -> bool:
    return isinstance(node, Node) and bool(node.products or node.weights)


def _leaves_pairs(convolution: Node) -> bool:
    """Whether a convolution has one group and one pixel, so that the matrix of queries and keys stays as it is."""
    kernel = convolution.args[1].shape[2:]
    groups = convolution.args[8] if len(convolution.args) > 8 else 1
    return kernel == (1,) * len(kernel) and groups == 1 and convolution.shape[2:] == convolution.args[0].shape[2:]
