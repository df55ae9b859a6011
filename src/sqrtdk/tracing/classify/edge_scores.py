"""Additive scores on the edges of a graph, which are no product of q and k.

act(a . q[target] + b . k[source]), v . act(q[target] + k[source]), or a projection of the two side by side (Velickovic
et al. 2018, arXiv:1710.10903; Brody et al. 2022, arXiv:2105.14491).
"""

from __future__ import annotations

from sqrtdk.tracing.classify.additive import CURVES
from sqrtdk.tracing.classify.gathered import rows_of
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, origin

_LOGITS = ops.VIEWS | ops.SAME | CURVES | ops.CLAMPS | {"mul", "div", "neg", "sub", "sum", "where", "masked_fill"}


def meets(node: Node) -> bool:
    """Whether `node` adds, or puts side by side, rows of two activations that were gathered by two lists."""
    if node.root is not None:
        return node.root.meets
    sides = [parent for parent in node.parents() if parent.act]
    if len(sides) < 2 or not node.shape or not (node.op in ("add", "sub") or _is_side_by_side(node)):
        return False
    lists = {rows_of(side) for side in sides}
    return (len(lists) > 1 and None not in lists) or (node.op != "cat" and any(meets(side) for side in sides))


def _is_side_by_side(node: Node) -> bool:
    axis = int(node.args[1]) if node.op == "cat" and len(node.args) > 1 else 0
    return node.op == "cat" and axis in (-1, len(node.shape) - 1)


def reads_edges(source: Node) -> bool:
    """Whether a projection of `source` reads such rows, or a curve over them."""
    node = origin(source)
    if node.op in CURVES and not node.is_root:
        main = node.main()
        return main is not None and meets(origin(main))
    return meets(node)


def is_additive(logits: Node) -> bool:
    """Whether `logits` come from such rows, without a product between."""
    node: Node | None = logits
    while node is not None and not meets(node):
        node = node.main() if node.op in _LOGITS and not node.is_root else None
    return node is not None
