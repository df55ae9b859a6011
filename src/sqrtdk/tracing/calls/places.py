"""Finds q, k and v of an attention, and arranges them as (B, H, L, E) and the output as (B, Hq, L, Ev)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.calls.vectors import VectorUse
from sqrtdk.tracing.readback.online import OnlineReading, softmax, weights_in_product
from sqrtdk.tracing.readback.orient import coordinates, product_operands
from sqrtdk.tracing.readback.reading import Logits, Reading, Vectors
from sqrtdk.tracing.tape.node import Exponential, Node, SoftmaxRun
from sqrtdk.tracing.tape.recorder import KernelCall

NO_OPERANDS = "trace.kept.operands"


@dataclass(frozen=True, slots=True, eq=False)
class ValueOperands:
    """The operands of weights . v, which a reading does not contain.

    Attributes:
        value: v in the product with the weights.
        node: Node of v.
        weights: The weights in that product, (..., L, S); None for a kernel.
        values_first: Whether v is its left operand, (..., Ev, S).
        kernel: The call, for a kernel whose arguments have SDPA's names.
        blocks: The operands of each block of keys, if these are those of the first block.
    """

    value: Tensor
    node: Node
    weights: Tensor | None = None
    values_first: bool = False
    kernel: KernelCall | None = None
    blocks: tuple[ValueOperands, ...] = ()


def value_operands(value: Tensor, node: Node, softmax_run: SoftmaxRun) -> ValueOperands:
    """Return the operands of the product of a softmax's weights with values.

    Args:
        value: v as it lies in the product.
        node: Node of v.
        softmax_run: The softmax.
    """
    return ValueOperands(value, node, softmax_run.used, softmax_run.values_first)


def of_exponentials(online: OnlineReading, *, weights: bool) -> ValueOperands:
    """Return the operands of the product of exponentials with values, with the weights of a softmax in their place.

    Args:
        online: The attention, or a block of its keys.
        weights: Whether the weights are wanted.
    """
    cells = [cell.reading for cell in online.reading.blocks] or [online.reading]
    pairs = zip(cells, online.exponentials, strict=True)
    first, *others = [_of_exponential(reading, exponential, weights) for reading, exponential in pairs]
    return replace(first, blocks=(first, *others)) if others else first


def _of_exponential(reading: Reading, exponential: Exponential, wanted: bool) -> ValueOperands:
    logits, weights = reading.operands, None
    # Which weights a dropout set to 0 is not known any more.
    if wanted and isinstance(logits, Logits) and not logits.values.is_meta and not reading.dropout:
        weights = weights_in_product(softmax(logits.values, exponential.dim), exponential)
    value = exponential.value.mT if exponential.values_first else exponential.value
    return ValueOperands(value, exponential.value_node, weights, exponential.values_first)


def of_kernel(call: KernelCall) -> ValueOperands | None:
    """Return the operands of a fused kernel; None if its arguments are not named query, key and value."""
    if not {"query", "key", "value"} <= call.nodes.keys():
        return None
    return ValueOperands(call.arguments["value"], call.nodes["value"], kernel=call)


def places_of(reading: Reading, used: ValueOperands) -> tuple[VectorUse, VectorUse, VectorUse] | str:
    """Return where q, k and v of an attention are, with functions that arrange them as (B, H, L, E).

    Args:
        reading: what was read of the attention.
        used: the operands of the product of weights and values.

    Returns:
        The places of q, k and v; or the reason, a text, why they can't be arranged.
    """
    if not isinstance(reading.operands, Vectors):
        assert isinstance(reading.operands, Logits)
        return _of_logits(reading, reading.operands, used)
    layout, query, key = reading.layout, reading.operands.query, reading.operands.key
    if used.kernel is None:
        return Message(NO_OPERANDS)
    if reading.operands.exists is not None or reading.operands.keys is not None:
        return Message("trace.kept.packed")
    given = used.kernel.arguments["query"]
    plain = given.shape == query.shape and given.stride() == query.stride()  # else its axes are in another order
    fits = query.shape[-2] == layout.rows and math.prod(query.shape[:-2]) == layout.batch * layout.heads
    if not plain or not fits or used.value.shape[:-1] != key.shape[:-1]:
        return Message("trace.kept.layout_of_operands")

    def by_head(tensor: Tensor) -> Tensor:
        return tensor.reshape(layout.batch, -1, *tensor.shape[-2:])

    nodes = used.kernel.nodes
    at_value = VectorUse(used.node, used.value, by_head)
    return VectorUse(nodes["query"], query, by_head), VectorUse(nodes["key"], key, by_head), at_value


def _of_logits(reading: Reading, logits: Logits, used: ValueOperands) -> tuple[VectorUse, VectorUse, VectorUse] | str:
    axes, product, layout = logits.axes, logits.product, reading.layout
    left, right = product_operands(product)
    if left.value is None or right.value is None or not axes.followed:
        return Message("trace.kept.way_of_logits")
    if len(product.shape) > 3 or axes.windowed:
        return Message("trace.kept.layout_of_logits")
    n, row, column = (logits.arrange(at) for at in coordinates(product, logits.views, reading.device))
    if n.shape != (layout.batch, layout.heads, layout.rows, layout.columns):
        return Message("trace.kept.part_of_logits")
    if axes.swapped:  # k @ q.mT: the rows of the product are keys
        row, column = column, row
    # In (B, H, L, S) the operand's row may depend on (B, H, L) only, and its column on (B, H, S) only.
    if bool((row != row[..., :1]).any()) or bool((column != column[..., :1, :]).any()) or bool((n != n[..., :1]).any()):
        return Message("trace.kept.own_keys")
    values = _values(reading, logits, used)
    if isinstance(values, str):
        return values
    of_query = _indexed(n[..., 0], row[..., 0], transposed=axes.swapped)
    of_key = _indexed(n[..., 0, :], column[..., 0, :], transposed=not axes.swapped)
    of_left, of_right = (of_key, of_query) if axes.swapped else (of_query, of_key)
    at_left, at_right = VectorUse(left, left.value, of_left), VectorUse(right, right.value, of_right)
    return (at_right, at_left, values) if axes.swapped else (at_left, at_right, values)


def _indexed(entries: Tensor, at: Tensor, *, transposed: bool) -> Callable[[Tensor], Tensor]:
    """Return a function that gathers the rows of a product's operand into (B, H, L or S, E)."""

    def place(tensor: Tensor) -> Tensor:
        tensor = tensor.mT if transposed else tensor
        return tensor.reshape(-1, *tensor.shape[-2:])[entries, at]

    return place


