"""Pairs of rows: two activations that met element by element, spread over one another by broadcasting.

What comes of them is told later: a product of queries and keys (`sums`), an additive score (`additive`), a gate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.marks import Pairs

DISTANCES = frozenset({"_cdist_forward", "_euclidean_dist"})
LENGTHS = frozenset({"linalg_vector_norm", "norm"})
_REDUCTIONS = frozenset({"mean", "var", "std", "sum"}) | LENGTHS
_PAIRING = frozenset({"mul", "add", "sub"}) | DISTANCES
_GROWING = frozenset({"expand", "repeat", "repeat_interleave", "index", "index_select"})
_SPREADS = frozenset({"expand", "repeat"})
_ELEMENTWISE = _SPREADS | LENGTHS | ops.SAME | ops.CLAMPS | {"mul", "div"}
_DEEPEST = 8  # operations of a normalisation


def note_pairs(node: Node) -> None:
    """Mark a node in which rows of one activation meet rows of another, element by element."""
    if node.op == "cat":
        _note_side_by_side(node)
    elif node.op in _PAIRING and len(node.args) > 1 and is_act(node.args[0]) and is_act(node.args[1]):
        _note_spread(node, node.args[0], node.args[1])
    elif node.op == "addcmul" and is_act(node.args[1]) and is_act(node.args[2]):
        _note_spread(node, node.args[1], node.args[2])


def _note_spread(node: Node, left: Node, right: Node) -> None:
    if node.op in DISTANCES:
        node.pairs = Pairs(left, right, both=True)
        return
    left, right = _unspread(left), _unspread(right)
    if left is right or _is_length(left) or _is_length(right) or node.kwargs.get("alpha", 1) != 1:
        return
    first = len(node.shape) > 2  # a leading axis is the batch's
    owners = {a == 1 for a, b in [*facing(left, right, node.shape)][first:] if (a == 1) != (b == 1)}
    if owners:
        node.pairs = Pairs(left, right, both=len(owners) == 2)


def _is_length(node: Node) -> bool:
    """Whether it is made of the lengths of vectors, `x.pow(2).mean(-1, keepdim=True)`: it meets those, and no rows."""
    while node.act and not node.is_root and 1 in node.shape[-2:]:
        main = node.main()
        if main is None:
            return False
        if node.op in _REDUCTIONS and 1 not in main.shape[-2:]:
            return True
        node = main
    return False


def _note_side_by_side(node: Node) -> None:
    """Two activations that were repeated for every row of the other, features beside features."""
    parts = node.args[0]
    dim = int(node.args[1]) if len(node.args) > 1 else 0
    if len(parts) != 2 or not all(is_act(part) for part in parts) or dim % len(node.shape) not in _features(node):
        return
    grown = [_is_grown(part) for part in parts]
    if any(grown):
        node.pairs = Pairs(parts[0], parts[1], both=all(grown))


def _features(node: Node) -> set[int]:
    last = len(node.shape) - 1
    return {last, 1} if last == 3 else {last}  # 1 before a convolution


def _is_grown(node: Node) -> bool:
    """Whether an activation was repeated on its way here."""
    while node.op in ops.VIEWS | ops.SAME and not node.is_root:
        parent = node.main()
        if parent is None:
            break
        if node.op in _GROWING and math.prod(node.shape) > math.prod(parent.shape):
            return True
        node = parent
    return False


def _unspread(node: Node) -> Node:
    """What was spread over axes of size 1, before that."""
    source = node
    while not source.is_root and source.op in _SPREADS | ops.SAME:
        parent = source.main()
        if parent is None:
            break
        sizes = (1,) * (len(source.shape) - len(parent.shape)) + parent.shape
        if any(size not in (1, spread) for size, spread in zip(sizes, source.shape, strict=True)):
            break
        source = parent
    if source.is_root:
        return source
    for axis in _repeated(source):  # normalised after it was spread
        sizes = tuple(1 if d == axis else n for d, n in enumerate(source.shape))
        source = step("slice", torch.ops.aten.slice.Tensor, sizes, source, axis, 0, 1)
    return source


def _repeated(node: Node) -> list[int]:
    """The axes along which a tensor is one number repeated."""
    return [axis for axis in _constant(node, _DEEPEST) if node.shape[axis] > 1]


def _constant(node: Node, depth: int) -> set[int]:
    axes = {axis for axis, size in enumerate(node.shape) if size == 1}
    if node.is_root or not depth or node.op not in _ELEMENTWISE:
        return axes
    parents = [parent for parent in node.parents() if parent.act]
    if not parents or any(len(parent.shape) != len(node.shape) for parent in parents):
        return axes
    return axes | set.intersection(*(_constant(parent, depth - 1) for parent in parents))


def is_act(arg: Any) -> bool:
    """Whether an argument is an activation."""
    return isinstance(arg, Node) and arg.act


def facing(left: Node, right: Node, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The sizes of both along each axis of the shape that they are spread to."""
    sizes = ((1,) * (len(shape) - len(node.shape)) + node.shape for node in (left, right))
    return zip(*sizes, strict=True)


def step(op: str, func: Any, shape: tuple[int, ...], *args: Any, operands: Any = None) -> Node:
    """A node for an operation that never ran: one of those that lead from the sum to its product."""
    main = next(arg for arg in args if is_act(arg))
    node = Node(op, shape, func=func, args=args, act=True, site=main.site)
    node.learned = main.learned
    node.products, node.roots = main.products, main.roots
    node.operands = operands or {}
    return node
