"""The lineage graph: one small node for every tensor that an operation gave, linked to what it was made from.

A node holds a tensor only where a later reading needs one: at roots (projections, inputs, sums of two branches) and at
normalised q and k an alias of the values, elsewhere aliases of what they met (masks, biases, factors, tables). Nodes
live as long as a tensor that descends from them, and roots cut the chain, so a trace holds about one block's
activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.node import Node, back


def replay(node: Node, value: Tensor) -> Tensor:
    """Apply the view that `node` is to `value`, which has the shape of the node's parent."""
    if node.op in ops.RESHAPES:
        return value.reshape(node.shape)
    if node.op == "as_strided":  # its strides are those of a tensor without gaps, or there is no telling
        value = value.contiguous()
    if node.op == "view_as_complex" and value.dtype in (torch.bfloat16, torch.float16):
        value = value.float()  # as the model's own, whose cast moved nothing and is passed over
    main = node.main()
    args = [
        [node.operands.get((i, j), item) for j, item in enumerate(arg)]
        if isinstance(arg, list)
        else (value if arg is main else node.operands.get(i, arg))
        for i, arg in enumerate(node.args)
    ]
    result = node.func(*args, **node.kwargs)
    output: Tensor = result[node.out] if node.out is not None else result
    return output


def replay_all(views: Iterable[Node], value: Tensor) -> Tensor:
    """Apply one view after the other."""
    for view in views:
        value = replay(view, value)
    return value


def numbered(shape: tuple[int, ...], axis: int) -> Tensor:
    """0, 1, 2 ... along an axis, spread over the shape."""
    line = torch.arange(shape[axis], device="cpu")
    return line.view([-1 if d == axis else 1 for d in range(len(shape))]).expand(shape)


def dominator(node: Node) -> tuple[Node | None, list[Node]]:
    """The nearest node that every activation path from `node` passes through, and the nodes in between.

    Nodes are numbered in the order of creation, so always taking the youngest of the frontier visits children
    before parents; when the frontier is a single node, every path has met in it.
    """
    frontier = {p for p in node.parents() if p.act}
    between = [node]
    while frontier:
        youngest = max(frontier, key=lambda n: n.serial)
        if len(frontier) == 1:
            return youngest, between
        frontier.remove(youngest)
        if youngest.is_root:
            return None, between
        between.append(youngest)
        frontier.update(p for p in youngest.parents() if p.act)
    return None, between


def ancestors(node: Node, *, closed: frozenset[str] = frozenset()) -> Iterator[Node]:
    """The node and all that it was made from, each once, depth first; not what went into operations of `closed`."""
    queue, known = [node], set[Node]()
    while queue:
        current = queue.pop()
        if current not in known:
            known.add(current)
            yield current
            if current.op not in closed:
                queue.extend(current.parents())


def is_learned(node: Node) -> bool:
    """Whether a parameter is among what it was made from."""
    return any(leaf.op == "parameter" for leaf in ancestors(node))


def capacity(node: Node) -> int:
    """How many numbers a tensor can hold that differ: those of the smallest among the views that lead to it."""
    return min(math.prod(view.shape) for view in back(node))


def alias(tensor: Tensor) -> Tensor:
    """Another tensor object on the same storage: holding it does not keep the graph's key alive."""
    with torch.no_grad():
        return tensor.detach()
