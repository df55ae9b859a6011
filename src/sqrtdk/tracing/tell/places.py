"""Where q, k and v of an attention are, how they are brought to (B, H, L, E), and its output with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.read.orient import coordinates, operands
from sqrtdk.tracing.read.reading import Logits, Reading, Vectors
from sqrtdk.tracing.tell.used import Used
from sqrtdk.tracing.tell.vectors import Place

NO_OPERANDS = "its operands are not known"


def sizes_of(reading: Reading) -> tuple[int, int, int, int]:
    """(B, Hq, L, S)."""
    layout = reading.layout
    return layout.batch, layout.heads, layout.rows, layout.columns


def places_of(reading: Reading, used: Used) -> tuple[Place, Place, Place] | str:
    """Of q, k and v; a string says why it is not known."""
    layout = reading.layout
    if isinstance(reading.operands, Vectors):
        if used.query_node is None or used.key_node is None:
            return NO_OPERANDS
        query, key = reading.operands.query, reading.operands.key
        if reading.operands.exists is not None or reading.operands.keys is not None:
            return "its sequences lie end to end"

        def by_head(tensor: Tensor) -> Tensor:
            return tensor.reshape(layout.batch, -1, *tensor.shape[-2:])

        if used.query is None or not _is_plain(used.query, query) or used.value.shape[:-1] != key.shape[:-1]:
            return "the layout of its operands is not known"
        if query.shape[-2] != layout.rows or math.prod(query.shape[:-2]) != layout.batch * layout.heads:
            return "the layout of its operands is not known"
        return (
            Place(used.query_node, query, by_head),
            Place(used.key_node, key, by_head),
            Place(used.node, used.value, by_head),
        )
    assert isinstance(reading.operands, Logits)
    return _of_logits(reading, reading.operands, used)


def _is_plain(operand: Tensor, query: Tensor) -> bool:
    """Whether q was read as the kernel was given it, and not with its axes in another order."""
    return operand.shape == query.shape and operand.stride() == query.stride()


def _of_logits(reading: Reading, logits: Logits, used: Used) -> tuple[Place, Place, Place] | str:
    axes, product = logits.axes, logits.product
    left, right = operands(product)
    if left.value is None or right.value is None or not axes.followed:
        return "the layout of its logits could not be followed"
    if len(product.shape) > 3 or axes.windowed:
        return "the layout of its logits is not known"
    n, row, column = (logits.arrange(at) for at in coordinates(product, logits.views, reading.device))
    if n.shape != sizes_of(reading):
        return "the product does not hold all of the logits"
    if axes.swapped:
        row, column = column, row
    if bool((row != row[..., :1]).any()) or bool((column != column[..., :1, :]).any()) or bool((n != n[..., :1]).any()):
        return "its queries have keys of their own"
    values = _values(reading, used)
    if isinstance(values, str):
        return values
    query_node, key_node = (right, left) if axes.swapped else (left, right)
    assert query_node.value is not None
    assert key_node.value is not None
    of_query = _indexed(n[..., 0], row[..., 0], transposed=axes.swapped)
    of_key = _indexed(n[..., 0, :], column[..., 0, :], transposed=not axes.swapped)
    return Place(query_node, query_node.value, of_query), Place(key_node, key_node.value, of_key), values


def _indexed(entries: Tensor, at: Tensor, *, transposed: bool) -> Callable[[Tensor], Tensor]:
    """Picks the rows of an operand of the product."""

    def place(tensor: Tensor) -> Tensor:
        tensor = tensor.mT if transposed else tensor
        whole = tensor.reshape(-1, *tensor.shape[-2:]) if tensor.dim() != 3 else tensor
        return whole[entries, at]

    return place


def _values(reading: Reading, used: Used) -> Place | str:
    """Where v is, by the layout of the output."""
    layout, output, wide = reading.layout, reading.output, used.value
    assert output is not None
    matrices = layout.batch * layout.heads
    if wide.shape[-2] != layout.columns or not wide.numel():
        return "the layout of its values is not known"
    if math.prod(output.shape[:-1]) != matrices * layout.rows:
        return "the layout of its output is not known"
    if math.prod(output.shape[:-2]) == matrices:
        whole = (*output.shape[:-2], *wide.shape[-2:])
        return Place(used.node, used.value, lambda tensor: _by_head(reading, tensor.expand(whole)))
    shared = math.prod(wide.shape[:-2]) // layout.batch  # heads of v, each for a group of queries along the rows
    if layout.inner != 1 or not shared or layout.heads % shared:
        return "the layout of its values is not known"
    each = torch.arange(shared).repeat_interleave(layout.heads // shared)
    heads = each.view(shared, -1).t().flatten() if _order(reading, used).turned else each

    def values(tensor: Tensor) -> Tensor:
        return tensor.reshape(layout.batch, shared, *tensor.shape[-2:])[:, heads]

    return Place(used.node, used.value, values)


def _by_head(reading: Reading, tensor: Tensor) -> Tensor:
    """(B, H, ...) of v or the output, whose leading axes are those of the softmax, in its order."""
    layout, logits = reading.layout, reading.operands
    if not isinstance(logits, Logits) or not logits.axes.heads:
        return layout.by_head(tensor)
    axes, shape = logits.axes, list(logits.values.shape)
    keys = axes.keys % len(shape)
    rest = [axis for axis in range(len(shape)) if axis != keys]
    inside = {keys, *(rest[axis] for axis in axes.rows)}
    leading = [1 if axis in inside else size for axis, size in enumerate(shape)]
    numbers = torch.arange(math.prod(leading), device=tensor.device).reshape(leading).expand(shape)
    order = logits.arrange(numbers)[..., 0, 0]
    return tensor.reshape(-1, *tensor.shape[-2:])[order]


@dataclass(frozen=True, slots=True)
class _Order:
    """Where the heads of one group lie in the weights that met v, (B, groups, heads of the group and rows, S).

    Attributes:
        turned: the heads of the logits have the number in the group first, where the output has the group first.
        rows_first: in each row the heads of a group lie side by side, as in an einsum whose output begins with rows.
    """

    turned: bool = False
    rows_first: bool = False

    def by_head(self, tensor: Tensor, groups: int, heads: int) -> Tensor:
        """(B, heads, L, ...) of (B, groups, heads of the group and rows, ...)."""
        each, rest = heads // groups, tensor.shape[3:]
        sizes = (-1, each) if self.rows_first else (each, -1)
        parts = tensor.reshape(*tensor.shape[:2], *sizes, *rest)
        parts = parts.transpose(2, 3) if self.rows_first else parts
        return (parts.transpose(1, 2) if self.turned else parts).flatten(1, 2)


_ORDERS = tuple(_Order(turned, rows_first) for rows_first in (False, True) for turned in (False, True))


def _order(reading: Reading, used: Used) -> _Order:
    """The order that the weights had as they met v, by their values: rows that are equal have equal outputs."""
    logits, layout, output = reading.operands, reading.layout, reading.output
    if not isinstance(logits, Logits) or used.weights is None or output is None:
        return _ORDERS[0]
    groups = math.prod(output.shape[:-2]) // layout.batch
    if groups in (0, layout.heads) or layout.heads % groups:
        return _ORDERS[0]
    weights = logits.arrange(logits.weights)
    met = used.weights.reshape(layout.batch, groups, -1, used.weights.shape[-1])

    def off(order: _Order) -> float:
        return float((order.by_head(met, groups, layout.heads) - weights).abs().sum(dtype=torch.float64))

    return min(_ORDERS, key=off)


def rows_of(reading: Reading, used: Used, output: Tensor) -> Tensor:
    """(B, Hq, L, Ev) of the output."""
    layout = reading.layout
    if isinstance(reading.operands, Logits) and math.prod(output.shape[:-2]) == layout.batch * layout.heads:
        return _by_head(reading, output).detach()
    sizes = (layout.batch, layout.heads, layout.rows, output.shape[-1])
    groups = math.prod(output.shape[:-2]) // layout.batch
    if groups and layout.heads % groups == 0:
        output = output.reshape(layout.batch, groups, -1, output.shape[-1])
        return _order(reading, used).by_head(output, groups, layout.heads).detach()
    return output.reshape(sizes).detach()
