"""Which axes of the logits hold queries, keys and heads, and which operand of the product is q.

Coordinates of the product's entries are followed through the views to the softmax. Where the product does not tell,
those of the query's projection do, its positions and its features: the rows of the product may be those of a grid,
(X, Y), or the query heads of a group, (G, L), and a query that meets keys of its own alone is the only row of its
product, so that the queries lie in its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.tracing.lower.vectors import ROTATION
from sqrtdk.tracing.probe.norms import norm_at
from sqrtdk.tracing.probe.replays import moved
from sqrtdk.tracing.spine.regroup import REJOINED, regrouped
from sqrtdk.tracing.steps.placed import to_softmax
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import dominator, numbered, replay
from sqrtdk.tracing.tape.node import Node, Weighing

_LARGEST = 2**24  # features of a projection that are followed to the logits
_REDUCED = frozenset({"mean", "sum", "amax", "amin"})
_CONVOLUTIONS = frozenset({"convolution", "_convolution", "mkldnn_convolution"}) | ops.AFFINE
# What leaves channels where they are, or is known to move them; all else is asked.
_TERMS = frozenset({"add", "sub", "addcmul", "sum", "mul", "div", "neg", "complex", "overwrite", "copy", ROTATION})
_IN_PLACE = _TERMS | ops.PASSING | ops.NORMS.keys() | ops.CLAMPS | REJOINED | ops.CACHE_WRITES.keys()
_LINEAR = (ops.PROJECTIONS | ops.CONTRACTIONS.keys()) - _CONVOLUTIONS - {"embedding", "_embedding_bag"}


@dataclass(frozen=True, slots=True)
class Orientation:
    """How to bring a tensor of the softmax's shape into (..., L, S).

    Attributes:
        keys: the axis the softmax runs over.
        rows: the axes of the queries, once the keys are moved last; none where there is a single query.
        heads: the axes of the heads, likewise; none where they are those before the rows, or not known.
        swapped: the right operand of the product is the query.
        followed: the views from the product to the softmax could be replayed.
        windowed: every query has keys of its own (local windows).
    """

    keys: int
    rows: tuple[int, ...]
    swapped: bool
    followed: bool
    windowed: bool = False
    heads: tuple[int, ...] = ()

    def apply(self, tensor: Tensor) -> Tensor:
        """(..., L, S) of a tensor in the softmax's layout."""
        tensor = tensor.movedim(self.keys, -1)
        heads, rows = len(self.heads), len(self.rows)
        tensor = tensor.movedim((*self.heads, *self.rows), tuple(range(-1 - heads - rows, -1)))
        tensor = tensor.flatten(-1 - rows, -2) if rows else tensor.unsqueeze(-2)
        return tensor.flatten(-2 - heads, -3) if heads else tensor


def operands(product: Node) -> tuple[Node, Node]:
    """What was multiplied, left and right."""
    nodes = [arg for arg in product.args if isinstance(arg, Node)]
    return nodes[-2], nodes[-1]


