"""Values that only the graph holds: constants without data, and tensors that were written part by part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, replay_all

LARGEST = 2**22  # elements of one tensor
_SHAPED = frozenset({"zeros_like", "ones_like", "full_like"})  # of an activation they take the shape alone
_NEW = frozenset({"new_full", "new_zeros", "new_ones"})  # and these not even that
DEEPEST = 200  # operations between a tensor and its numbers


def evaluate(node: Node) -> Tensor | None:
    """The values of a tensor that depends on no input and no parameter (a causal mask); None for any other."""
    try:
        with torch.no_grad():
            return _evaluate(node, {}, 0)
    except Exception:  # an operation that has no CPU kernel for what it was given, or whose arguments were not kept
        return None


def _evaluate(node: Node, known: dict[int, Tensor | None], depth: int) -> Tensor | None:
    if node.serial not in known:
        known[node.serial] = _computed(node, known, depth)
    return known[node.serial]


def _computed(node: Node, known: dict[int, Tensor | None], depth: int) -> Tensor | None:
    if node.op == "constant":
        return node.value
    if node.external or node.act or node.op in ops.RANDOM or (node.func is None and node.op != "overwrite"):
        return None
    if depth > DEEPEST or math.prod(node.shape) > LARGEST:
        return None
    if node.op == "overwrite":
        return _overwritten(node.args[0], node.args[1], known, depth)
    args = _arguments(node, node.args, known, depth)
    if args is None:
        return None
    result = node.func(*args, **_keywords(node))
    output: Tensor = result[node.out] if node.out is not None else result
    return output


def _overwritten(old: Node, write: Node, known: dict[int, Tensor | None], depth: int) -> Tensor | None:
    """What a constant is after an operation wrote to a part of it."""
    before = _evaluate(old, known, depth + 1)
    args = _arguments(write, write.args[1:], known, depth)
    if before is None or args is None:
        return None
    after = before.clone()
    write.func(part(write, after), *args, **_keywords(write))
    return after


def _keywords(node: Node) -> dict[str, Any]:
    return {name: "cpu" if name == "device" else value for name, value in node.kwargs.items()}


def _arguments(node: Node, given: Sequence[Any], known: dict[int, Tensor | None], depth: int) -> list[Any] | None:
    """Arguments with values in place of nodes; None where one is not known."""
    args: list[Any] = []
    for arg in given:
        items = arg if isinstance(arg, (list, tuple)) else [arg]
        values = [_evaluate(item, known, depth + 1) if isinstance(item, Node) else item for item in items]
        if node.op in _SHAPED and isinstance(arg, Node) and values == [None]:
            values = [torch.empty(arg.shape)]
        if node.op in _NEW and isinstance(arg, Node) and values == [None]:
            values = [torch.empty(())]
        if any(isinstance(item, Node) and value is None for item, value in zip(items, values, strict=True)):
            return None
        values = [value.clone() if isinstance(value, Tensor) else value for value in values]  # it may write in place
        args.append(values if isinstance(arg, (list, tuple)) else values[0])
    return args


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
