"""Recognises normalisations of q and k by their effect: the length of the output does not depend on the input's.

A norm written by hand is several operations: `x * rsqrt(mean(x^2) + eps)`, `x / x.norm(dim=-1, keepdim=True)` or
`(x - x.mean(-1)) / x.std(-1)`. All of them have one vector through which every path goes, the dominator. The operations
after it are run on unit vectors of several lengths. A norm returns these vectors, centred for a LayerNorm, times a gain
that is one number or one number per channel. A few rows are enough to see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.probe.replays import Subgraph, subgraph_between
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import ancestors, capacity, dominator, is_learned
from sqrtdk.tracing.tape.node import Node, origin

# Lengths of the test rows. eps is negligible beside the long ones; a clip, x / max(|x|, 1), keeps the short ones.
_LONG, _SHORT = 1024.0, 1 / 8
_LEAST_NORMED_LENGTH = 0.2  # least length of a normalised short row, relative to a normalised long row
_RELATIVE_TOLERANCE = 2.0**-8  # relative tolerance: a few float32 roundings per operation
_UNIT_GAIN_TOLERANCE = 1e-4  # relative tolerance for a gain of 1
_MEANS = frozenset({"mean", "var", "std"})  # means of squares: dividing by their root leaves a root mean square of 1
# Operations between a norm and the vector with gain and shift.
_GAIN_AND_SHIFT = frozenset({"mul", "add", *ops.CASTS_AND_COPIES})


@dataclass(frozen=True, slots=True, eq=False)
class RowNorm:
    """A normalisation of the rows of `part.source`.

    Attributes:
        part: Its operations.
        kind: "rms", "layer", "l2" or "group".
        by: Length of the rows relative to what `kind` implies; None if unknown.
        gain: Whether each channel has its own gain inside the norm.
        axis: Axis of the vectors, counted from the end.
        learned: Node and value of a learned number that is contained in `by`.
    """

    part: Subgraph
    kind: str
    by: float | None = 1.0
    gain: bool = False
    axis: int = -1
    learned: tuple[Node, Tensor | None] | None = None


def norm_at(node: Node) -> RowNorm | None:
    """Return the normalisation whose last operation is `node`; None if none ends there."""
    if node.is_root or not node.act or not may_normalise(node):
        return None
    if node.op in ops.NORM_OPERATIONS and (main := node.main()) is not None:
        part = subgraph_between(main, node)
        return None if part is None else RowNorm(part, ops.NORM_OPERATIONS[node.op])
    source = dominator(node)[0]
    part = None if source is None else subgraph_between(source, node)
    found = None if part is None else norm_of(part)
    if found is None or found.kind == "layer" or source is None or source.op != "sub" or source.is_root:
        return found
    # c = x - mean(x); c / c.square().mean().sqrt(): the norm begins before the sub, so the part is extended to x.
    whole = dominator(source)[0]
    part = None if whole is None else subgraph_between(whole, node)
    return (None if part is None else norm_of(part)) or found


def may_normalise(node: Node) -> bool:
    """Return whether a node may be the last operation of a norm, a cheap test before the numbers are looked at.

    It may if it is a norm operator, or a product or quotient of two activations of which one is smaller: that of a norm
    holds the lengths, `x / x.norm(dim=-1, keepdim=True)`.
    """
    if node.op not in ("mul", "div"):
        return node.op in ops.NORM_OPERATIONS
    active = {parent for parent in node.parents() if parent.act}
    return len(active) > 1 and any(capacity(parent) < math.prod(node.shape) for parent in active)


def norm_within(node: Node) -> tuple[RowNorm, tuple[Node, ...]] | None:
    """Return the normalisation behind a node, through a gain and a shift after it.

    Returns:
        (the normalisation, the nodes from `node` backwards to its last operation); None if there is none.
    """
    # norm(x) * weight + bias: the operations after the norm are passed one by one.
    passed = [node]
    while (norm := norm_at(node)) is None:
        parents = [parent for parent in node.parents() if parent.act]
        if node.is_root or node.op not in _GAIN_AND_SHIFT or len(parents) != 1:
            return None
        if node.op not in ops.CASTS_AND_COPIES and not any(_is_gain(arg, node) for arg in node.args):
            return None
        node = parents[0]
        passed.append(node)
    return norm, tuple(passed)


def _is_gain(arg: object, node: Node) -> bool:
    """Return whether an operand is a constant with one number per channel."""
    return isinstance(arg, Node) and not arg.act and arg.shape[-1:] > (1,) and not is_computed_gain(arg, node)


def is_computed_gain(other: Node, node: Node) -> bool:
    """Return whether an operand holds a number per channel that is computed from a parameter.

    TimesFM's softplus(p) * 1.44 / sqrt(E) contains the scale, so it is not a plain gain. The weight w of a norm, or
    Gemma's 1 + w, starts at 1 and is a plain one.

    Args:
        other: node of the operand.
        node: node of the product or quotient.
    """
    if capacity(other) != node.shape[-1] or other.shape[-1:] != node.shape[-1:] or not is_learned(other):
        return False
    passing = ops.PASSING | {"add"}
    return origin(other, passing).op not in passing | {"parameter", "buffer"}


def norm_of(part: Subgraph) -> RowNorm | None:
    """Return the normalisation that a part of the graph performs, or None if it performs none.

    The part is run on test vectors, along the last axis and then along the one before.
    """
    if part.source.shape != part.end.shape:
        return None
    for axis in (-1, -2)[: len(part.source.shape)]:
        found = _along(part, axis) if part.source.shape[axis] > 1 else None
        if found is not None:
            return found
    return None


def _along(part: Subgraph, axis: int) -> RowNorm | None:
    """Return the normalisation along an axis, tested on a few rows if the operations allow it, else on all rows."""
    for shape in (part.sampled(axis), *(() if part.is_large else (part.source.shape,))):
        for dtype in (torch.float64, torch.float32):
            rows = torch.randn((2, *shape), dtype=dtype, generator=torch.Generator().manual_seed(0)).to(part.device)
            try:
                return _tried(part, axis, rows / rows.norm(dim=axis, keepdim=True))
            except Exception:  # an operation may not accept the dtype, the numbers or a sample
                continue
    return None


def _tried(part: Subgraph, axis: int, rows: Tensor) -> RowNorm | None:
    """Return the normalisation seen in two sets of unit vectors. A gain that fits both holds for any vector."""
    # Rows of length 1024 and 2048 go in. A norm returns unit rows times one gain for both.
    units = torch.stack([rows[0], -rows[1]])
    learned = {arg: torch.ones(arg.shape) for arg, value in _learned(part) if value is None or value.is_meta}
    long = torch.stack([part.run(_LONG * units[0], learned), part.run(2 * _LONG * units[1], learned)])
    if long.shape != units.shape:
        raise RuntimeError("not the shape of what went in")
    size, short = float(long.abs().amax()), part.run(_SHORT * units[0], learned)
    if not size or not math.isfinite(size):
        return None
    if bool((short.norm(dim=axis) < _LEAST_NORMED_LENGTH * long[0].norm(dim=axis)).any()):
        return None  # a clip, x / max(|x|, 1), which leaves short vectors short
    centred = units - units.mean(axis, keepdim=True)
    for kind, unit in ((_kind(part), units), ("layer", centred / centred.norm(dim=axis, keepdim=True))):
        others = [d for d in range(-unit.dim(), 0) if d != axis]
        gain = (long * unit).sum(others, keepdim=True) / (unit * unit).sum(others, keepdim=True)
        if bool(((long - gain * unit).abs() <= _RELATIVE_TOLERANCE * size).all()):
            return _with_gain(part, gain.double(), axis, kind)
    return None


def _with_gain(part: Subgraph, gain: Tensor, axis: int, kind: str) -> RowNorm | None:
    """Return the normalisation with its gain split into the kind's own length, a learned number and a rest."""
    learned = list(_learned(part))
    single = [(arg, value) for arg, value in learned if capacity(arg) == 1]
    channels = [arg for arg, _ in learned if len(arg.shape) >= -axis and arg.shape[axis] > 1]
    if part.is_meta and len(single) + len(channels) < len(learned):
        return None  # a learned scale per head, whose values are unknown
    low, high = (float(number) for number in torch.aminmax(gain))
    if channels or high - low > _RELATIVE_TOLERANCE * max(abs(low), abs(high)):
        return RowNorm(part, kind, gain=True, axis=axis)
    length, root = (low + high) / 2, math.sqrt(part.source.shape[axis])
    if single and part.is_meta:
        return RowNorm(part, kind, None, axis=axis, learned=single[0])
    if single and (value := single[0][1]) is not None and float(value):
        length /= float(value)
    if kind != "layer" and math.isclose(length, root, rel_tol=_UNIT_GAIN_TOLERANCE):
        kind = "rms"
    elif kind != "layer" and math.isclose(length, 1.0, rel_tol=_UNIT_GAIN_TOLERANCE):
        kind = "l2"
    by = length if kind == "l2" else length / root
    # x / x.std() leaves a root mean square of sqrt((n - 1) / n), which counts as 1 as well.
    by = next((1.0 for usual in (1.0, _degree(part)) if math.isclose(by, usual, rel_tol=_UNIT_GAIN_TOLERANCE)), by)
    return RowNorm(part, kind, by, axis=axis, learned=single[0] if single else None)


