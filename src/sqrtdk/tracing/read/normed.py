"""A normalised vector: the operations that it is, and what they normalised."""

from __future__ import annotations

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, dominator


def normed(node: Node) -> tuple[Node | None, tuple[Node, ...]]:
    """What was normalised, None where it is no single vector, and `node` with the operations inside of its gains."""
    inner, operations = node, [node]
    while inner.op in ("mul", "add", *ops.SAME) and (main := inner.main()) is not None and main.norm is not None:
        inner = main
        operations.append(inner)
    source = inner.main() if inner.op in ops.NORMS or len(list(inner.parents())) < 2 else dominator(inner)[0]
    return source, tuple(operations)
