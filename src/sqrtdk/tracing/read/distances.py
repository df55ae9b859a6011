"""The squared distance written out: |q|^2 - 2 q.k + |k|^2."""

from __future__ import annotations

from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.steps import Scale, Squares, Step
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node


def is_squared_length(node: Node) -> bool:
    """Whether a tensor holds the squared lengths of activations, or of two of them added up for every pair."""
    while node.op in ops.VIEWS | ops.SAME and not node.is_root and node.pairs is None:
        parent = node.main()
        if parent is None:
            return False
        node = parent
    if node.pairs is not None:
        return node.op == "add" and is_squared_length(node.pairs.left) and is_squared_length(node.pairs.right)
    inner = node.main() if node.act and not node.is_root else None
    if inner is None:
        return False
    if node.op == "sum":
        return _is_square(inner)
    return _is_square(node) and inner.op in ("linalg_vector_norm", "norm")


def _is_square(node: Node) -> bool:
    if node.is_root:
        return False
    return (node.op == "pow" and node.number(1) == 2) or (node.op == "mul" and node.args[0] is node.args[1])


def completed(steps: tuple[Step, ...], factor: float) -> tuple[Step, ...] | None:
    """The steps on the squared distance that the innermost of `steps` make of q.k; None where they make none.

    Args:
        steps: the innermost first.
        factor: on q and k.
    """
    last = max((i for i, step in enumerate(steps) if isinstance(step, Squares)), default=None)
    if last is None:
        return None
    inner, sign = steps[: last + 1], None
    for step in inner:
        if isinstance(step, Squares):
            sign = step.sign if sign is None else sign
            if step.sign != sign:
                return None
        elif isinstance(step, Scale) and step.factor.value is not None and step.factor.per_head is None:
            factor *= step.factor.value
            sign = None if sign is None else sign * step.factor.value
        else:
            return None
    if sign is None or not abs(factor + 2 * sign) <= 1e-6 * abs(factor):
        return None
    turned = () if sign == 1 else (Scale(Factor(sign, "logits", "number")),)
    return (*turned, *steps[last + 1 :])
