"""Normalisations of q and k, by an operator or written by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sqrtdk.tracing.classify.lengths import LENGTHS, REDUCTIONS, clips, learned_gain, numerator
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.marks import Norm

_ALIKE = 1e-3  # two constants that are one


def normalise(node: Node, active: Sequence[Node]) -> None:
    """Mark sizes (a reduced root) and normalisations (a root over its own size, then per-channel gains)."""
    name = node.op
    source = active[0].shape
    reduced = bool(node.shape) and node.shape[-1] == 1 and bool(source) and source[-1] > 1
    reduced |= name in LENGTHS and node.shape[-2:] == (1, *source[-1:]) and source[-2:-1] > (1,)
    if name in ops.NORMS:
        node.norm = Norm(ops.NORMS[name])
    elif name in REDUCTIONS and reduced and not active[0].size:
        node.size = "rms" if name in ("mean", "var", "std") else "l2"
    elif name in ("mul", "div"):
        _multiplied(node, active)
    elif all(p.size for p in active):
        node.size = None if clips(node, active[0]) else active[0].size
    elif name in ops.SAME or (name == "add" and len(active) == 1 and _is_gain(node)):
        node.norm = active[0].norm


def _multiplied(node: Node, active: Sequence[Node]) -> None:
    sizes = [p for p in active if p.size]
    if sizes and len(sizes) < len(active):
        divided = next(p for p in active if not p.size)
        kind = "layer" if sizes[0].size == "rms" and _is_centred(divided) else sizes[0].size or ""
        axis = _axis(sizes[0])
        norm = _of_length(kind, numerator(sizes[0], divided, node.op), divided.shape[axis], axis)
        node.norm = replace(norm, learned=learned_gain(sizes[0], node.op))
    elif sizes:
        node.size = sizes[0].size
    elif len(active) == 1 and active[0].norm and node.op == "mul" and _is_gain(node):
        node.norm = replace(active[0].norm, gain=True)


def _of_length(kind: str, by: float, width: int, axis: int) -> Norm:
    """A normalisation to `by` times the length of its kind; sqrt(width) times unit length is unit root mean square."""
    for name, other, times in (("l2", "rms", math.sqrt(width)), ("rms", "l2", 1.0 / math.sqrt(width))):
        if kind == name and width > 1 and math.isclose(by, times, rel_tol=_ALIKE):
            return Norm(other, axis=axis)
    return Norm(kind, axis=axis, by=1.0 if math.isclose(by, 1.0) else by)


def _is_centred(node: Node) -> bool:
    """Whether its mean was subtracted from a vector, by an operation of its own."""
    while node.op in ops.SAME and (main := node.main()) is not None:
        node = main
    subtracted = node.args[1] if node.op == "sub" and len(node.args) > 1 else None
    while isinstance(subtracted, Node) and subtracted.op in ops.SAME | ops.VIEWS:
        subtracted = subtracted.main()
    return isinstance(subtracted, Node) and subtracted.op == "mean" and subtracted.size is not None


def _axis(size: Node) -> int:
    """The axis over which a size was taken: -1, or -2 for the length of columns."""
    while size.op not in REDUCTIONS:
        parent = size.main()
        if parent is None:
            return -1
        size = parent
    return -2 if len(size.shape) > 1 and size.shape[-2] == 1 and size.shape[-1] > 1 else -1


def _is_gain(node: Node) -> bool:
    """Whether the constant operand has one number a channel, not one number for all."""
    for arg in node.args:
        if isinstance(arg, Node) and not arg.act:
            return bool(arg.shape) and arg.shape[-1] > 1
    return False
