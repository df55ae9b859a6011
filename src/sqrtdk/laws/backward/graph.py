"""The part of autograd's graph that lies between the operands of an attention and its output."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sqrtdk.laws.backward.handles import Edge

_PRODUCTS = ("Mul", "Mm", "Bmm")
_SAME_NUMBERS = (
    "View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy",
    "Unsqueeze", "Squeeze", "Expand", "Permute", "Transpose", "T",
)  # fmt: skip
MOST_STEPS_BACK = 2048  # behind an operand without a handle the graph goes on, through all earlier layers


def graph_place(edge: Edge) -> GradientEdge:
    """Return a place in the graph; that of a leaf is the node that adds to its `grad`."""
    return edge if isinstance(edge, GradientEdge) else get_gradient_edge(edge)


def nodes_inside(starts: Iterable[Any], ends: Collection[Any], most: int = MOST_STEPS_BACK) -> list[Any]:
    """Return the nodes on the ways from some nodes back to others, nearest first, without the ends.

    Args:
        starts: Nodes of the output and of what else the attention returns.
        ends: Nodes of the operands.
        most: Nodes that are looked at.
    """
    readers = readers_behind(starts := [*starts], ends, most)
    inside: set[Any] = set()
    stack = [end for end in ends if end in readers]
    while stack:
        for reader in readers.get(stack.pop(), ()):
            if reader not in inside:
                inside.add(reader)
                stack.append(reader)
    return [node for node in dict.fromkeys((*starts, *readers)) if node in inside]


def readers_behind(
    starts: Iterable[Any], ends: Collection[Any] = (), most: int = MOST_STEPS_BACK
) -> dict[Any, list[Any]]:
    """Return, for each node from which some nodes descend, the nodes that read it, nearest first.

    Args:
        starts: Nodes where the walk begins.
        ends: Nodes behind which it does not go on.
        most: Nodes that are looked at.
    """
    readers: dict[Any, list[Any]] = {}
    found, queue = {*starts}, deque(starts)
    while queue and len(found) < most:
        node = queue.popleft()
        for earlier, _ in node.next_functions:
            if earlier is None:
                continue
            readers.setdefault(earlier, []).append(node)
            if earlier not in found and earlier not in ends:
                found.add(earlier)
                queue.append(earlier)
    return readers


def is_one_factor(start: Any, leaf: Any) -> bool:
    """Return whether a product reads a leaf as it is, and nothing else does; also if nothing at all reads it.

    A square has another gradient than a factor, and a number that scales other tensors as well has more. What a custom
    function does with it is in its formula.

    Args:
        start: The node of an attention's output.
        leaf: The node that adds to the leaf's `grad`.
    """
    readers, node = readers_behind([start]), leaf
    while reading := readers.get(node, []):
        if len(reading) > 1:
            return False
        node = reading[0]
        kind = node.name().partition("Backward")[0]
        if kind in _PRODUCTS or own_backward([node]):
            return True
        if kind not in _SAME_NUMBERS:
            return False
    return node is leaf


def nodes_behind(start: Any) -> set[Any]:
    """Return a node and all nodes from which it descends."""
    found, stack = {start}, [start]
    while stack:
        for earlier, _ in stack.pop().next_functions:
            if earlier is not None and earlier not in found:
                found.add(earlier)
                stack.append(earlier)
    return found


def own_backward(nodes: Iterable[Any]) -> str:
    """Return the first custom autograd function among nodes: "Kernel.backward (kernel.py:12)"; "" if none."""
    for node in nodes:
        forward = getattr(type(node), "_forward_cls", None)
        if forward is not None:
            if written := getattr(forward, "written", ""):  # by a front end: a function of another framework
                return str(written)
            try:
                file, line = inspect.getsourcefile(forward.backward), inspect.getsourcelines(forward.backward)[1]
                return f"{forward.__name__}.backward ({(file or '').rpartition('/')[2]}:{line})"
            except (OSError, TypeError):
                return f"{forward.__name__}.backward"
        if node.name().startswith("GeneratedBackwardFor"):
            return str(node.name()).removeprefix("GeneratedBackwardFor_").removesuffix("Backward")
    return ""


def at_end_of_backward(call: Any) -> None:
    """Call a function at the end of the backward pass that runs now."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