def _values(reading: Reading, logits: Logits, used: ValueOperands) -> VectorUse | str:
    """Return the place of v, found from the layout of the output, or the reason why it is unknown."""
    layout, output = reading.layout, reading.output
    assert output is not None

    def rows(tensor: Tensor) -> Tensor:
        return tensor.mT if used.values_first else tensor

    wide = rows(used.value)
    matrices = layout.batch * layout.heads
    if wide.shape[-2] != layout.columns or not wide.numel():
        return Message("trace.kept.layout_of_values")
    if math.prod(output.shape[:-1]) != matrices * layout.rows:
        return Message("trace.kept.layout_of_output")
    if math.prod(output.shape[:-2]) == matrices:
        whole = (*output.shape[:-2], *wide.shape[-2:])
        return VectorUse(used.node, used.value, lambda tensor: _by_head(logits, rows(tensor).expand(whole)))
    shared = math.prod(wide.shape[:-2]) // layout.batch  # heads of v; each serves a group of query heads
    if layout.inner != 1 or not shared or layout.heads % shared:
        return Message("trace.kept.layout_of_values")
    each = torch.arange(shared).repeat_interleave(layout.heads // shared)
    heads = each.view(shared, -1).t().flatten() if _order(reading, used)[1] else each
    return VectorUse(
        used.node, used.value, lambda tensor: rows(tensor).reshape(layout.batch, shared, *wide.shape[-2:])[:, heads]
    )


def output_rows(reading: Reading, used: ValueOperands, output: Tensor) -> Tensor:
    """Return the output of an attention, detached, as (B, Hq, L, Ev).

    Args:
        reading: what was read of the attention.
        used: the operands of the product of weights and values.
        output: the output in the layout of the model.
    """
    layout = reading.layout
    groups = math.prod(output.shape[:-2]) // layout.batch
    if isinstance(reading.operands, Logits) and math.prod(output.shape[:-2]) == layout.batch * layout.heads:
        rows = _by_head(reading.operands, output)
    elif groups and layout.heads % groups == 0:
        rows = _grouped(output.reshape(layout.batch, groups, -1, output.shape[-1]), layout.heads, _order(reading, used))
    else:
        rows = output.reshape(layout.batch, layout.heads, layout.rows, output.shape[-1])
    return rows.detach()


def _by_head(logits: Logits, tensor: Tensor) -> Tensor:
    """Return v or the output as (B, H, ...), from leading axes that are those of the softmax in its order."""
    axes, shape = logits.axes, list(logits.values.shape)
    keys = axes.keys % len(shape)
    rest = [axis for axis in range(len(shape)) if axis != keys]
    inside = {keys, *(rest[axis] for axis in axes.rows)}
    leading = [1 if axis in inside else size for axis, size in enumerate(shape)]
    numbers = torch.arange(math.prod(leading), device=tensor.device).reshape(leading).expand(shape)
    return tensor.reshape(-1, *tensor.shape[-2:])[logits.arrange(numbers)[..., 0, 0]]


def _grouped(tensor: Tensor, heads: int, order: tuple[bool, bool]) -> Tensor:
    """Return (B, groups, heads of a group * rows, ...) rearranged to (B, heads, L, ...).

    Args:
        tensor: The weights in the product with v, or the output.
        heads: Number of query heads.
        order: Two flags. The first: each row's heads of a group lie side by side, as in an einsum whose output begins
            with rows. The second: the logits have the index in the group before the group, unlike the output.
    """
    rows_first, turned = order
    each = heads // tensor.shape[1]
    sizes = (-1, each) if rows_first else (each, -1)
    parts = tensor.reshape(*tensor.shape[:2], *sizes, *tensor.shape[3:])
    parts = parts.transpose(2, 3) if rows_first else parts
    return (parts.transpose(1, 2) if turned else parts).flatten(1, 2)


def _order(reading: Reading, used: ValueOperands) -> tuple[bool, bool]:
    """Return the order for `_grouped` in which the weights in the product with v equal the softmax's weights.

    Orders that can't be told apart by values give equal outputs, so any of them is right.
    """
    logits, layout, output = reading.operands, reading.layout, reading.output
    orders = [(False, False), (False, True), (True, False), (True, True)]
    if not isinstance(logits, Logits) or used.weights is None or output is None:
        return orders[0]
    groups = math.prod(output.shape[:-2]) // layout.batch
    if groups in (0, layout.heads) or layout.heads % groups:
        return orders[0]
    weights = logits.arrange(logits.weights)
    met = used.weights.reshape(layout.batch, groups, -1, used.weights.shape[-1])
    gaps = [(_grouped(met, layout.heads, order) - weights).abs().sum(dtype=torch.float64) for order in orders]
    return orders[int(torch.stack(gaps).argmin())]
