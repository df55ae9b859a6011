"""Tensors written part by part: what was written where, and values brought from a part into the whole."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, replay_all


def written(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """What a tensor was before it was written to, and the writes, the first one first."""
    writes: tuple[Node, ...] = ()
    while node.op == "overwrite":
        node, new = node.args
        writes = (new, *writes)
    return node, writes


def block(write: Node) -> Node | None:
    """The logits that a write copied; None for any other write."""
    source = write.args[1] if write.op == "copy" and len(write.args) > 1 else None
    return source if isinstance(source, Node) and source.products else None


def part(write: Node, whole: Tensor) -> Tensor:
    """The view of `whole` that was written to."""
    path: list[Node] = []
    view = write.args[0]
    while view.shape != whole.shape and view.op in ops.VIEWS:
        path.append(view)
        view = view.args[0]
    return replay_all(reversed(path), whole)


def spread(node: Node, value: Tensor) -> Tensor:
    """The whole of which `value` is the first block of logits written to it; elsewhere its nearest entry.

    Raises:
        RuntimeError: the block is no box.
    """
    _, writes = written(node)
    view = next(write.args[0] for write in writes if block(write) is not None)
    starts = [0] * len(node.shape)
    while view.op == "slice" and view.shape != node.shape:
        dim = int(view.args[1]) if len(view.args) > 1 else 0
        start = view.args[2] if len(view.args) > 2 else 0
        step = view.args[4] if len(view.args) > 4 else 1
        size = view.args[0].shape[dim]
        first = start or 0
        starts[dim] += min(first + size if first < 0 else first, size)
        if step != 1:
            raise RuntimeError("a block with gaps")
        view = view.args[0]
    if view.shape != node.shape or value.dim() != len(starts):
        raise RuntimeError("a block that is no slice")
    for dim, (start, n) in enumerate(zip(starts, node.shape, strict=True)):
        if value.shape[dim] != n:
            nearest = (torch.arange(n, device=value.device) - start).clamp(0, value.shape[dim] - 1)
            value = value.index_select(dim, nearest)
    return value
