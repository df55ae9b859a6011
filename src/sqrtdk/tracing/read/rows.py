"""Which axes of the logits hold the queries, where the product does not tell: grids, local windows, a single query.

The rows of the product may be those of a grid, (X, Y), or the query heads of a group, (G, L). And a query that meets
keys of its own alone is a row of a product that has no other: the queries lie in its batch then, unless there is but
one. In each case the positions of the query's projection tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.tracing.probe.norms import norm_at
from sqrtdk.tracing.read.orient import Orientation, varies
from sqrtdk.tracing.steps.placed import to_softmax
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, replay

_REDUCED = frozenset({"mean", "sum", "amax", "amin"})
_CONVOLUTIONS = frozenset({"convolution", "_convolution", "mkldnn_convolution"}) | ops.AFFINE
_LINEAR = (ops.PROJECTIONS | ops.CONTRACTIONS.keys()) - _CONVOLUTIONS - {"embedding", "_embedding_bag"}

Shape = tuple[int, ...]


def place_rows(
    axes: Orientation, product: Node, query: Node, key: Node, views: Sequence[Node], shape: Shape
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
    along = _followed(query, _positions)
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
    along = _followed(key, _positions)
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
    channel = _followed(query, _channels) if axes.followed and len(others) > 2 else None
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
    features = None if root is None else _features(root)
    if root is None or features is None or len(operand.shape) < 2:
        return False
    if operand.shape[rows] < 2 or root.shape[features] % operand.shape[rows]:
        return False
    position = _followed(operand, _positions)
    if position is None or not varies(position, summed):
        return False
    channel = _followed(operand, _channels)
    return channel is not None and varies(channel, rows) and not varies(channel, summed)


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
    start, axis = node, norm.axis
    line = torch.arange(start.shape[axis], dtype=torch.float32)
    line = line.view((-1,) if axis == -1 else (-1, *(1,) * (-1 - axis))).expand(start.shape)
    way: list[Node] = []
    node = operand
    while node is not start:
        way.append(node)
        node = node.main() or start
    along = _replayed(way, line)
    return None if along is None or varies(along, summed) else "a norm over another axis than the product sums over"


def _root(node: Node) -> Node | None:
    while not node.is_root:
        main = node.main()
        if main is None or not main.act:
            return None
        node = main
    return node


def _followed(node: Node, coordinate: Callable[[Node, Shape], Tensor | None]) -> Tensor | None:
    """A coordinate of the projection that `node` descends from, brought into its layout; None where it is lost."""
    way: list[Node] = []
    while not node.is_root:
        main = node.main()
        if main is None or not main.act:
            return None
        way.append(node)
        node = main
    start = node.shape
    while way and way[-1].op in ops.VIEWS and way[-1].shape[-1:] == node.shape[-1:] and len(start) == 2:
        start = way.pop().shape  # a linear layer folds what is before the features
    line = coordinate(node, start)
    return None if line is None else _replayed(way, line)


def _replayed(way: Sequence[Node], line: Tensor) -> Tensor | None:
    """A coordinate after the operations of `way`, the last of them first; None where it is lost."""
    after: Tensor | None = line
    try:
        for step in reversed(way):
            after = None if after is None else _after(step, after)
    except (RuntimeError, IndexError, NotImplementedError):
        return None
    return after


def _after(step: Node, line: Tensor) -> Tensor | None:
    if step.op in ops.VIEWS or step.op == "constant_pad_nd":
        return replay(step, line)
    if tuple(line.shape) == step.shape:
        return line
    if step.op not in _REDUCED or len(step.args) < 2 or not isinstance(step.args[1], (list, tuple)):
        return None
    for axis in step.args[1]:
        line = line.narrow(axis, 0, 1)
    return line.reshape(step.shape)


def _convolved(root: Node) -> bool:
    """Whether its features are axis 1; those of a batch normalisation of vectors are the last."""
    return root.op in _CONVOLUTIONS and len(root.shape) > 2


def _features(root: Node) -> int | None:
    """The axis of a projection's features, counted from the end; None where it is no projection."""
    if _convolved(root):
        return 1 - len(root.shape)
    return -1 if root.op in _CONVOLUTIONS | _LINEAR else None


def _positions(root: Node, shape: Shape) -> Tensor | None:
    """1, 2, 3 ... along the positions, 0 being padding; all 1 where a projection of vectors has none."""
    if len(shape) < 2 or root.op == "bmm":  # einsum folds batch and positions
        return None
    if _convolved(root):
        before, sizes, after = 2, shape[2:], 0
    elif root.op in _CONVOLUTIONS | _LINEAR:
        before, sizes, after = 1, shape[1:-1], 1
    else:
        before, sizes, after = len(shape) - 2, shape[-2:-1], 1
    line = torch.arange(math.prod(sizes), dtype=torch.float32) + 1
    return line.view((1,) * before + tuple(sizes) + (1,) * after).expand(shape)


def _channels(root: Node, shape: Shape) -> Tensor | None:
    """0, 1, 2 ... along the features."""
    axis = _features(root)
    if axis is None:
        return None
    return torch.arange(shape[axis], dtype=torch.float32).view(-1, *(1,) * (-1 - axis)).expand(shape)
