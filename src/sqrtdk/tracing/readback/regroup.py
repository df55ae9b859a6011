"""Carries values and positions through views: forward to a node's layout, back to where a block was cut out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import (
    before_writes,
    dominator,
    numbered,
    replay,
    replay_all,
    written_box,
    written_logits,
)
from sqrtdk.tracing.tape.node import Node

REJOINED = frozenset({"cat", "stack"})
_Start = Callable[[Node], Tensor | None]


def regrouped(node: Node, start: _Start) -> Tensor | None:
    """Return values in the layout of `node`, or None if an operation on the way is not a regrouping.

    Operations that keep the shape (a factor, a rotation, a normalisation) leave the values in place.

    Args:
        node: the node whose layout is wanted.
        start: returns the values at a starting node, and None at any other node.
    """
    try:
        return _followed(node, start, {})
    except (RuntimeError, IndexError, NotImplementedError):
        return None


def _followed(node: Node, start: _Start, known: dict[Node, Tensor | None]) -> Tensor | None:
    if node not in known:
        value = start(node)
        known[node] = value if value is not None or node.is_root else _moved(node, start, known)
    return known[node]


def _moved(node: Node, start: _Start, known: dict[Node, Tensor | None]) -> Tensor | None:
    if node.op in REJOINED:
        whole = [parent for parent in node.parents() if math.prod(parent.shape)]  # a cache starts as an empty tensor
        pieces = [_followed(parent, start, known) for parent in whole if parent.act]
        values = [piece for piece in pieces if piece is not None]
        if len(values) < len(whole):
            return None
        dim = int(node.args[1]) if len(node.args) > 1 else 0
        return torch.cat(values, dim) if node.op == "cat" else torch.stack(values, dim)
    if node.op in ops.VIEWS:
        main = node.main()
        value = None if main is None else _followed(main, start, known)
        return None if value is None else replay(node, value)
    same = next((parent for parent in node.parents() if parent.act and parent.shape == node.shape), None)
    return None if same is None else _followed(same, start, known)


# -- where a block was cut out -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Positions:
    """A run of consecutive positions that an operand of a product was cut from.

    Attributes:
        source: node of the tensor that it was cut from.
        axis: axis of the positions in that tensor.
        first: the first position.
        total: length of that axis.
        others: positions of the run's first vector on the other axes: which sequence, which head.
    """

    source: Node
    axis: int
    first: int
    total: int
    others: tuple[int, ...]


def positions(operand: Node, axis: int) -> Positions | None:
    """Return which positions the vectors along an axis of a product's operand were cut from.

    Args:
        operand: node of the operand.
        axis: its axis, negative.

    Returns:
        The positions; None if they are not consecutive, or can't be followed.
    """
    views: list[Node] = []
    source: Node | None = operand
    while source is not None and not source.is_root and source.act:
        main = source.main()
        if source.op in ops.VIEWS:
            views.insert(0, source)
        elif main is None or main.shape != source.shape or sum(p.act for p in source.parents()) != 1:
            main = dominator(source)[0]  # x * cos + rotate_half(x) * sin: a rotation leaves every vector in place
            if main is None or main.shape != source.shape:
                break
        source = main
    if source is None:
        return None
    try:
        lines = [_line(views, source.shape, dim, axis) for dim in range(len(source.shape))]
    except (RuntimeError, IndexError, TypeError):
        return None
    starts = [int(line[0]) for line in lines]
    along = [dim for dim, line in enumerate(lines) if bool((line != line[0]).any())]
    if not along:  # a single vector has a place only if its start is nonzero on exactly one axis but the last
        along = [dim for dim, start in enumerate(starts[:-1]) if start]
    elif not _consecutive(lines[along[0]]):
        return None
    if len(along) != 1:
        return None
    others = tuple(start for dim, start in enumerate(starts) if dim != along[0])
    return Positions(source, along[0], starts[along[0]], source.shape[along[0]], others)


def _line(views: Iterable[Node], shape: tuple[int, ...], dim: int, axis: int) -> Tensor:
    """Return the positions on `dim` of `shape` of the vectors along `axis` after the views, other axes at 0."""
    numbers = replay_all(views, numbered(shape, dim)).movedim(axis, -1)
    return numbers.reshape(-1, numbers.shape[-1])[0]


def _consecutive(numbers: Tensor) -> bool:
    return bool((numbers[1:] - numbers[:-1] == 1).all())


def sliced(node: Node) -> tuple[int, list[Node]]:
    """Return the axis along which logits were written slice by slice, and the slices in order.

    Returns (0, []) unless the slices cover the axis without gap or overlap: `z[..., :8] = a; z[..., 8:] = b`.
    """
    pieces: dict[tuple[int, int], Node] = {}
    for write in before_writes(node)[1]:
        source = written_logits(write)
        starts = written_box(write, node.shape) if source is not None and source.shape == write.shape else None
        narrowed = [axis for axis, n in enumerate(node.shape) if starts is not None and write.shape[axis] != n]
        if source is None or starts is None or len(narrowed) != 1 or (narrowed[0], starts[narrowed[0]]) in pieces:
            return 0, []
        pieces[narrowed[0], starts[narrowed[0]]] = source
    after = 0
    for (axis, first), piece in sorted(pieces.items(), key=lambda item: item[0]):
        if first != after:  # a gap, an overlap, or a slice along a second axis
            return 0, []
        after += piece.shape[axis]
    return (axis, [pieces[at] for at in sorted(pieces)]) if pieces and after == node.shape[axis] else (0, [])
