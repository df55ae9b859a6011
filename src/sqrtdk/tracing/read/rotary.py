"""Rotary tables: the cosines and sines that a rotation multiplies by, and the factor that hides in them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node


def table_positions(node: Node) -> list[int]:
    """Positions of the arguments that are tables: constant tensors of more than one number."""
    return [i for i, arg in enumerate(node.args) if isinstance(arg, Node) and not arg.act and math.prod(arg.shape) > 1]


def amplitude_of(tables: list[tuple[Node, int]]) -> float | None:
    """cos^2 + sin^2 over the tables, as a length; on the meta device from the numbers the tables were scaled by."""
    values = [n.operands.get(i) for n, i in tables]
    if any(v is None or v.is_meta for v in values):
        numbers = {_table_scale(n.args[i]) for n, i in tables}
        return numbers.pop() if len(numbers) == 1 else None
    if any(_chained(n, tables) for n, _ in tables):
        return None
    # A real table holds cosines or sines, whose mean square is half the squared length of the pair.
    squares = [_mean_square(v) * (1 if v.is_complex() else 2) for v in values if v is not None]
    return math.sqrt(sum(squares) / len(squares))


def _chained(node: Node, tables: list[tuple[Node, int]]) -> bool:
    """Whether what `node` multiplies was multiplied by a table before: an amplitude that changes with position."""
    others = {n for n, _ in tables}
    queue = [p for p in node.parents() if p.act]
    while queue:
        current = queue.pop()
        if current in others:
            return True
        if current.op in ops.VIEWS | ops.SAME and not current.is_root:
            queue.extend(p for p in current.parents() if p.act)
    return False


def _mean_square(value: Tensor) -> float:
    return float(value.detach().abs().to(torch.float64).square().mean())


def _table_scale(node: Node) -> float:
    scale = 1.0
    while node.op in ops.VIEWS | ops.SAME | {"mul", "cat", "stack", "index", "table"}:
        if node.op == "mul":
            numbers = [n for n in (node.number(0), node.number(1)) if n is not None]
            if not numbers:
                break
            scale *= numbers[0]
        parent = node.main()
        if parent is None:
            break
        node = parent
    return scale
