"""Logits that were written slice by slice: which slices, one beside the other along one axis, make all of them."""

from __future__ import annotations

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.constants import block, written
from sqrtdk.tracing.watch.graph import Node, numbered, replay_all


def sliced(node: Node) -> tuple[int, list[Node]]:
    """The axis and what was written along it, in order; nothing where that leaves gaps, overlaps, or can't be told."""
    pieces: dict[int, Node] = {}
    axes: set[int] = set()
    _, writes = written(node)
    for write in writes:
        source = block(write)
        at = _slice(write.args[0], node) if source is not None and source.shape == write.shape else None
        if at is None or source is None or at[1] in pieces:
            return 0, []
        axes.add(at[0])
        pieces[at[1]] = source
    ordered = [pieces[first] for first in sorted(pieces)]
    after = 0
    for first, piece in sorted(pieces.items()):
        if first != after or len(axes) > 1:
            return 0, []
        after += piece.shape[next(iter(axes))]
    axis = axes.pop()
    return (axis, ordered) if after == node.shape[axis] else (0, [])


def _slice(view: object, whole: Node) -> tuple[int, int] | None:
    """The axis that a view narrows, and where it begins there; None where it is another view."""
    way: list[Node] = []
    while isinstance(view, Node) and view.op in ops.VIEWS:
        way.append(view)
        view = view.main()
    if not way or not isinstance(view, Node) or view.shape != whole.shape or len(way[0].shape) != len(whole.shape):
        return None
    narrowed = [axis for axis, (part, all_) in enumerate(zip(way[0].shape, whole.shape, strict=True)) if part != all_]
    if len(narrowed) != 1:
        return None
    (axis,) = narrowed
    line = replay_all(reversed(way), numbered(whole.shape, axis))
    numbers = line.movedim(axis, -1).reshape(-1, way[0].shape[axis])[0]
    return (axis, int(numbers[0])) if bool((numbers[1:] - numbers[:-1] == 1).all()) else None
