"""Sizes of an eager attention: which of the leading axes of the logits are heads, and which batch, windows or grids."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sqrtdk.tracing.read.orient import Orientation, coordinates, features, followed
from sqrtdk.tracing.read.reading import Layout
from sqrtdk.tracing.read.side import Side
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node


def lay_out(
    logits: Tensor,
    product: Node,
    views: tuple[Node, ...],
    axes: Orientation,
    query: Side,
    value: Tensor,
    heads_hint: int | None,
) -> Layout:
    """Sizes of an eager attention.

    Args:
        logits: what entered the softmax, in its own layout.
        product: q . k.
        views: the views from the product to the softmax, innermost first.
        axes: where the softmax's layout has queries and keys.
        query: the way of q to the product.
        value: what the weights met.
        heads_hint: heads as the module declares them.
    """
    operand = _query_of(product, axes)
    width, product_rows = operand.shape[-2:] if axes.swapped else operand.shape[:-3:-1]
    logits = axes.apply(logits)
    leading = logits.shape[:-2]
    rows, columns = logits.shape[-2] if logits.dim() > 1 else 1, logits.shape[-1]
    heads, inner = leading[-1] if axes.heads else _by_shape(leading, query, width, product_rows != rows, heads_hint), 1
    split = query.folded_heads // width if query.folded_heads and width else 0
    plain = len(leading) == 2 and heads in (heads_hint, split)
    followed = _by_features(product, views, axes, operand) if leading and not (plain or axes.heads) else None
    heads, inner = followed or (heads, inner)
    return Layout(math.prod(leading) // max(heads, 1), heads, rows, columns, width, value.shape[-1], inner)


def _by_shape(leading: tuple[int, ...], query: Side, width: int, folded: bool, heads_hint: int | None) -> int:
    """Heads as the usual layouts have them: one axis of heads before rows and columns, after that of the batch."""
    if len(leading) >= 2:
        # `folded`: query heads of a group along the product's rows
        return math.prod(leading[1:]) if folded else leading[-1]
    if not leading:
        return 1
    heads = query.folded_heads // width if query.folded_heads and width else heads_hint or 1
    if query.root is not None and query.root.shape[-1:] == (width,):
        heads = 1  # the projection is as wide as the product: one head a module
    return heads if heads and leading[0] % heads == 0 else 1


def _by_features(product: Node, views: tuple[Node, ...], axes: Orientation, operand: Node) -> tuple[int, int] | None:
    """(heads, entries of the leading axes after them), by the features of the projection that each entry came from."""
    if not axes.followed or any(view.op in ops.CONTRACTIONS for view in views):  # mixed into more heads
        return None
    of_rows = _heads_at(product, views, axes)
    if of_rows is None:
        return None
    projected = all(root.root is not None and root.root.width is not None for root in operand.roots)
    head = axes.apply(of_rows.unsqueeze(-1).movedim(-1, axes.keys))[..., 0, 0].flatten()
    different, number = torch.unique(head, return_inverse=True)
    heads = len(different)
    others = (number != number[0]).nonzero()
    inner = int(others[0]) if len(others) else 1
    regular = (torch.arange(len(number)) // inner) % heads
    told = projected or heads > 1  # an input, or a sum, may have its heads on an axis of their own
    return (heads, inner) if told and bool((number == regular).all()) else None


def _heads_at(product: Node, views: tuple[Node, ...], axes: Orientation) -> Tensor | None:
    """The first feature of the query of each row of the logits, in the softmax's layout without the keys."""
    numbers = followed(_query_of(product, axes), features)
    if numbers is None:
        return None
    first = numbers[..., 0, :] if axes.swapped else numbers[..., 0]
    everywhere = coordinates(product, views, torch.device("cpu"))
    entry, row, column = (at.movedim(axes.keys, -1)[..., 0] for at in everywhere)
    return first.reshape(-1, first.shape[-1])[entry, column if axes.swapped else row]


def _query_of(product: Node, axes: Orientation) -> Node:
    left, right = [arg for arg in product.args if isinstance(arg, Node)][-2:]
    return right if axes.swapped else left
