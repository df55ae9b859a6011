"""Finds the axes of queries, keys and heads in the logits, and which operand of the product is q.

Coordinates of the product's entries are followed through the views to the softmax. If the product does not tell, the
positions and features of the query's projection do. The product's rows may be a grid, (X, Y), or the query heads of
a group, (G, L). In local attention each query has keys of its own and is the only row of its product, so the queries
lie in the product's batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.lower.vectors import ROTATION
from sqrtdk.tracing.probe.norms import norm_at
from sqrtdk.tracing.probe.replays import rearrangements
from sqrtdk.tracing.readback.regroup import REJOINED, regrouped
from sqrtdk.tracing.steps.placed import to_softmax
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import dominator, numbered, replay
from sqrtdk.tracing.tape.node import Node, SoftmaxRun, back

_MOST_PROJECTION_ELEMENTS = 2**24  # a projection with more elements than this is not followed to the logits
_REDUCTION_OPERATIONS = frozenset({"mean", "sum", "amax", "amin"})
_CHANNELS_FIRST = frozenset({"convolution", "_convolution", "mkldnn_convolution"}) | ops.AFFINE
# Operations that leave channels in place or whose move is known; any other is run on other values to find its move.
_CHANNEL_KEEPING = frozenset(
    {"add", "sub", "addcmul", "sum", "mul", "div", "neg", "complex", "overwrite", "copy", ROTATION}
)
_IN_PLACE = (
    _CHANNEL_KEEPING | ops.PASSING | ops.NORM_OPERATIONS.keys() | ops.CLAMPS | REJOINED | ops.CACHE_WRITES.keys()
)
_FEATURES_LAST = (ops.PROJECTIONS | ops.CONTRACTIONS.keys()) - _CHANNELS_FIRST - {"embedding", "_embedding_bag"}


@dataclass(frozen=True, slots=True)
class Orientation:
    """How to bring a tensor of the softmax's shape into (..., L, S).

    Attributes:
        keys: the axis that the softmax runs over.
        rows: the axes of the queries after the keys are moved last; () if there is a single query.
        heads: the axes of the heads, counted likewise; () if they stand right before the rows or are unknown.
        swapped: the right operand of the product is the query.
        followed: the views from the product to the softmax could be replayed.
        windowed: every query has its own keys (local windows).
    """

    keys: int
    rows: tuple[int, ...]
    swapped: bool
    followed: bool
    windowed: bool = False
    heads: tuple[int, ...] = ()

    def apply(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the softmax's shape as (..., L, S), with the heads, if they are known, right before L."""
        tensor = tensor.movedim(self.keys, -1)
        heads, rows = len(self.heads), len(self.rows)
        tensor = tensor.movedim((*self.heads, *self.rows), tuple(range(-1 - heads - rows, -1)))
        tensor = tensor.flatten(-1 - rows, -2) if rows else tensor.unsqueeze(-2)
        return tensor.flatten(-2 - heads, -3) if heads else tensor


def product_operands(product: Node) -> tuple[Node, Node]:
    """Return the nodes of the left and the right operand of a product, without an input that is added to it."""
    nodes = [arg for arg in product.args if isinstance(arg, Node)]
    return nodes[-2], nodes[-1]


