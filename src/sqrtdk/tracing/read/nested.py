"""Reading an attention over nested tensors, which torch made of operations on whole nested batches."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.tracing.read.factors import read_factor
from sqrtdk.tracing.read.packed import Sequences
from sqrtdk.tracing.read.reading import Layout, Reading, Vectors
from sqrtdk.tracing.read.side import Side, follow
from sqrtdk.tracing.read.unfused import SAFE_SOFTMAX, merge_scale
from sqrtdk.tracing.records import Factor, Stage
from sqrtdk.tracing.steps import Scale, Step, Unknown
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, origin
from sqrtdk.tracing.watch.marks import Weighing

_PASSED = ops.VIEWS | ops.SAME
_PROJECTIONS = frozenset({"linear", "matmul", "mm", "bmm"})
LOST = "its logits are no product of nested q and k"


def read_nested(weighing: Weighing, value: Tensor) -> Reading | str:
    """A softmax over nested logits met nested values."""
    product, steps = _chain(weighing.node)
    if product is None or len(product.operands) < 2:
        return LOST
    q, k = product.operands[0], product.operands[1].transpose(-1, -2)
    queries, keys = _sequences(q), _sequences(k)
    query, key = _side(product.args[0], "q", queries), _side(product.args[1], "k", keys)
    by = math.prod(step.factor.value or math.nan for step in steps if isinstance(step, Scale))
    by_sdpa = weighing.op == SAFE_SOFTMAX
    if by_sdpa:
        query, key, steps = merge_scale(query, key, steps)
    first = next(iter(q.unbind()))
    heads = first.shape[0] if first.dim() == 3 else 1
    width = next(iter(value.unbind())).shape[-1]
    rows, columns = queries.exists(q.device), keys.exists(q.device)
    assert rows is not None
    assert columns is not None
    unread = next((step.name for step in steps if isinstance(step, Unknown)), None)
    return Reading(
        site=weighing.entry.site,
        kind="sdpa" if by_sdpa else "eager",
        op="aten._scaled_dot_product_attention_math" if by_sdpa else weighing.op,
        layout=Layout(queries.count, heads, queries.longest, keys.longest, first.shape[-1], width),
        query=query,
        key=key,
        steps=steps,
        operands=Vectors(
            _padded(q, queries),
            _padded(k, keys),
            by,
            exact=True,
            exists=rows[:, None, :, None],
            keys=columns[:, None, None, :],
        ),
        dtype=q.dtype,
        logits_dtype=weighing.logits.dtype,
        device=q.device,
        dropout=weighing.dropout,
        no_slope=unread,
        no_stats=None if unread is None else f"{unread} on nested logits is not read",
    )


def _chain(node: Node) -> tuple[Node | None, tuple[Step, ...]]:
    """The product, and the steps from it to the softmax, innermost first."""
    steps: list[Step] = []
    while node.op != "matmul":
        main = _parent(node)
        if main is None:
            return None, ()
        if node.op not in _PASSED:
            factor = _factor(node, "logits")
            steps.insert(0, Unknown(node.op) if factor is None else Scale(factor))
        node = main
    return node, tuple(steps)


def _side(node: Node, where: str, sequences: Sequences) -> Side:
    """Back from the product to the projection of all tokens, end to end, or of the nested batch."""
    factors: list[Factor] = []
    while node.op not in _PROJECTIONS and node.op != "_nested_tensor_from_tensor_list":
        main = _parent(node)
        factor = None if node.op in _PASSED else _factor(node, where)
        if main is None or (factor is None and node.op not in _PASSED):
            return _scaled(Side(None, None).lost(where, f"{node.op} of nested tensors"), where, factors)
        factors += [] if factor is None else [factor]
        node = main
    if node.op in _PROJECTIONS:
        weight = node.args[1]
        label = origin(weight).label if isinstance(weight, Node) else ""
        return _scaled(Side(None, None, (Stage(where, "projection", label or node.op),)), where, factors)
    return _scaled(_of_pieces(node, where, sequences), where, factors)


def _of_pieces(node: Node, where: str, sequences: Sequences) -> Side:
    """A batch made of pieces: those of one tensor of tokens (T, H, E), or of tensors of their own."""
    pieces = list(node.parents())
    tokens = {piece.main() for piece in pieces}
    whole = next(iter(tokens)) if len(tokens) == 1 else None
    if whole is None or any("split" not in piece.op for piece in pieces):
        return Side(None, None).lost(where, "nested tensors of several")
    side = follow(whole, where)
    fits = side.basis is not None and side.basis.dim() == 3 and not side.basis.is_meta
    return replace(side, basis=sequences.spread(side.basis) if fits and side.basis is not None else None)


def _scaled(side: Side, where: str, factors: list[Factor]) -> Side:
    """The side after factors, which were met from the product backwards."""
    for factor in reversed(factors):
        side = side.times(factor, Stage(where, "scale", factor.text()))
    return side


def _factor(node: Node, where: str) -> Factor | None:
    """What a multiplication by one number multiplies by."""
    if node.op == "neg":
        return Factor(-1.0, where, "number")
    if node.op not in ("mul", "div"):
        return None
    main = _parent(node)
    position = 1 if node.args[0] is main else 0
    if node.op == "div" and position == 0:
        return None
    return read_factor(node, position, where, heads_axis=-3)


def _parent(node: Node) -> Node | None:
    """The nested one."""
    nested = [parent for parent in node.parents() if not parent.shape and parent.op not in ("constant", "parameter")]
    return nested[0] if nested else None


def _sequences(nested: Tensor) -> Sequences:
    lengths = torch.tensor([piece.shape[-2] for piece in nested.unbind()], device=nested.device)
    starts = lengths.cumsum(0) - lengths
    return Sequences(len(lengths), int(lengths.max()) if len(lengths) else 0, starts, lengths)


def _padded(nested: Tensor, sequences: Sequences) -> Tensor:
    """(N, H, longest, E), zeros where a sequence has ended."""
    pieces = [piece if piece.dim() == 3 else piece[None] for piece in nested.unbind()]
    shape = (len(pieces), pieces[0].shape[0], sequences.longest, pieces[0].shape[-1])
    result = pieces[0].new_zeros(shape)
    for row, piece in zip(result, pieces, strict=True):
        row[:, : piece.shape[-2]] = piece
    return result
