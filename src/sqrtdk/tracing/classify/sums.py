"""Products of queries and keys that are no matrix product: (q * k).sum(-1), |q - k|^2 summed, a matrix times a vector.

Each is read as the product of two matrices, (N, R, E) by (N, E, C), that it comes to. Written by hand it is one only
when the sum enters a softmax: the same multiplication gates, scales and pools elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sqrtdk.tracing.classify.scene import Made, Scene
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, Pairs, Product, alias, ancestors

_aten = torch.ops.aten
_PAIRING = frozenset({"mul", "add", "sub"})
_GROWING = frozenset({"expand", "repeat", "repeat_interleave", "index", "index_select"})
_SUMS = frozenset({"sum", "mean"})
_NORMS = frozenset({"linalg_vector_norm", "norm"})
_DISTANCES = frozenset({"_cdist_forward", "_euclidean_dist"})
_SPREADS = frozenset({"expand", "repeat"})
_ELEMENTWISE = _SPREADS | _NORMS | ops.SAME | ops.CLAMPS | {"mul", "div"}
_DEEPEST = 8  # operations of a normalisation


# -- while the model runs ----------------------------------------------------------------------------------------------


def note_pairs(node: Node) -> None:
    """Mark a node in which rows of one activation meet rows of another, element by element."""
    if node.op == "cat":
        _note_side_by_side(node)
    left, right = node.args[:2] if node.op in _PAIRING | _DISTANCES and len(node.args) > 1 else (None, None)
    if not (isinstance(left, Node) and isinstance(right, Node) and left.act and right.act):
        return
    if node.op in _DISTANCES:
        node.pairs = Pairs(left, right, both=True)
        return
    left, right = _unspread(left), _unspread(right)
    if left is right or left.size or right.size:
        return
    first = len(node.shape) > 2  # a leading axis is the batch's
    owners = {a == 1 for a, b in [*_facing(left, right, node.shape)][first:] if (a == 1) != (b == 1)}
    if owners:
        node.pairs = Pairs(left, right, both=len(owners) == 2)


def _note_side_by_side(node: Node) -> None:
    """Two activations that were repeated for every row of the other, features beside features."""
    parts = node.args[0]
    dim = int(node.args[1]) if len(node.args) > 1 else 0
    if len(parts) != 2 or not all(_is_act(part) for part in parts) or dim % len(node.shape) not in _features(node):
        return
    grown = [_is_grown(part) for part in parts]
    if any(grown):
        node.pairs = Pairs(*parts, both=all(grown))


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


def note_sum(scene: Scene, made: Made) -> None:
    """Mark a sum over the features of pairs."""
    way = _way(made.node)
    if way is not None:
        measured = largest(scene, made) if way.distance is None else None
        made.node.summed = Product(made.tensor.dtype, measured, way.distance)


def note_weighted_sum(scene: Scene, made: Made, source: Node, weight: Node) -> None:
    """Mark a product of pairs with a vector of one number a feature, as einsum sums over three operands."""
    position = next((i for i, arg in enumerate(made.node.args) if arg is weight), None)
    while source.pairs is None and not source.is_root and source.op in ops.VIEWS | ops.SAME:
        main = source.main()
        if main is None or source.shape[-1] != main.shape[-1] or (source.op == "permute" and _moves(source)):
            return
        source = main
    if source.pairs is None or source.op != "mul" or position not in made.tensors:
        return
    left, vector = source.pairs.left, alias(made.tensors[position]).flatten()
    if vector.shape != left.shape[-1:]:
        return
    gained = _step("mul", _aten.mul.Tensor, left.shape, left, Node(weight.op, vector.shape), operands={1: vector})
    made.node.pairs = Pairs(gained, source.pairs.right, source.pairs.both)
    made.node.summed = Product(made.tensor.dtype, largest(scene, made))


def _moves(node: Node) -> bool:
    return list(node.args[1]) != sorted(node.args[1])


def largest(scene: Scene, made: Made) -> torch.Tensor | None:
    """The largest |product|, as it was stored."""
    if not scene.products or made.tensor.is_meta or not made.tensor.numel():
        return None
    low, high = torch.aminmax(made.tensor.detach())
    return torch.maximum(high, -low)


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
    if source.norm is None or source.is_root:
        return source
    for axis in _repeated(source):  # normalised after it was spread
        sizes = tuple(1 if d == axis else n for d, n in enumerate(source.shape))
        source = _step("slice", _aten.slice.Tensor, sizes, source, axis, 0, 1)
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


def _facing(left: Node, right: Node, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The sizes of both along each axis of the shape that they are spread to."""
    sizes = ((1,) * (len(shape) - len(node.shape)) + node.shape for node in (left, right))
    return zip(*sizes, strict=True)


