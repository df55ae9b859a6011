"""One of several tensors that were stacked and taken apart again: q out of `torch.stack([q, k, v])`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, replay_all

_PASSED = ops.VIEWS | ops.SAME
_TAKING = frozenset(
    {"select", "slice", "narrow", "unbind", "split", "split_with_sizes", "chunk", "index", "index_select"}
)


@dataclass(frozen=True, slots=True)
class Picked:
    """A piece of a stack, and how it was taken out.

    Attributes:
        piece: it.
        stack: the stack.
        dim: along which it was made.
        views: from the stack on, innermost first.
    """

    piece: Node
    stack: Node
    dim: int
    views: tuple[Node, ...]

    def place(self, value: Tensor) -> Tensor:
        """Values of the piece, in the layout in which it was taken out."""
        return replay_all(self.views, value.unsqueeze(self.dim).expand(self.stack.shape))


def picked(node: Node) -> Picked | None:
    """The one piece that `node` is a view of; None where it is no view of a stack, or one of several pieces."""
    if node.op not in ops.VIEWS:
        return None
    views: tuple[Node, ...] = ()
    while node.op in _PASSED and not node.is_root:
        views = (node, *views) if node.op in ops.VIEWS else views
        main = node.main()
        if main is None:
            return None
        node = main
    if node.op != "stack" or node.is_root or not any(view.op in _TAKING for view in views):
        return None
    pieces = node.args[0]
    dim = (int(node.args[1]) if len(node.args) > 1 else 0) % len(node.shape)
    shape = [len(pieces) if axis == dim else 1 for axis in range(len(node.shape))]
    numbers = torch.arange(len(pieces), dtype=torch.int8).view(shape).expand(node.shape)
    try:
        low, high = (int(number) for number in torch.aminmax(replay_all(views, numbers)))
    except RuntimeError:  # empty, or indices without data
        return None
    piece = pieces[low] if low == high else None
    return Picked(piece, node, dim, views) if isinstance(piece, Node) else None
