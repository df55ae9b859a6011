"""An attention that could not be followed to its end: the formula up to the point where it was lost."""

from __future__ import annotations

from sqrtdk.tracing.read.eager import read_eager
from sqrtdk.tracing.read.side import follow, unasked
from sqrtdk.tracing.tell import formula
from sqrtdk.tracing.tell.sight import look
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.marks import SoftmaxEntry, Weighing
from sqrtdk.tracing.watch.recorder import Operands, Unweighted

Lost = Weighing | Unweighted | Operands


def tell_lost(seen: Lost) -> str | None:
    """The formula of what was seen; None where there is no score of q and k in it.

    `softmax(0.125 * q.k)` of a softmax, `0.125 * q.k + causal` of logits that met values as they are,
    `attend(0.125 * q, rope(k), v)` of an operation whose computation is not seen.
    """
    with unasked():
        return _told(seen)


def _told(seen: Lost) -> str | None:
    if isinstance(seen, Operands):
        operands = (formula.operand(follow(node, name), name) for name, node in seen.nodes.items())
        return f"{seen.name}({', '.join(operands)})"
    logits = _as_softmax(seen) if isinstance(seen, Unweighted) else seen
    try:
        reading = read_eager(logits, logits.weights, logits.weights, heads_hint=None)
    except Exception:  # a reading that fails is one of the ways to be lost
        return _by_names(logits.node)
    if isinstance(reading, str) or (reading.operands is None and reading.score != "additive"):
        return None
    steps = look(reading).steps
    return formula.logits(reading, steps) if isinstance(seen, Unweighted) else formula.write(reading, steps)


def _by_names(node: Node) -> str | None:
    """The operations between the product and the softmax by their names alone."""
    names: list[str] = []
    while node.product is None:
        main = node.main() if node.products else None
        if main is None:
            return None
        names += [] if node.op in ops.VIEWS | ops.SAME else [node.op]
        node = main
    return f"softmax(unknown({', '.join(dict.fromkeys(reversed(names)))})(q.k))"


def _as_softmax(seen: Unweighted) -> Weighing:
    entry = SoftmaxEntry("", tuple(seen.logits.shape), "")
    return Weighing(seen.node, seen.logits, seen.logits, -1, "", entry, flex=False, stored=seen.logits.dtype)
