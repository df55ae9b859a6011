"""Reads products of q and k that are not matrix products: (q * k).sum(-1), ((q - k) ** 2).sum(-1), matrix times vector.

Each is rewritten as the equal product of two matrices, (N, R, E) by (N, E, C). A product by hand counts only if the
sum enters a softmax, because the same multiplication elsewhere gates, scales and pools.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sqrtdk.tracing.lower.pairs import DISTANCES, VECTOR_LENGTHS, broadcast_sizes, is_act, unrun_node
from sqrtdk.tracing.records import PairDistance
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import alias, ancestors
from sqrtdk.tracing.tape.node import Node, Pairs, Product, origin
from sqrtdk.tracing.tape.recorder import RecordedOutput, Scene

_aten = torch.ops.aten
_SUM_AND_MEAN = frozenset({"sum", "mean"})


# -- while the model runs ----------------------------------------------------------------------------------------------


def note_sum(scene: Scene, made: RecordedOutput) -> None:
    """Mark the node of a sum over the features of pairs, (q * k).sum(-1) or a distance; other sums stay as they are."""
    way = _sum_of_pairs(made.node)
    if way is not None:
        measured = largest_product(scene, made) if way.distance is None else None
        made.node.summed = Product(made.tensor.dtype, measured, way.distance)


def note_weighted_sum(scene: Scene, made: RecordedOutput, source: Node, weight: Node) -> None:
    """Mark a product of pairs with a vector over the features: einsum("le,se,e->ls", q, k, w) runs (q * k) @ w.

    Args:
        scene: state of the trace.
        made: the result, whose node is changed if it is such a product.
        source: node of q * k, or a view of it.
        weight: node of w.
    """
    position = next(i for i, arg in enumerate(made.node.args) if arg is weight)
    while source.pairs is None and not source.is_root and source.op in ops.PASSING:
        main = source.main()
        if main is None or source.shape[-1] != main.shape[-1] or (source.op == "permute" and _moves(source)):
            return
        source = main
    if source.pairs is None or source.op != "mul" or position not in made.tensors:
        return
    left, vector = source.pairs.left, alias(made.tensors[position]).flatten()
    if vector.shape != left.shape[-1:]:
        return
    gained = unrun_node("mul", _aten.mul.Tensor, left.shape, left, Node(weight.op, vector.shape), operands={1: vector})
    made.node.pairs = Pairs(gained, source.pairs.right, source.pairs.both)
    made.node.summed = Product(made.tensor.dtype, largest_product(scene, made))


def _moves(node: Node) -> bool:
    return list(node.args[1]) != sorted(node.args[1])


_BIASED_PRODUCTS = frozenset({"addmm", "baddbmm"})  # add their first argument to the product


def largest_product(scene: Scene, made: RecordedOutput) -> torch.Tensor | None:
    """Return the largest |q . k| of a product as stored, a tensor of one number on its device.

    Entries that a mask hides, added by baddbmm or addmm, don't count. None if the trace doesn't measure products, or
    the tensor has no real numbers.
    """
    if not scene.products or made.tensor.is_meta or made.tensor.is_complex() or not made.tensor.numel():
        return None
    stored, addend = made.tensor.detach(), made.tensors.get(0) if made.node.op in _BIASED_PRODUCTS else None
    if addend is not None and addend.is_floating_point() and made.node.kwargs.get("beta", 1) != 0:
        stored = stored.masked_fill(addend.detach() <= torch.finfo(addend.dtype).min / 2, 0.0)
    low, high = torch.aminmax(stored)
    return torch.maximum(high, -low)


# -- once a softmax asks -----------------------------------------------------------------------------------------------


class _Axes(NamedTuple):
    """Axes of the pairs: shared by both (batch), only left (rows), only right (columns), summed over (features)."""

    batch: list[int]
    rows: list[int]
    columns: list[int]
    features: list[int]


class _SumOfPairs(NamedTuple):
    """A sum over the features of pairs.

    Attributes:
        pairs: the two activations.
        shape: shape of the pairs before the sum.
        axes: the axes by owner.
        factors: multiplications by one number between the pairs and the sum, outermost first.
        distance: see `Product`.
    """

    pairs: Pairs
    shape: tuple[int, ...]
    axes: _Axes
    factors: tuple[Node, ...] = ()
    distance: PairDistance | None = None


def _sum_of_pairs(node: Node) -> _SumOfPairs | None:
    """Return the pairs behind a sum, or None if it sums no pairs, or an axis that only one of them has."""
    if node.pairs is not None and node.op in ops.CONTRACTIONS:  # (q * k) @ w: `note_weighted_sum` moved w into q
        left, right = node.pairs.left, node.pairs.right
        dims = max(len(left.shape), len(right.shape))
        shape = tuple(max(sizes) for sizes in broadcast_sizes(left, right, (0,) * dims))
        return _summed(_SumOfPairs(node.pairs, shape, _NO_AXES), -1)
    # torch.cdist(q, k, p), whose third argument is p
    if node.pairs is not None and node.op in DISTANCES:
        order = _norm_order(node)
        if order is None:
            return None
        left, right = _spread(node.pairs.left, -2), _spread(node.pairs.right, -3)
        pairs, shape = Pairs(left, right, both=True), (*node.shape, left.shape[-1])
        return _summed(_SumOfPairs(pairs, shape, _NO_AXES, distance=PairDistance(order, 1)), -1)
    if node.op not in _SUM_AND_MEAN | VECTOR_LENGTHS or not isinstance(inner := node.args[0], Node):
        return None
    # torch.linalg.vector_norm(q - k, ord, dim=-1), ((q - k) ** 2).sum(-1), (q - k).abs().sum(-1)
    distance = None
    if node.op in VECTOR_LENGTHS:
        if (order := _norm_order(node)) is None:
            return None
        distance = PairDistance(order, 1)
    factors: list[Node] = []
    while inner.pairs is None:
        main = inner.main()
        if main is None or inner.is_root:
            return None
        summed = None if distance else _summed_power(inner)
        if _by_number(inner):
            factors.append(inner)
        elif summed is None and inner.op not in ops.CASTS_AND_COPIES:
            return None
        inner, distance = main, summed or distance
    if inner.op != ("mul" if distance is None else "sub") or (distance and (factors or node.op == "mean")):
        return None
    place = 2 if node.op in VECTOR_LENGTHS else 1
    over = node.args[place] if len(node.args) > place else None
    return _summed(_SumOfPairs(inner.pairs, inner.shape, _NO_AXES, tuple(factors), distance), over)


def _norm_order(node: Node) -> float | None:
    """Return p of the p-norm that a node takes, as torch.cdist(q, k, p) does, or None if it is no norm."""
    if node.op == "_euclidean_dist" or not node.args:
        return 2.0
    order = node.number(1 if node.op in VECTOR_LENGTHS else 2)
    return order if order is not None and order > 0 else None  # 0 counts elements


def _summed_power(node: Node) -> PairDistance | None:
    """Return the distance that a sum of these numbers over the features is: (q - k) ** 2 or (q - k).abs()."""
    if node.op == "abs":
        return PairDistance(1, 1)
    squared = node.number(1) == 2 if node.op == "pow" else _is_square(node)
    return PairDistance(2, 2) if squared else None


_NO_AXES = _Axes([], [], [], [])


def _spread(node: Node, axis: int) -> Node:
    shape = [*node.shape]
    shape.insert(len(shape) + 1 + axis, 1)
    return unrun_node("unsqueeze", _aten.unsqueeze.default, tuple(shape), node, axis)


def _is_square(node: Node) -> bool:
    return node.op == "mul" and node.args[0] is node.args[1]


def _by_number(node: Node) -> bool:
    """Whether a node is a multiplication by one number, known or not."""
    if node.op not in ("mul", "div"):
        return node.op == "neg"
    other = node.args[1] if node.op == "div" or is_act(node.args[0]) else node.args[0]
    if isinstance(other, Node):
        return not other.act and math.prod(other.shape) == 1
    return isinstance(other, (int, float))


def _summed(way: _SumOfPairs, dims: Any) -> _SumOfPairs | None:
    """Return the sum with its axes by owner, or None if it runs over an axis that only one side has."""
    every = range(len(way.shape))
    over = set(every) if not dims else {d % len(every) for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
    axes = _Axes([], [], [], [])
    for axis, (left, right) in zip(every, broadcast_sizes(way.pairs.left, way.pairs.right, way.shape), strict=True):
        if left == right:
            (axes.features if axis in over else axes.batch).append(axis)
        elif axis in over:
            return None
        else:
            (axes.columns if left == 1 else axes.rows).append(axis)
    return way._replace(axes=axes) if axes.features else None


def sums_to_products(logits: Node, *, edges: bool = False) -> None:
    """Turn the sums over pairs behind logits into products of queries and keys, once the logits enter a softmax.

    Args:
        logits: node of the softmax's input; nothing changes if a product is behind it already.
        edges: whether rows that were gathered for the edges of a graph may be a product.
    """
    # Logits with a product have been settled: `q @ k.mT`, or an earlier softmax over the same logits.
    if logits.products or not logits.act:
        return
    behind = list(ancestors(logits))
    sums = {node: way for node in behind if node.summed is not None and (way := _sum_of_pairs(node)) is not None}
    if not sums or not (edges or all(way.axes.rows or way.axes.columns for way in sums.values())):
        return
    for node in sorted(behind, key=lambda n: n.serial):
        if node in sums:
            _become_product(node, sums[node])
        elif node.act and not node.is_root:
            node.products = frozenset[Node]().union(*(parent.products for parent in node.parents()))


def multiplies(logits: Node) -> bool:
    """Return whether logits hold sums of products of two activations in which no axis tells queries from keys."""
    summed = (origin(node.args[0]) for node in ancestors(logits) if node.op in _SUM_AND_MEAN and is_act(node.args[0]))
    return any(inner.op == "mul" and inner.is_root for inner in summed)


def _become_product(node: Node, way: _SumOfPairs) -> None:
    """Rewrites a sum as a batch of matrix products, (N, R, E) by (N, E, C), in the shape of the sum."""
    assert node.summed is not None
    batch, rows, columns, features = way.axes
    n, r, c, e = (math.prod(way.shape[axis] for axis in axes) for axes in way.axes)
    left = _rearranged(way.pairs.left, len(way.shape), [*batch, *rows, *columns, *features], (n, r, e))
    right = _rearranged(way.pairs.right, len(way.shape), [*batch, *rows, *features, *columns], (n, e, c))
    product = _product("bmm", _aten.bmm.default, left, right, node)
    order = [*batch, *rows, *columns]
    sizes = [way.shape[axis] for axis in order]
    out = unrun_node("view", _aten.view.default, tuple(sizes), product, sizes)
    out = _rearranged(out, len(order), [order.index(axis) for axis in sorted(order)], None)
    for factor in reversed(way.factors):
        args = tuple(out if is_act(arg) else arg for arg in factor.args)
        out = unrun_node(factor.op, factor.func, out.shape, *args, operands=factor.operands)
    if node.op == "mean":  # (q * k).mean(-1) is the product divided by E
        out = unrun_node("div", _aten.div.Tensor, out.shape, out, e)
    node.stand_for("view", _aten.view.default, out)
    node.products = frozenset({product})


def as_matrix(node: Node, product: Product) -> None:
    """Rewrite the node of a matrix times a vector, (S, E) by (E,), as a view of a matrix times one column.

    Args:
        node: the node, which is changed.
        product: the mark that the matrix product gets.
    """
    matrix, vector = node.args
    node.summed = product
    result = _product("mm", _aten.mm.default, matrix, _spread(vector, -1), node)
    node.stand_for("view", _aten.view.default, result)
    node.products = frozenset({result})


def real_part(node: Node, views: tuple[Node, ...]) -> tuple[Node, tuple[Node, ...]] | None:
    """Return Re(q . conj(k)) as a product of twice as many real channels.

    Args:
        node: node of the complex product.
        views: the nodes of the views after it, which take the real part: `torch.view_as_real(q @ k.mH)[..., 0]`.

    Returns:
        (node of the real product, the views that remain after it); None if the views take no real part.
    """
    # torch.view_as_real(q @ k.mH)[..., 0]
    at = next((i for i, view in enumerate(views[:-1]) if view.op == "view_as_real"), -1)
    part = None if at < 0 or views[at + 1].op != "select" else views[at + 1]
    if part is None or node.op not in ("bmm", "mm") or part.args[1:] not in ((-1, 0), (len(part.shape), 0)):
        return None
    q, k = node.args
    left = unrun_node("view_as_real", _as_channels, (*q.shape[:-1], 2 * q.shape[-1]), q)
    right = unrun_node("view_as_real", _conjugate, (*k.shape[:-2], 2 * k.shape[-2], k.shape[-1]), k)
    real = _product(node.op, node.func, left, right, node)
    real.place = node.place
    real.product = None if node.product is None else replace(node.product, dtype=node.product.dtype.to_real())
    return real, (*views[:at], *views[at + 2 :])


def _as_channels(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value.resolve_conj().contiguous()).flatten(-2)


def _conjugate(value: torch.Tensor) -> torch.Tensor:
    return _as_channels(value.mT.conj()).mT


def _product(op: str, func: Any, left: Node, right: Node, made: Node) -> Node:
    product = Node(op, (*left.shape[:-1], right.shape[-1]), func=func, args=(left, right), act=True, site=made.site)
    product.learned = left.learned or right.learned
    product.product = made.summed
    return product


def _rearranged(node: Node, dims: int, order: list[int], shape: tuple[int, ...] | None) -> Node:
    """Return a node padded with leading axes of size 1 to `dims`, its axes permuted to `order`, then reshaped."""
    padded = (1,) * (dims - len(node.shape)) + node.shape
    turned = tuple(padded[axis] for axis in order)
    return unrun_node("movedim", _rearrange, shape or turned, node, padded, tuple(order), shape or turned)


def _rearrange(value: torch.Tensor, padded: tuple[int, ...], order: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    return value.reshape(padded).permute(order).reshape(shape)
