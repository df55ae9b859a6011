"""Reading a factor: what number, or what number a head, a multiplication puts on q, k, or the logits."""

from __future__ import annotations

import math

import torch

from sqrtdk.trace.graph import Node
from sqrtdk.trace.records import Factor


def read_factor(node: Node, position: int, where: str, heads_axis: int) -> Factor | None:
    """The factor that `node` multiplies by; None when it is no single number and no number a head."""
    inverse = node.op == "div"
    arg = node.args[position]
    number = node.number(position)
    if number is not None:
        source = "number" if not isinstance(arg, Node) else _source(arg)
        learned = isinstance(arg, Node) and _learned(arg)
        return Factor(1 / number if inverse and number else number, where, source, learned=learned)
    if not isinstance(arg, Node):
        return None
    shape = arg.shape
    if math.prod(shape) == 1:
        return Factor(None, where, _source(arg), learned=_learned(arg))
    if len(shape) < 1 or shape[-1] != 1 or (len(shape) >= 2 and shape[-2] != 1 and heads_axis == -3):
        return _uniform(node, position, where, inverse)
    value = node.operands.get(position)
    per_head = len(shape) >= -heads_axis and shape[heads_axis] == math.prod(shape)
    if not per_head:
        return _uniform(node, position, where, inverse)
    if value is None or value.is_meta:
        return Factor(None, where, _source(arg), learned=_learned(arg))
    numbers = [1 / float(v) if inverse else float(v) for v in value.flatten()]
    mean = math.exp(sum(math.log(abs(v)) for v in numbers) / len(numbers)) if all(numbers) else 0.0
    return Factor(mean, where, _source(arg), per_head=tuple(numbers), learned=_learned(arg))


def _uniform(node: Node, position: int, where: str, inverse: bool) -> Factor | None:
    """A tensor that holds one number everywhere is that number."""
    value = node.operands.get(position)
    if value is None or value.is_meta or value.is_complex() or not value.numel():
        return None
    low, high = (float(v) for v in torch.aminmax(value))
    if low != high or not low:
        return None
    return Factor(1 / low if inverse else low, where, "tensor")


def describe(factor: Factor) -> str:
    """A factor in few characters, for a stage's detail."""
    number = "?" if factor.value is None else f"{factor.value:.4g}"
    return f"{number} ({factor.source})" if factor.source != "number" else number


def _source(node: Node) -> str:
    name = _leaf_name(node)
    if name:
        return f"parameter {name}"
    return "0-d tensor" if not node.shape else "tensor"


def _leaf_name(node: Node) -> str:
    queue = [node]
    while queue:
        current = queue.pop()
        if current.op in ("parameter", "buffer"):
            return current.label
        queue.extend(current.parents())
    return ""


def _learned(node: Node) -> bool:
    queue = [node]
    while queue:
        current = queue.pop()
        if current.op == "parameter":
            return True
        queue.extend(current.parents())
    return False
