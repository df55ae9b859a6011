"""Values that only the graph holds: constants without data, and tensors that were written part by part."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import numbered, replay_all
from sqrtdk.tracing.tape.node import Node

LARGEST = 2**22  # elements of one tensor
_SHAPED = frozenset({"zeros_like", "ones_like", "full_like"})  # of an activation they take the shape alone
_NEW = frozenset({"new_full", "new_zeros", "new_ones"})  # and these not even that
_DEEPEST = 200  # operations between a tensor and its numbers


def evaluate(node: Node) -> Tensor | None:
    """The values of a tensor that depends on no input and no parameter (a causal mask); None for any other."""
    try:
        with torch.no_grad():
            return _value(node, {}, 0)
    except Exception:  # it is no constant, or an operation has no CPU kernel for what it was given
        return None


def _value(node: Node, known: dict[int, Tensor], depth: int) -> Tensor:
    """As `evaluate`, with the values that are known by serial number; raises for what is no constant."""
    if node.serial not in known:
        if node.external or node.act or node.op in ops.RANDOM or depth > _DEEPEST or math.prod(node.shape) > LARGEST:
            raise LookupError(node.op)
        known[node.serial] = _computed(node, known, depth)
    return known[node.serial]


def _computed(node: Node, known: dict[int, Tensor], depth: int) -> Tensor:
    if node.op == "constant" and node.value is not None:
        return node.value
    written = node.op == "overwrite"
    made = node.args[1] if written else node
    args = [_argument(arg, made, known, depth) for arg in (made.args[1:] if written else made.args)]
    keywords = {name: "cpu" if name == "device" else value for name, value in made.kwargs.items()}
    if written:
        whole = _value(node.args[0], known, depth + 1).clone()
        made.func(part(made, whole), *args, **keywords)
        return whole
    result = made.func(*args, **keywords)
    output: Tensor = result[node.out] if node.out is not None else result
    return output


def _argument(arg: Any, node: Node, known: dict[int, Tensor], depth: int) -> Any:
    """An argument of an operation, with values in place of nodes."""
    if isinstance(arg, (list, tuple)):
        return [_argument(item, node, known, depth) for item in arg]
    if not isinstance(arg, Node):
        return arg
    try:
        return _value(arg, known, depth + 1).clone()  # the operation may write to it
    except Exception:
        if node.op not in _SHAPED | _NEW:
            raise
        return torch.empty(arg.shape if node.op in _SHAPED else ())


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
    write = next(write for write in written(node)[1] if block(write) is not None)
    for dim, n in enumerate(node.shape):
        places = part(write, numbered(node.shape, dim))
        line = places[tuple(slice(None) if d == dim else 0 for d in range(places.dim()))]
        start = int(line[0])
        if places.dim() != value.dim() or line.tolist() != list(range(start, start + places.shape[dim])):
            raise RuntimeError("a block that is no slice, or has gaps")
        if value.shape[dim] != n:
            nearest = (torch.arange(n, device=value.device) - start).clamp(0, value.shape[dim] - 1)
            value = value.index_select(dim, nearest)
    return value
