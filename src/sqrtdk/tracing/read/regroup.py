"""Following values through views and through pieces that were taken apart and put together in another order."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, replay

REJOINED = frozenset({"cat", "stack"})


def regrouped(node: Node, start: Callable[[Node], Tensor | None]) -> Tensor | None:
    """Values in the layout of `node`, followed from where they start; None where an operation is no regrouping.

    What does not move values (a factor, a rotation, a normalisation) is passed over.

    Args:
        node: where they are wanted.
        start: gives the values of a node at which they start, None for any other.
    """
    try:
        return _followed(node, start, {})
    except (RuntimeError, IndexError):
        return None


def _followed(node: Node, start: Callable[[Node], Tensor | None], known: dict[Node, Tensor | None]) -> Tensor | None:
    if node not in known:
        value = start(node)
        known[node] = value if value is not None or node.is_root else _moved(node, start, known)
    return known[node]


def _moved(node: Node, start: Callable[[Node], Tensor | None], known: dict[Node, Tensor | None]) -> Tensor | None:
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