def coordinates(product: Node, views: Sequence[Node], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return where in the product each logit comes from, as three tensors of the softmax's shape.

    Args:
        product: node of the product, (N, R, C) or (R, C).
        views: the views from the product to the softmax, innermost first.
        device: device of the results.

    Returns:
        (index n in the batch, row r, column c), int64.

    Raises:
        RuntimeError: the views can't be replayed.
        IndexError: the same.
    """
    shape = product.shape if len(product.shape) == 3 else (1, *product.shape)
    axes = [torch.arange(n, device=device).view([-1 if d == a else 1 for d in range(3)]) for a, n in enumerate(shape)]
    n, r, c = (to_softmax(axis.expand(shape).reshape(product.shape), views) for axis in axes)
    return n, r, c


def orientation(product: Node, views: Sequence[Node], dim: int, dims: int) -> Orientation:
    """Return the axes of queries and keys in the logits, found by following entries of the product through the views.

    Args:
        product: node of the product.
        views: the views from the product to the softmax, innermost first.
        dim: the axis that the softmax runs over.
        dims: the number of axes of the logits.

    Returns:
        The axes, without those of the heads. If the views can't be replayed, the last axis but one is taken for the
        queries, and `followed` is False.
    """
    plain = Orientation(dim, (dims - 2,) if dims > 1 else (), False, False)
    try:
        _, row, column = coordinates(product, views, torch.device("cpu"))
    except (RuntimeError, IndexError):
        return plain
    row, column = row.movedim(dim, -1), column.movedim(dim, -1)
    swapped = varies(row, -1) and not varies(column, -1)
    queries = column if swapped else row
    axes = [axis for axis in range(dims - 1) if varies(queries, axis)]
    return Orientation(dim, tuple(axes) or plain.rows, swapped, True)


def varies(coordinate: Tensor, axis: int) -> bool:
    """Return whether a coordinate changes along an axis.

    Args:
        coordinate: a tensor that is linear in every axis, so that one line of it is enough to look at.
        axis: the axis, which may be negative.
    """
    if not coordinate.numel():
        return False
    axis %= coordinate.dim()
    line = coordinate[tuple(slice(None) if d == axis else 0 for d in range(coordinate.dim()))]
    return bool((line != line[0]).any())


# -- queries and heads by positions and features of the projection -----------------------------------------------------


def place_rows(
    axes: Orientation, product: Node, query: Node, key: Node, views: Sequence[Node], shape: tuple[int, ...]
) -> Orientation:
    """Return the orientation with `rows` set to the axes along which the positions of the queries run.

    Args:
        axes: the orientation from the product's own rows.
        product: q . k.
        query: the product's operand q.
        key: the product's operand k.
        views: views from the product to the softmax.
        shape: shape of the softmax.
    """
    single = query.shape[-1 if axes.swapped else -2] == 1
    if not axes.followed or (len(axes.rows) == 1 and not single) or (single and not math.prod(product.shape)):
        return axes
    last = replace(axes, rows=axes.rows[-1:])
    along = projection_coordinate(query, _positions)
    if along is None:
        return last if single else _rows_of_one_head(axes, product, query, views) or last
    line = _at_softmax(along, axes, product, views)
    if line is None:
        return last
    rows = tuple(axis for axis in range(line.dim() - 1) if varies(line, axis))
    if not single:
        along_them = tuple(axis for axis in axes.rows if axis in rows)
        if along_them:
            return replace(axes, rows=along_them)
        return _rows_of_one_head(axes, product, query, views) or last
    if rows:
        return replace(axes, rows=rows, windowed=True) if _runs_along(key, -2 if axes.swapped else -1) else last
    sizes = [size for axis, size in enumerate(shape) if axis != axes.keys % len(shape)]
    return last if sizes and sizes[-1] == 1 else replace(axes, rows=())


def _rows_of_one_head(axes: Orientation, product: Node, query: Node, views: Sequence[Node]) -> Orientation | None:
    """Return the orientation with `rows` set to those axes of it along which the queries' features are the same.

    einsum("btkgh,bskh->btkgs", q, k) folds rows t and heads g into one axis of the product. The positions of q are
    unknown if it comes from einsum("btd,ndh->btnh", x, w), which folds b and t.
    None if the features can't be followed, or change along all axes.
    """
    channel = projection_coordinate(query, features)
    line = None if channel is None else _at_softmax(channel, axes, product, views)
    rows = () if line is None else tuple(axis for axis in axes.rows if not varies(line, axis))
    return replace(axes, rows=rows) if rows else None


def _runs_along(key: Node, columns: int) -> bool:
    """Whether the positions of the keys run along the columns; they do not if the batch is the keys' second axis."""
    along = projection_coordinate(key, _positions)
    return along is not None and varies(along, columns)


def place_heads(axes: Orientation, product: Node, query: Node, views: Sequence[Node], dims: int) -> Orientation:
    """Return the orientation with `heads` set to the axes of the queries' features, if they are not next to the rows.

    Args:
        axes: the orientation, with its rows set.
        product: q . k.
        query: the product's operand q.
        views: views from the product to the softmax.
        dims: number of dimensions of the softmax.
    """
    others = [axis for axis in range(dims - 1) if axis not in axes.rows]
    channel = projection_coordinate(query, features) if axes.followed and len(others) > 2 else None
    line = None if channel is None else _at_softmax(channel, axes, product, views)
    heads = () if line is None else tuple(axis for axis in others if varies(line, axis))
    return axes if heads == tuple(others[len(others) - len(heads) :]) else replace(axes, heads=heads)


def _at_softmax(along: Tensor, axes: Orientation, product: Node, views: Sequence[Node]) -> Tensor | None:
    """Return a coordinate of q in the softmax's layout, keys last; None if the views can't be followed."""
    line = along[..., :1, :] if axes.swapped else along[..., :1]
    try:
        return to_softmax(line.expand(product.shape), views).movedim(axes.keys, -1)
    except (RuntimeError, IndexError):
        return None


def is_over_channels(operand: Node, *, swapped: bool = False) -> bool:
    """Return whether the product's rows are features, and its sum runs over positions (channel attention).

    Args:
        operand: the product's q.
        swapped: True if q is the right operand.
    """
    rows, summed = (-1, -2) if swapped else (-2, -1)
    root = _root(operand)
    if root is None or root.op not in _CHANNELS_FIRST | _FEATURES_LAST or len(operand.shape) < 2:
        return False
    if operand.shape[rows] < 2 or root.shape[_features_axis(root)] % operand.shape[rows]:
        return False
    position = projection_coordinate(operand, _positions)
    if position is None or not varies(position, summed):
        return False
    channel = projection_coordinate(operand, features)
    return channel is not None and varies(channel, rows) and not varies(channel, summed)


def pools_positions(softmax_run: SoftmaxRun) -> bool:
    """Return whether a softmax runs over the positions of one projection; a router's runs over the features.

    MobileViTv2 pools so: softmax(conv(x)) over the tokens multiplies k element by element (arXiv:2206.02680).
    """
    feature = projection_coordinate(softmax_run.node, features)
    return feature is not None and not varies(feature, softmax_run.dim) and softmax_run.node.shape[softmax_run.dim] > 1


def norm_fault(operand: Node, *, summed: int) -> str | None:
    """Return a message if q or k was normalised along an axis that the product does not sum over, else None.

    Args:
        operand: q or k of the product.
        summed: the axis that the product sums over, negative.
    """
    known = ((at, norm_at(at)) for at in back(operand, None) if not at.is_root)
    node, norm = next(((at, norm) for at, norm in known if norm is not None), (operand, None))
    if norm is None or len(node.shape) < 2:
        return None
    line = numbered(node.shape, norm.axis % len(node.shape))
    along = regrouped(operand, lambda at: line if at is node else None)
    return None if along is None or varies(along, summed) else Message("trace.step.norm_axis")


def _root(node: Node) -> Node | None:
    for at in back(node, None):
        if not (at is node or at.act):
            return None
        if at.is_root:
            return at
    return None


def paired_channels(query: Node, key: Node, at: tuple[int, int] = (-1, -1)) -> bool:
    """Return whether q and k have their channels in the same order; True if that can't be told.

    If q interleaves its halves, `q.unflatten(-1, (2, -1)).mT.flatten(-2)`, then k must interleave them too.

    Args:
        query: operand q of the product.
        key: operand k of the product.
        at: the axis of the channels in each.
    """
    left, right = (_channels(node, axis) for node, axis in zip((query, key), at, strict=True))
    if left is None or right is None:
        return True
    ends = [(float(numbers.abs().min()), float(numbers.abs().max())) for numbers in (left, right)]
    widths = {root.shape[_features_axis(root)] for root in query.roots | key.roots}
    if query.roots != key.roots and left.shape == right.shape and ends == 2 * [(1.0, width) for width in widths]:
        return torch.equal(left, right)  # both cover a whole projection: then the order of the heads must agree too
    orders = [torch.cat([x.abs().argsort(-1), x.sign()], -1) for x in (left, right)]
    return not all(bool((order == order[:1]).all()) for order in orders) or torch.equal(orders[0][0], orders[1][0])


def _channels(node: Node, axis: int) -> Tensor | None:
    """Return the features, from 1, behind the product's channels, (vectors, E).

    Returns None if they come from several projections or are unknown.
    """
    numbers = projection_coordinate(
        node, lambda root, shape: None if (at := features(root, shape)) is None else at.float() + 1
    )
    if numbers is None or len(node.roots) != 1 or numbers.dim() < 2 or numbers.is_complex() or numbers.is_meta:
        return None
    first = numbers.movedim(axis, -1)[..., :1, :].flatten(0, -2)
    once = numbers.numel() > 0 and bool((first.abs().sort(-1).values.diff(dim=-1) != 0).all())
    return first if once else None  # a feature twice in one vector: padding zeros, or channels mixed by a rotation


def projection_coordinate(node: Node, coordinate: Callable[[Node, tuple[int, ...]], Tensor | None]) -> Tensor | None:
    """Return a coordinate of the projections behind a node, such as the feature's number, in the node's layout.

    Args:
        node: node of q, k or logits.
        coordinate: returns the coordinate for a projection's node, in the given shape; see `features`.

    Returns:
        An integer tensor; None if the coordinate can't be followed.
    """

    def start(at: Node) -> Tensor | None:
        main = at.main()
        if at.is_root:
            return coordinate(at, at.shape)
        if main is None or not main.act:
            return None
        if at.op in _REDUCTION_OPERATIONS or at.op == "constant_pad_nd":
            line = regrouped(main, start)
            return None if line is None else _after(at, line)
        *views, last = back(at, ops.VIEWS)
        inner = next((view for view in views if view.shape[-1:] != at.shape[-1:]), last)
        if at.op in ("add", "sub") and (whole := dominator(at)[0]) is not None and whole.shape == at.shape:
            return regrouped(whole, start)  # rotate_half(x) * sin + x * cos
        if at.op not in _IN_PLACE and (shuffled := next(rearrangements(at), None)) is not None:
            line = regrouped(shuffled.part.source, start)
            return None if line is None else shuffled.place(line)
        if inner is at or not inner.is_root or len(inner.shape) != 2:
            return None
        # A linear layer folds the axes before the features: its result is (B * L, D), the next view is (B, L, D).
        return coordinate(inner, at.shape) if inner.shape[-1:] == at.shape[-1:] else None

    return regrouped(node, start)


def _after(step: Node, line: Tensor) -> Tensor | None:
    """Return a coordinate after padding (which adds zeros), or after a reduction (its first entry)."""
    if step.op == "constant_pad_nd":
        return replay(step, line)
    axes = step.args[1] if len(step.args) > 1 else None
    if not isinstance(axes, (list, tuple)):
        return None
    for axis in axes:
        line = line.narrow(axis, 0, 1)
    return line.reshape(step.shape)


def _features_axis(root: Node) -> int:
    """Return the axis of a projection's features, negative: -3 for a convolution (B, C, H, W), -1 for vectors."""
    if root.op in _CHANNELS_FIRST and len(root.shape) > 2:
        return 1 - len(root.shape)
    return -1 if root.root is None else root.root.features


def _positions(root: Node, shape: tuple[int, ...]) -> Tensor | None:
    """Return 1, 2, 3 ... along the positions (0 is left for padding); all 1 for a projection without positions."""
    if len(shape) < 2 or root.op == "bmm":  # einsum folds batch and positions into one axis
        return None
    if root.op in _CHANNELS_FIRST and len(shape) > 2:
        before, sizes, after = 2, shape[2:], 0
    elif _features_axis(root) == -2:
        before, sizes, after = len(shape) - 1, shape[-1:], 0
    elif root.op in _CHANNELS_FIRST | _FEATURES_LAST:
        before, sizes, after = 1, shape[1:-1], 1
    else:
        before, sizes, after = len(shape) - 2, shape[-2:-1], 1
    line = torch.arange(math.prod(sizes), dtype=torch.float32) + 1
    return line.view((1,) * before + tuple(sizes) + (1,) * after).expand(shape)


def features(root: Node, shape: tuple[int, ...]) -> Tensor | None:
    """Return the number of each feature of a projection, expanded to its shape, int16 or int32.

    Args:
        root: node of the projection; the features of several matrices get disjoint numbers.
        shape: shape of the result.

    Returns:
        The numbers; None if `root` is no root, has no axes, or is too large.
    """
    if root.root is None or not shape or math.prod(shape) > _MOST_PROJECTION_ELEMENTS:
        return None
    axis, matrices = _features_axis(root) % len(shape), root.root.matrices
    # The numbers are expanded to the size of the projection: the smallest dtype that holds them saves memory.
    dtype = torch.int16 if matrices * shape[axis] <= torch.iinfo(torch.int16).max else torch.int32
    numbers = torch.arange(shape[axis], dtype=dtype).view([-1 if d == axis else 1 for d in range(len(shape))])
    if matrices > 1:
        numbers = numbers + shape[axis] * (torch.arange(shape[0], dtype=dtype) % matrices)[:, None, None]
    return numbers.expand(shape)
