"""Operations whose computation is not seen: telling by name and shapes those that may be an attention."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sqrtdk.tracing.watch.graph import Node

_PRODUCT = re.compile(r"(?<![a-z])(?:linear|gemm|gemv|matmul|mm)(?![a-z])")
Shape = tuple[int, ...]
_NAMES = re.compile(r"attn|attention|flash|(?<![a-z])(?:mha|mla)(?![a-z])")


def may_attend(name: str, operands: Sequence[Shape], result: Shape) -> bool:
    """Whether an operation may be an attention: its name says so, or it takes q, k and v, packed or apart.

    Args:
        name: without its namespace.
        operands: shapes of the activations among its operands.
        result: shape of its first output.
    """
    if not operands:
        return False
    if _NAMES.search(name.lower()) or sum(len(shape) >= 2 for shape in operands) >= 3:
        return True
    if any(result in _without(shape, 3) for shape in operands):
        return True  # q, k and v in one tensor
    pairs = [(q, kv) for q in operands for kv in operands if q == result and len(kv) == len(q) + 1 and len(q) >= 3]
    return any(k[-1] == q[-1] for q, kv in pairs for k in _without(kv, 2))


def projects(node: Node) -> bool:
    """Whether an operation of a library's own is a product with weights of the model, by its name and its operands."""
    if node.func is None or node.func.namespace in ("aten", "prims", "prim") or not _PRODUCT.search(node.op):
        return False
    return any(not parent.act and len(parent.shape) >= 2 for parent in node.parents())


def is_dequantised(node: Node) -> bool:
    """Whether a quantised activation becomes floating-point numbers again; a quantised weight is none."""
    parents = list(node.parents())
    return node.op == "dequantize" and bool(parents) and parents[0].func is not None


def _without(shape: Shape, packed: int) -> list[Shape]:
    """The shape without each of the axes, the last apart, that hold `packed` tensors."""
    return [shape[:i] + shape[i + 1 :] for i, n in enumerate(shape[:-1]) if n == packed and len(shape) >= 4]
