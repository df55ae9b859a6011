"""Values and positions carried through views: into the layout of a node, and back to where a block was cut out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import block, box, dominator, numbered, replay, replay_all, written
from sqrtdk.tracing.tape.node import Node

REJOINED = frozenset({"cat", "stack"})
_Start = Callable[[Node], Tensor | None]


def regrouped(node: Node, start: _Start) -> Tensor | None:
    """Values in the layout of `node`, followed from where they start; None where an operation is no regrouping.

    What does not move values (a factor, a rotation, a normalisation) is passed over.

    Args:
        node: where they are wanted.
        start: gives the values of a node at which they start, None for any other.
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
        whole = [parent for parent in node.parents() if math.prod(parent.shape)]  # a cache begins with nothing
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
    """Positions `first` and following of an axis, `total` long, of the tensor that `source` is.

    `others` are the positions on its other axes where the first vector begins: which sequence, and which head.
    """

    source: Node
    axis: int
    first: int
    total: int
    others: tuple[int, ...]


def positions(operand: Node, axis: int) -> Positions | None:
    """Where the vectors along an axis of a product's operand come from; None where they do not follow one another."""
    views: list[Node] = []
    source: Node | None = operand
    while source is not None and not source.is_root and source.act:
        main = source.main()
        if source.op in ops.VIEWS:
            views.insert(0, source)
        elif main is None or main.shape != source.shape or sum(p.act for p in source.parents()) != 1:
            main = dominator(source)[0]  # a rotation leaves every vector at its place
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
    if not along:  # a single vector: only one axis, beside that of the features, can have its place
        along = [dim for dim, start in enumerate(starts[:-1]) if start]
    elif not _consecutive(lines[along[0]]):
        return None
    if len(along) != 1:
        return None
    others = tuple(start for dim, start in enumerate(starts) if dim != along[0])
    return Positions(source, along[0], starts[along[0]], source.shape[along[0]], others)


def _line(views: Iterable[Node], shape: tuple[int, ...], dim: int, axis: int) -> Tensor:
    """Where on `dim` of a shape the first vector along an axis of what views make of it comes from."""
    numbers = replay_all(views, numbered(shape, dim)).movedim(axis, -1)
    return numbers.reshape(-1, numbers.shape[-1])[0]


def _consecutive(numbers: Tensor) -> bool:
    return bool((numbers[1:] - numbers[:-1] == 1).all())


def sliced(node: Node) -> tuple[int, list[Node]]:
    """The axis along which logits were written slice by slice, and the slices in order; (0, []) where any is missing.

    Nor may they overlap: one beside the other along one axis, they make all of the logits.
    """
    pieces: dict[tuple[int, int], Node] = {}
    for write in written(node)[1]:
        source = block(write)
        starts = box(write, node.shape) if source is not None and source.shape == write.shape else None
        narrowed = [axis for axis, n in enumerate(node.shape) if starts is not None and write.shape[axis] != n]
        if source is None or starts is None or len(narrowed) != 1 or (narrowed[0], starts[narrowed[0]]) in pieces:
            return 0, []
        pieces[narrowed[0], starts[narrowed[0]]] = source
    after = 0
    for (axis, first), piece in sorted(pieces.items(), key=lambda item: item[0]):
        if first != after:  # of another axis as well
            return 0, []
        after += piece.shape[axis]
    return (axis, [pieces[at] for at in sorted(pieces)]) if pieces and after == node.shape[axis] else (0, [])