def coordinates(product: Node, views: Sequence[Node], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each logit the (batch, row, column) of the product's entry it came from, in the softmax's layout."""
    shape = product.shape if len(product.shape) == 3 else (1, *product.shape)
    axes = [torch.arange(n, device=device).view([-1 if d == a else 1 for d in range(3)]) for a, n in enumerate(shape)]
    n, r, c = (to_softmax(axis.expand(shape).reshape(product.shape), views) for axis in axes)
    return n, r, c


def orientation(product: Node, views: Sequence[Node], dim: int, dims: int) -> Orientation:
    """Find the axes by following the coordinates of the product's entries through the views."""
    plain = Orientation(dim, (dims - 2,) if dims > 1 else (), False, False)
    try:
        _, row, column = coordinates(product, views, torch.device("cpu"))
    except (RuntimeError, IndexError):
        return plain
    row, column = row.movedim(dim, -1), column.movedim(dim, -1)
    swapped = varies(row, -1) and not varies(column, -1)
    queries = column if swapped else row
    axes = [axis for axis in range(dims - 1) if varies(queries, axis)]
    return Orientation(dim, tuple(axes) or plain.rows, swapped, True)


def varies(coordinate: Tensor, axis: int) -> bool:
    """Whether a coordinate changes along an axis; it is linear in every axis, so one line tells."""
    if not coordinate.numel():
        return False
    axis %= coordinate.dim()
    line = coordinate[tuple(slice(None) if d == axis else 0 for d in range(coordinate.dim()))]
    return bool((line != line[0]).any())


# -- queries and heads by positions and features of the projection -----------------------------------------------------


def place_rows(
    axes: Orientation, product: Node, query: Node, key: Node, views: Sequence[Node], shape: tuple[int, ...]
) -> Orientation:
    """The orientation with the axes along which the positions of the queries run.

    Args:
        axes: as the product's own rows have it.
        product: q . k.
        query: its operand that is q.
        key: its operand that is k.
        views: from there to the softmax.
        shape: of the softmax.
    """
    single = query.shape[-1 if axes.swapped else -2] == 1
    if not axes.followed or (len(axes.rows) == 1 and not single) or (single and not math.prod(product.shape)):
        return axes
    last = replace(axes, rows=axes.rows[-1:])
    along = followed(query, _positions)
    if along is None:
        return last
    line = _at_softmax(along, axes, product, views)
    if line is None:
        return last
    rows = tuple(axis for axis in range(line.dim() - 1) if varies(line, axis))
    if not single:
        return replace(axes, rows=tuple(axis for axis in axes.rows if axis in rows) or last.rows)
    if rows:
        return replace(axes, rows=rows, windowed=True) if _runs_along(key, -2 if axes.swapped else -1) else last
    sizes = [size for axis, size in enumerate(shape) if axis != axes.keys % len(shape)]
    return last if sizes and sizes[-1] == 1 else replace(axes, rows=())


def _runs_along(key: Node, columns: int) -> bool:
    """Whether the positions of the keys run along the columns: they do not where the batch is their second axis."""
    along = followed(key, _positions)
    return along is not None and varies(along, columns)


def place_heads(axes: Orientation, product: Node, query: Node, views: Sequence[Node], dims: int) -> Orientation:
    """The orientation with the axes along which the features of the queries run, where others lie between.

    Args:
        axes: with the rows in place.
        product: q . k.
        query: its operand that is q.
        views: from there to the softmax.
        dims: of the softmax.
    """
    others = [axis for axis in range(dims - 1) if axis not in axes.rows]
    channel = followed(query, features) if axes.followed and len(others) > 2 else None
    line = None if channel is None else _at_softmax(channel, axes, product, views)
    heads = () if line is None else tuple(axis for axis in others if varies(line, axis))
    return axes if heads == tuple(others[len(others) - len(heads) :]) else replace(axes, heads=heads)


def _at_softmax(along: Tensor, axes: Orientation, product: Node, views: Sequence[Node]) -> Tensor | None:
    """A coordinate of q in the softmax's layout, its keys moved last; None where the views can't be followed."""
    line = along[..., :1, :] if axes.swapped else along[..., :1]
    try:
        return to_softmax(line.expand(product.shape), views).movedim(axes.keys, -1)
    except (RuntimeError, IndexError):
        return None


def over_channels(operand: Node, *, swapped: bool = False) -> bool:
    """Whether the rows of the product are features of a projection, and its sum runs over positions.

    Args:
        operand: the product's q.
        swapped: it is the right operand.
    """
    rows, summed = (-1, -2) if swapped else (-2, -1)
    root = _root(operand)
    if root is None or root.op not in _CONVOLUTIONS | _LINEAR or len(operand.shape) < 2:
        return False
    if operand.shape[rows] < 2 or root.shape[_features_axis(root)] % operand.shape[rows]:
        return False
    position = followed(operand, _positions)
    if position is None or not varies(position, summed):
        return False
    channel = followed(operand, features)
    return channel is not None and varies(channel, rows) and not varies(channel, summed)


def pools_positions(weighing: Weighing) -> bool:
    """Whether a softmax runs over the positions of one projection, and not over its features as a router's does.

    So MobileViTv2's, softmax(conv(x)) over the tokens, whose weights meet k element by element (arXiv:2206.02680).
    """
    feature = followed(weighing.node, features)
    return feature is not None and not varies(feature, weighing.dim) and weighing.node.shape[weighing.dim] > 1


def norm_fault(operand: Node, *, summed: int) -> str | None:
    """What is wrong where q or k was normalised along another axis than the product sums over.

    Args:
        operand: q or k of the product.
        summed: the axis that the product sums over, counted from the end.
    """
    node: Node | None = operand
    while node is not None and not node.is_root and (norm := norm_at(node)) is None:
        node = node.main()
    if node is None or node.is_root or norm is None or len(node.shape) < 2:
        return None
    line = numbered(node.shape, norm.axis % len(node.shape))
    along = regrouped(operand, lambda at: line if at is node else None)
    return None if along is None or varies(along, summed) else "a norm over another axis than the product sums over"


def _root(node: Node) -> Node | None:
    while not node.is_root:
        main = node.main()
        if main is None or not main.act:
            return None
        node = main
    return node


def paired_channels(query: Node, key: Node, at: tuple[int, int] = (-1, -1)) -> bool:
    """Whether channels that are multiplied lie alike in their projections; True where that can't be told.

    One with halves of its channels in turn, `q.unflatten(-1, (2, -1)).mT.flatten(-2)`, needs the other to have them so.

    Args:
        query: operand of the product.
        key: the other one.
        at: the axis of the channels in each.
    """
    left, right = (_channels(node, axis) for node, axis in zip((query, key), at, strict=True))
    if left is None or right is None:
        return True
    ends = [(float(numbers.abs().min()), float(numbers.abs().max())) for numbers in (left, right)]
    widths = {root.shape[_features_axis(root)] for root in query.roots | key.roots}
    if query.roots != key.roots and left.shape == right.shape and ends == 2 * [(1.0, width) for width in widths]:
        return torch.equal(left, right)  # of whole projections, the heads as well
    orders = [torch.cat([x.abs().argsort(-1), x.sign()], -1) for x in (left, right)]
    return not all(bool((order == order[:1]).all()) for order in orders) or torch.equal(orders[0][0], orders[1][0])


def _channels(node: Node, axis: int) -> Tensor | None:
    """(vectors, E) features that channels of the product are, from 1; None of several projections, or not known."""
    numbers = followed(node, lambda root, shape: None if (at := features(root, shape)) is None else at.float() + 1)
    if numbers is None or len(node.roots) != 1 or numbers.dim() < 2 or numbers.is_complex() or numbers.is_meta:
        return None
    first = numbers.movedim(axis, -1)[..., :1, :].flatten(0, -2)
    once = numbers.numel() > 0 and bool((first.abs().sort(-1).values.diff(dim=-1) != 0).all())
    return first if once else None  # else zeros, or neighbours that were rotated


def followed(node: Node, coordinate: Callable[[Node, tuple[int, ...]], Tensor | None]) -> Tensor | None:
    """A coordinate of the projections that `node` descends from, brought into its layout; None where it is lost."""

    def start(at: Node) -> Tensor | None:
        main = at.main()
        if at.is_root:
            return coordinate(at, at.shape)
        if main is None or not main.act:
            return None
        if at.op in _REDUCED or at.op == "constant_pad_nd":
            line = regrouped(main, start)
            return None if line is None else _after(at, line)
        inner: Node | None = at
        while inner is not None and inner.op in ops.VIEWS and not inner.is_root and inner.shape[-1:] == at.shape[-1:]:
            inner = inner.main()
        if at.op in ("add", "sub") and (whole := dominator(at)[0]) is not None and whole.shape == at.shape:
            return regrouped(whole, start)  # rotate_half(x) * sin + x * cos
        if at.op not in _IN_PLACE and (shuffled := next(moved(at), None)) is not None:
            line = regrouped(shuffled.part.source, start)
            return None if line is None else shuffled.place(line)
        if inner is None or inner is at or not inner.is_root or len(inner.shape) != 2:
            return None
        # A linear layer folds what is before the features: (B * L, D), of which (B, L, D) is the first view.
        return coordinate(inner, at.shape) if inner.shape[-1:] == at.shape[-1:] else None

    return regrouped(node, start)


def _after(step: Node, line: Tensor) -> Tensor | None:
    """A coordinate after zeros were put around it, or of the first entry that a reduction met."""
    if step.op == "constant_pad_nd":
        return replay(step, line)
    axes = step.args[1] if len(step.args) > 1 else None
    if not isinstance(axes, (list, tuple)):
        return None
    for axis in axes:
        line = line.narrow(axis, 0, 1)
    return line.reshape(step.shape)


def _features_axis(root: Node) -> int:
    """Of a projection, counted from the end; those of a batch normalisation of vectors are the last."""
    if root.op in _CONVOLUTIONS and len(root.shape) > 2:
        return 1 - len(root.shape)
    return -1 if root.root is None else root.root.features


def _positions(root: Node, shape: tuple[int, ...]) -> Tensor | None:
    """1, 2, 3 ... along the positions, 0 being padding; all 1 where a projection of vectors has none."""
    if len(shape) < 2 or root.op == "bmm":  # einsum folds batch and positions
        return None
    if root.op in _CONVOLUTIONS and len(shape) > 2:
        before, sizes, after = 2, shape[2:], 0
    elif _features_axis(root) == -2:
        before, sizes, after = len(shape) - 1, shape[-1:], 0
    elif root.op in _CONVOLUTIONS | _LINEAR:
        before, sizes, after = 1, shape[1:-1], 1
    else:
        before, sizes, after = len(shape) - 2, shape[-2:-1], 1
    line = torch.arange(math.prod(sizes), dtype=torch.float32) + 1
    return line.view((1,) * before + tuple(sizes) + (1,) * after).expand(shape)


def features(root: Node, shape: tuple[int, ...]) -> Tensor | None:
    """The number of each feature of a projection, in its layout; of several matrices, each has numbers of its own."""
    if root.root is None or not shape or math.prod(shape) > _LARGEST:
        return None
    axis, matrices = _features_axis(root) % len(shape), root.root.matrices
    dtype = torch.int16 if matrices * shape[axis] <= torch.iinfo(torch.int16).max else torch.int32
    numbers = torch.arange(shape[axis], dtype=dtype).view([-1 if d == axis else 1 for d in range(len(shape))])
    if matrices > 1:
        numbers = numbers + shape[axis] * (torch.arange(shape[0], dtype=dtype) % matrices)[:, None, None]
    return numbers.expand(shape)
