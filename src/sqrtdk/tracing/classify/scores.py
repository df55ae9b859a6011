"""Scores of queries and keys that are no product: additive ones and squared distances."""

from __future__ import annotations

from sqrtdk.tracing.classify.additive import behind, summed_by_hand
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node

_PASSED = ops.VIEWS | ops.SAME


def score_of(node: Node) -> str | None:
    """What `node` is: "additive", "distance" (|q - k|^2, its sign apart), or None for any other."""
    if node.root is not None:
        return "additive" if node.root.additive else None
    if node.op != "sum":
        return None
    return "additive" if summed_by_hand(node) else "distance" if _sums_squared_differences(node) else None


def descends_from_score(node: Node) -> bool:
    """Whether `node` is a score, or was made from one by operations on single numbers."""
    while score_of(node) is None:
        parent = node.main()
        if parent is None or node.is_root or not parent.act:
            return False
        node = parent
    return True


def _sums_squared_differences(node: Node) -> bool:
    """((q - k) ** 2).sum(-1) over pairs of positions."""
    main = node.main()
    squares = behind(main, _PASSED) if main is not None else None
    if squares is None or not _squares(squares):
        return False
    main = squares.main()
    difference = behind(main, _PASSED) if main is not None else None
    if difference is None or difference.op != "sub" or len(difference.shape) < 4:
        return False
    return difference.is_root or sum(p.act for p in difference.parents()) > 1


def _squares(node: Node) -> bool:
    twice = len(node.args) == 2 and node.args[0] is node.args[1]
    return (node.op == "pow" and node.number(1) == 2) or (node.op == "mul" and twice)
