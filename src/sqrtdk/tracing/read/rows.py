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

from sqrtdk.tracing.read.orient import Orientation, varies
from sqrtdk.tracing.steps.placed import to_softmax
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, replay

_REDUCED = frozenset({"mean", "sum", "amax", "amin"})
_CONVOLVED = ops.PROJECTIONS | ops.AFFINE

Shape = tuple[int, ...]


def place_rows(axes: Orientation, product: Node, query: Node, views: Sequence[Node], shape: Shape) -> Orientation:
    """The orientation with the axes along which the positions of the queries run.

    Args:
        axes: as the product's own rows have it.
        product: q . k.
        query: its operand that is q.
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
    line = along[..., :1, :] if axes.swapped else along[..., :1]
    try:
        line = to_softmax((line.mT if axes.swapped else line).expand(product.shape), views).movedim(axes.keys, -1)
    except (RuntimeError, IndexError):
        return last
    rows = tuple(axis for axis in range(line.dim() - 1) if varies(line, axis))
    if not single:
        return replace(axes, rows=tuple(axis for axis in axes.rows if axis in rows) or last.rows)
    if rows:
        return replace(axes, rows=rows, windowed=True)
    sizes = [size for axis, size in enumerate(shape) if axis != axes.keys % len(shape)]
    return last if sizes and sizes[-1] == 1 else replace(axes, rows=())


def over_channels(query: Node, *, swapped: bool) -> bool:
    """Whether the rows of the product are features of q's projection, and its sum runs over positions."""
    channel, position = _followed(query, _channels), _followed(query, _positions)
    if channel is None or position is None:
        return False
    rows, summed = (-1, -2) if swapped else (-2, -1)
    return varies(channel, rows) and varies(position, summed) and not varies(channel, summed)


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
    try:
        for step in reversed(way):
            line = None if line is None else _after(step, line)
    except (RuntimeError, IndexError, NotImplementedError):
        return None
    return line


def _after(step: Node, line: Tensor) -> Tensor | None:
    if step.op in ops.VIEWS:
        return replay(step, line)
    if tuple(line.shape) == step.shape:
        return line
    if step.op not in _REDUCED or len(step.args) < 2 or not isinstance(step.args[1], (list, tuple)):
        return None
    for axis in step.args[1]:
        line = line.narrow(axis, 0, 1)
    return line.reshape(step.shape)


def _positions(root: Node, shape: Shape) -> Tensor | None:
    """0, 1, 2 ... along the positions; all 0 where a projection of vectors has none."""
    if root.op in _CONVOLVED and root.op != "embedding":
        before, sizes, after = 2, shape[2:], 0
    elif root.op in ops.CONTRACTIONS and root.op != "bmm":
        before, sizes, after = 1, shape[1:-1], 1
    else:
        before, sizes, after = len(shape) - 2, shape[-2:-1], 1
    if len(shape) < 2:
        return None
    line = torch.arange(math.prod(sizes), dtype=torch.int32)
    return line.view((1,) * before + tuple(sizes) + (1,) * after).expand(shape)


def _channels(root: Node, shape: Shape) -> Tensor | None:
    """0, 1, 2 ... along the features."""
    convolved = root.op in _CONVOLVED and root.op != "embedding"
    if not convolved and root.op not in ops.CONTRACTIONS:
        return None
    axis = 1 if convolved else len(shape) - 1
    sizes = tuple(n if d == axis else 1 for d, n in enumerate(shape))
    return torch.arange(shape[axis], dtype=torch.int32).view(sizes).expand(shape)