# -- once a softmax asks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """How pairs came to a sum over their features.

    Attributes:
        pairs: of what.
        shape: of the pairs, before the sum.
        axes: which of its axes both share (batch), only the left has (rows), only the right has (columns), and the sum
            is over (features).
        factors: multiplications by a number between the two, outermost first.
        distance: see `Product`.
    """

    pairs: Pairs
    shape: tuple[int, ...]
    axes: tuple[list[int], list[int], list[int], list[int]]
    factors: tuple[Node, ...]
    distance: int | None


def _way(node: Node) -> _Way | None:
    """From a sum back to the pairs; None where it sums no pairs, or over an axis that only one of the two has."""
    if node.op in _DISTANCES and node.pairs is not None:
        return _of_distances(node, node.pairs)
    if node.op in ops.CONTRACTIONS and node.pairs is not None:
        dims = max(len(node.pairs.left.shape), len(node.pairs.right.shape))
        shape = tuple(max(sizes) for sizes in _facing(node.pairs.left, node.pairs.right, (0,) * dims))
        axes = _sorted(node.pairs, shape, -1)
        return None if axes is None else _Way(node.pairs, shape, axes, (), None)
    if node.op not in _SUMS | _NORMS or not isinstance(inner := node.args[0], Node):
        return None
    distance = 1 if node.op in _NORMS else None
    if distance and node.number(1) != 2:
        return None
    factors: list[Node] = []
    while inner.pairs is None:
        main = inner.main()
        if main is None or inner.is_root:
            return None
        if _squares(inner) and distance is None:
            distance = 2
        elif _by_number(inner):
            factors.append(inner)
        elif inner.op not in ops.SAME:
            return None
        inner = main
    if inner.op != ("mul" if distance is None else "sub") or (distance and (factors or node.op == "mean")):
        return None
    dims = node.args[2 if node.op in _NORMS else 1] if len(node.args) > 1 + (node.op in _NORMS) else None
    axes = _sorted(inner.pairs, inner.shape, dims)
    return None if axes is None else _Way(inner.pairs, inner.shape, axes, tuple(factors), distance)


def _of_distances(node: Node, points: Pairs) -> _Way | None:
    """Of cdist, which has a kernel of its own."""
    if node.op == "_cdist_forward" and node.args and node.number(2) != 2:
        return None
    left = _step("unsqueeze", _aten.unsqueeze.default, (*points.left.shape[:-1], 1, points.left.shape[-1]), points.left, -2)
    right = _step("unsqueeze", _aten.unsqueeze.default, (*points.right.shape[:-2], 1, *points.right.shape[-2:]), points.right, -3)
    pairs, shape = Pairs(left, right, both=True), (*node.shape, left.shape[-1])
    axes = _sorted(pairs, shape, -1)
    return None if axes is None else _Way(pairs, shape, axes, (), 1)


def _squares(node: Node) -> bool:
    return (node.op == "pow" and node.number(1) == 2) or (node.op == "mul" and node.args[0] is node.args[1])


def _by_number(node: Node) -> bool:
    if node.op == "neg":
        return True
    return node.op in ("mul", "div") and any(node.number(i) is not None for i in (0, 1) if not _is_act(node.args[i]))


def _is_act(arg: Any) -> bool:
    return isinstance(arg, Node) and arg.act


def _sorted(
    pairs: Pairs, shape: tuple[int, ...], dims: Any
) -> tuple[list[int], list[int], list[int], list[int]] | None:
    """Axes by who has them: batch, rows, columns, features; None where the sum is not over what both have."""
    every = range(len(shape))
    over = set(every) if not dims else {d % len(shape) for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
    batch, rows, columns, features = axes = ([], [], [], [])  # type: tuple[list[int], list[int], list[int], list[int]]
    for axis, (left, right) in zip(every, _facing(pairs.left, pairs.right, shape), strict=True):
        if left == right:
            (features if axis in over else batch).append(axis)
        elif axis in over:
            return None
        else:
            (columns if left == 1 else rows).append(axis)
    return axes if features and (rows or columns) else None


def settle(logits: Node) -> None:
    """Logits enter a softmax: where they descend from sums over pairs, these are products."""
    if logits.products or not logits.act:
        return
    behind = list(ancestors(logits))
    sums = {node: way for node in behind if node.summed is not None and (way := _way(node)) is not None}
    if not sums:
        return
    for node in sorted(behind, key=lambda n: n.serial):
        if node in sums:
            _become_product(node, sums[node])
        elif node.act and not node.is_root:
            node.products = frozenset[Node]().union(*(parent.products for parent in node.parents()))


def _become_product(node: Node, way: _Way) -> None:
    assert node.summed is not None
    batch, rows, columns, features = way.axes
    sizes = [[way.shape[axis] for axis in axes] for axes in way.axes]
    n, r, c, e = (math.prod(each) for each in sizes)
    left = _view(_turned(_padded(way.pairs.left, way.shape), [*batch, *rows, *columns, *features]), (n, r, e))
    right = _view(_turned(_padded(way.pairs.right, way.shape), [*batch, *rows, *features, *columns]), (n, e, c))
    product = _product("bmm", _aten.bmm.default, left, right, node)
    order = [*batch, *rows, *columns]
    out = _view(product, tuple(way.shape[axis] for axis in order))
    out = _turned(out, [order.index(axis) for axis in sorted(order)])
    for factor in reversed(way.factors):
        args = tuple(out if _is_act(arg) else arg for arg in factor.args)
        out = _step(factor.op, factor.func, out.shape, *args, operands=factor.operands)
    if node.op == "mean":
        out = _step("div", _aten.div.Tensor, out.shape, out, e)
    node.stand_for("view", _aten.view.default, out)
    node.products = frozenset({product})


def as_matrix(node: Node, product: Product) -> None:
    """A matrix times a vector, (S, E) by (E,), is read as a matrix times one column."""
    matrix, vector = node.args
    node.summed = product
    column = _step("unsqueeze", _aten.unsqueeze.default, (*vector.shape, 1), vector, -1)
    result = _product("mm", _aten.mm.default, matrix, column, node)
    node.stand_for("view", _aten.view.default, result)
    node.products = frozenset({result})


def _product(op: str, func: Any, left: Node, right: Node, made: Node) -> Node:
    product = Node(op, (*left.shape[:-1], right.shape[-1]), func=func, args=(left, right), act=True, site=made.site)
    product.learned = left.learned or right.learned
    product.product = made.summed
    return product


def _padded(node: Node, shape: tuple[int, ...]) -> Node:
    return _view(node, (1,) * (len(shape) - len(node.shape)) + node.shape)


def _view(node: Node, shape: tuple[int, ...]) -> Node:
    return node if node.shape == shape else _step("view", _aten.view.default, shape, node, list(shape))


def _turned(node: Node, order: list[int]) -> Node:
    if order == sorted(order):
        return node
    return _step("permute", _aten.permute.default, tuple(node.shape[axis] for axis in order), node, order)


def _step(op: str, func: Any, shape: tuple[int, ...], *args: Any, operands: Any = None) -> Node:
    """A node for an operation that never ran: one of those that lead from the sum to its product."""
    main = next(arg for arg in args if _is_act(arg))
    node = Node(op, shape, func=func, args=args, act=True, site=main.site)
    node.learned = main.learned
    node.products, node.roots = main.products, main.roots
    node.operands = operands or {}
    return node
