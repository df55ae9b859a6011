"""Rows that were gathered by a list of numbers: one row an edge of a graph."""

from __future__ import annotations

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node

_ROWS = {"index": 1, "index_select": 2}  # position of the numbers of the rows that are taken
LINEAR = ops.SAME | {"mul", "div", "neg"}


def rows_of(node: Node) -> int | None:
    """Serial number of the list by which the rows of `node` were gathered; None where they were not."""
    while node.root is None:
        if node.op in _ROWS:
            return _list(node.args[_ROWS[node.op]])
        parent = node.main() if node.op in ops.VIEWS | LINEAR else None
        if parent is None:
            return None
        node = parent
    return node.root.gathered_by


def _list(index: object) -> int | None:
    each = [i for i in index if i is not None] if isinstance(index, (list, tuple)) else [index]
    if len(each) == 1 and isinstance(each[0], Node) and len(each[0].shape) == 1 and not each[0].act:
        return each[0].serial
    return None