def _degree(part: Subgraph) -> float:
    """Return the root mean square after dividing by `x.std()`, whose variance divides by n - 1 instead of n."""
    n = part.source.shape[-1]
    return math.sqrt((n - 1) / n) if any(node.op in ("std", "var") for node in part.order) else 1.0


def _kind(part: Subgraph) -> str:
    return "rms" if any(node.op in _MEANS for node in part.order) else "l2"


def _learned(part: Subgraph) -> Iterator[tuple[Node, Tensor | None]]:
    """Yield the operands of the part that are computed from parameters, each with its value if known."""
    for node in part.order:
        for i, arg in enumerate(node.args):
            if isinstance(arg, Node) and not arg.act and is_learned(arg):
                yield arg, node.operands.get(i)


def name_of_gain(nodes: tuple[Node, ...]) -> str:
    """Return the name of the parameter by which a norm, or an operation after it, multiplies the channels.

    Args:
        nodes: the nodes of `norm_within`.

    Returns:
        The name; "" if there is none, or if several parameters make the gain.
    """
    for node in nodes:
        if node.op in ops.NORM_OPERATIONS or node.op == "mul":
            operands = [parent for parent in node.parents() if not parent.act and math.prod(parent.shape) > 1]
            leaves = [leaf for leaf in ancestors(operands[0]) if leaf.op == "parameter"] if operands else []
            if len(leaves) == 1:
                return leaves[0].label
    return ""
