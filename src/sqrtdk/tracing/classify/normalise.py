"""Normalisations of q and k, by an operator or written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, Norm

_REDUCTIONS = frozenset({"mean", "var", "std", "linalg_vector_norm", "norm", "sum"})


def normalise(node: Node, active: Sequence[Node]) -> None:
    """Mark sizes (a reduced root) and normalisations (a root over its own size, then per-channel gains)."""
    name = node.op
    reduced = bool(node.shape) and node.shape[-1] == 1 and bool(active[0].shape) and active[0].shape[-1] > 1
    if name in ops.NORMS:
        node.norm = Norm(ops.NORMS[name])
    elif name in _REDUCTIONS and reduced and not active[0].size:
        node.size = "rms" if name in ("mean", "var", "std") else "l2"
    elif name in ("mul", "div"):
        _multiplied(node, active)
    elif all(p.size for p in active):
        node.size = active[0].size
    elif name in ops.SAME or (name == "add" and len(active) == 1 and _is_gain(node)):
        node.norm = active[0].norm


def _multiplied(node: Node, active: Sequence[Node]) -> None:
    sizes = [p for p in active if p.size]
    if sizes and len(sizes) < len(active):
        node.norm = Norm(sizes[0].size or "")
    elif sizes:
        node.size = sizes[0].size
    elif len(active) == 1 and active[0].norm and node.op == "mul" and _is_gain(node):
        node.norm = replace(active[0].norm, gain=True)


def _is_gain(node: Node) -> bool:
    """Whether the constant operand has one number a channel, not one number for all."""
    for arg in node.args:
        if isinstance(arg, Node) and not arg.act:
            return bool(arg.shape) and arg.shape[-1] > 1
    return False
