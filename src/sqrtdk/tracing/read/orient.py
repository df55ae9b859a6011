"""Which axis of the softmax's tensor holds the queries, which the keys, and which operand of the product is q."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.steps.placed import to_softmax
from sqrtdk.tracing.watch.graph import Node


@dataclass(frozen=True, slots=True)
class Orientation:
    """How to bring a tensor of the softmax's shape into (..., L, S).

    Attributes:
        keys: the axis the softmax runs over.
        rows: the axes of the queries, once the keys are moved last; none where there is a single query.
        heads: the axes of the heads, likewise; none where they are those before the rows, or not known.
        swapped: the right operand of the product is the query.
        followed: the views from the product to the softmax could be replayed.
        windowed: every query has keys of its own (local windows).
    """

    keys: int
    rows: tuple[int, ...]
    swapped: bool
    followed: bool
    windowed: bool = False
    heads: tuple[int, ...] = ()

    def apply(self, tensor: Tensor) -> Tensor:
        """(..., L, S) of a tensor in the softmax's layout."""
        tensor = tensor.movedim(self.keys, -1)
        heads, rows = len(self.heads), len(self.rows)
        tensor = tensor.movedim((*self.heads, *self.rows), tuple(range(-1 - heads - rows, -1)))
        tensor = tensor.flatten(-1 - rows, -2) if rows else tensor.unsqueeze(-2)
        return tensor.flatten(-2 - heads, -3) if heads else tensor


def operands(product: Node) -> tuple[Node, Node]:
    """What was multiplied, left and right."""
    nodes = [arg for arg in product.args if isinstance(arg, Node)]
    return nodes[-2], nodes[-1]


def coordinates(product: Node, views: Sequence[Node], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each logit the (batch, row, column) of the product's entry it came from, in the softmax's layout."""
    shape = product.shape if len(product.shape) == 3 else (1, *product.shape)
    axes = [torch.arange(n, device=device).view([-1 if d == a else 1 for d in range(3)]) for a, n in enumerate(shape)]
    n, r, c = (to_softmax(axis.expand(shape).reshape(product.shape), views) for axis in axes)
    return n, r, c


def orientation(product: Node, views: Sequence[Node], dim: int, dims: int) -> Orientation:
    """Find the axes by following the coordinates of the product's entries through the views."""
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
    """Whether a coordinate changes along an axis; it is linear in every axis, so one line tells."""
    if not coordinate.numel():
        return False
    axis %= coordinate.dim()
    line = coordinate[tuple(slice(None) if d == axis else 0 for d in range(coordinate.dim()))]
    return bool((line != line[0]).any())
