"""Which positions of a sequence a block of queries or keys is, told from the views that cut it out."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, dominator, numbered, replay_all


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
    way: list[Node] = []
    node: Node | None = operand
    while node is not None and not node.is_root and node.act:
        main = node.main()
        if node.op in ops.VIEWS:
            way.append(node)
        elif main is None or main.shape != node.shape or sum(p.act for p in node.parents()) != 1:
            main = dominator(node)[0]  # a rotation leaves every vector at its place
            if main is None or main.shape != node.shape:
                break
        node = main
    if node is None:
        return None
    return _first(node, way, operand, axis)


def _first(source: Node, way: list[Node], operand: Node, axis: int) -> Positions | None:
    starts: list[int] = []
    along: int | None = None
    for dim in range(len(source.shape)):
        try:
            line = replay_all(reversed(way), numbered(source.shape, dim))
        except (RuntimeError, IndexError, TypeError):
            return None
        numbers = line.movedim(axis, -1).reshape(-1, operand.shape[axis])[0]
        starts.append(int(numbers[0]))
        if len(numbers) > 1 and bool((numbers != numbers[0]).any()):
            if along is not None or not bool((numbers[1:] - numbers[:-1] == 1).all()):
                return None
            along = dim
    if along is None:  # a single vector: only one axis, beside that of the features, can have its place
        later = [dim for dim, start in enumerate(starts[:-1]) if start]
        along = later[0] if len(later) == 1 else None
    if along is None:
        return None
    others = tuple(start for dim, start in enumerate(starts) if dim != along)
    return Positions(source, along, starts[along], source.shape[along], others)
