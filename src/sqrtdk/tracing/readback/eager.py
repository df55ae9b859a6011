"""Reads an eager attention, `softmax(logits) @ v`, from the lineage of its logits."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.readback.blocks import Span, aligned, join_beside, key_spans
from sqrtdk.tracing.readback.chain import Chain, read_chain
from sqrtdk.tracing.readback.lineage import follow_side
from sqrtdk.tracing.readback.operations import completed_distance
from sqrtdk.tracing.readback.orient import (
    Orientation,
    coordinates,
    features,
    is_over_channels,
    norm_fault,
    orientation,
    paired_channels,
    place_heads,
    place_rows,
    product_operands,
    projection_coordinate,
)
from sqrtdk.tracing.readback.packed import read_nested
from sqrtdk.tracing.readback.reading import Cell, Layout, Logits, Reading, of_softmax
from sqrtdk.tracing.readback.rotations import with_cancelled_decays
from sqrtdk.tracing.readback.side import PERMUTED, ProductSide
from sqrtdk.tracing.records import NotAttentionCode, PairDistance, Stage
from sqrtdk.tracing.steps import OF_LOGITS, LearnedSinks, Offset, Unknown
from sqrtdk.tracing.steps.placed import columns_before
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.node import Node, SoftmaxRun, back, origin

_ADDITIVE = "additive"


def read_eager(
    softmax_run: SoftmaxRun, value: Tensor, output: Tensor, *, heads_hint: int | None
) -> Reading | NotAttentionCode:
    """Return the reading of a softmax whose weights multiply values, or why it is not an attention.

    Args:
        softmax_run: the softmax.
        value: the values that its weights multiply, as they lie in the product.
        output: weights @ value, or value @ weights if the values come first.
        heads_hint: number of heads that the module declares.
    """
    if softmax_run.logits.is_nested:
        return read_nested(softmax_run, value)
    if softmax_run.values_first:  # v.mT @ w.mT
        value, output = value.mT, output.mT
    chain = read_chain(softmax_run.node)
    if chain.product is None or chain.product.product is None:
        return _without_product(softmax_run, chain, value, output)
    if chain.fork is not None:
        spans = key_spans(chain.fork, softmax_run)
        cells = [
            Cell(0, span.first, aligned(read_span(softmax_run, value, output, span, heads_hint))) for span in spans
        ]
        joined = join_beside(softmax_run, cells) if cells else None
        if joined is not None:
            return joined
    return read_span(softmax_run, value, output, Span(chain), heads_hint)


def read_span(softmax_run: SoftmaxRun, value: Tensor, output: Tensor, span: Span, heads_hint: int | None) -> Reading:
    """Return the reading of the keys of one product.

    Args:
        softmax_run: the softmax.
        value: the values that the weights multiply.
        output: the result of that product.
        span: the keys, with the way from their product to the softmax.
        heads_hint: the number of heads that the module declares; None if it declares none.
    """
    chain = span.chain
    assert chain.product is not None
    assert chain.product.product is not None
    left, right = product_operands(chain.product)
    axes = orientation(chain.product, chain.views, softmax_run.dim, softmax_run.logits.dim())
    query_node, key_node = (right, left) if axes.swapped else (left, right)
    axes = place_rows(axes, chain.product, query_node, key_node, chain.views, tuple(softmax_run.logits.shape))
    axes = place_heads(axes, chain.product, query_node, chain.views, softmax_run.logits.dim())
    query, key = with_cancelled_decays(_followed(query_node, "q", left), _followed(key_node, "k", left))
    if not paired_channels(left, right, (-1, -2)):
        query = query.then(PERMUTED)
    if len(right.shape) > 1:
        query, key = (query.transposed(), key) if axes.swapped else (query, key.transposed())
    layout = lay_out(softmax_run.logits, chain.product, chain.views, axes, query, value, heads_hint)
    if span.size is not None:
        layout = replace(layout, columns=span.size)
    channels = is_over_channels(query_node, swapped=axes.swapped)
    distance, steps = chain.product.product.distance, chain.steps
    # |q|^2 - 2 q.k + |k|^2, written out: the score is a squared distance, and -2 belongs to it.
    if distance is None and (rest := completed_distance(steps, query.factor * key.factor)) is not None:
        distance, steps, query, key = PairDistance(2, 2), rest, replace(query, factors=()), replace(key, factors=())
    first = span.first
    if softmax_run.sinks:
        steps = (*steps, LearnedSinks(column=False))
    if softmax_run.fault is not None:
        steps = (*steps, Unknown(Message(f"trace.step.{softmax_run.fault}"), softmax_run.fault))
    elif not softmax_run.weight_steps.changes and any(
        isinstance(s, Offset) and s.varies(softmax_run.dim) for s in steps
    ):
        steps = (
            *steps,
            Unknown(Message(OF_LOGITS)),
        )  # an offset that differs between keys is not a maximum taken off a row
    elif span.size is None and any(isinstance(step, LearnedSinks) and step.column for step in steps):
        layout = replace(layout, columns=layout.columns - 1)  # the first or the last column is the sink, not a key
        first = sum(columns_before(view) for view in chain.views if view.op == "cat")
    return of_softmax(
        softmax_run,
        query,
        key,
        steps,
        layout=layout,
        operands=Logits(
            softmax_run.logits,
            softmax_run.weights,
            chain.product,
            chain.views,
            axes,
            layout,
            met=softmax_run.met,
            first=first,
        ),
        dtype=value.dtype,
        logits_dtype=softmax_run.stored,
        output=None if softmax_run.fault is not None else output,
        kv_heads=_kv_heads(chain.product, layout, axes),
        distance=distance,
        axis="windows" if axes.windowed else "channels" if channels else "positions",
        no_slope=None if distance is None else Message("trace.scale.distance_slope"),
        fault=Message("trace.fault.sum_of_query") if softmax_run.fault is not None else None,
    )


def _without_product(
    softmax_run: SoftmaxRun, chain: Chain, value: Tensor, output: Tensor
) -> Reading | NotAttentionCode:
    """Reads logits that are not a product of q and k: an additive score, `w @ tanh(q + k)`, or an unknown operation.

    The logits and weights of either are those of the softmax, so it has statistics.

    Returns a code, as `read_eager` does, if the logits come from a single projection.
    """
    score, logits = _ADDITIVE if chain.product is not None else unknown_start(softmax_run.node), softmax_run.logits
    if score is None:
        return "one_projection"
    additive = score == _ADDITIVE
    if not additive:
        chain = _after_unknown(softmax_run.node)
    logits = logits.movedim(softmax_run.dim, -1)
    dims = logits.dim()
    axes = Orientation(softmax_run.dim, (dims - 2,) if dims > 1 else (), swapped=False, followed=True)
    odd = dims < 3 or (dims > 4 and logits.shape[-2] == 1)  # with two axes, the first may be the batch or the queries
    if dims == 2 and value.dim() > 2:
        logits = logits.unsqueeze(-2)  # one query per sequence: (B, S) becomes (B, 1, S)
    elif odd and dims > 4:
        logits = logits.squeeze(-2)  # drop the axis of the score layer, which gives one number per pair
    batch, rows = logits.shape[0] if logits.dim() > 2 else 1, logits.shape[-2] if logits.dim() > 1 else 1
    layout = Layout(batch, math.prod(logits.shape[1:-2]), rows, logits.shape[-1], 0, value.shape[-1])
    of_score = None
    if chain.product is not None:
        of_score = Logits(softmax_run.logits, softmax_run.weights, chain.product, chain.views, axes, layout)
    no_slope = Message("trace.fault.score", what=score)
    fault = no_slope if odd or softmax_run.fault is not None else None
    stage = Stage("logits", "score" if additive else "unknown", score)
    return of_softmax(
        softmax_run,
        ProductSide(None, None, (stage,), unknown=() if additive else (score,)),
        ProductSide(None, None),
        (*chain.steps, *((LearnedSinks(column=False),) if softmax_run.sinks else ())),
        layout=layout,
        operands=of_score,
        dtype=value.dtype,
        logits_dtype=logits.dtype,
        output=output if additive else None,
        score=score,
        fault=fault,
        no_slope=no_slope,
    )


def _after_unknown(node: Node) -> Chain:
    """Return the way from a score of unknown operations to the softmax: the known steps after the last unknown one."""
    start = _start_of_score(node)
    chain = read_chain(node, until=start)
    last = max((i for i, step in enumerate(chain.steps) if isinstance(step, Unknown)), default=-1)
    return replace(chain, product=start, steps=chain.steps[last + 1 :])


def unknown_start(node: Node) -> str | None:
    """Return the name "unknown(op)" for logits that start at an operation which is not a known score.

    None if they come from a single projection, an input or a parameter.
    """
    node = _start_of_score(node)
    paired = node.root is not None and node.root.paired
    if node.op in ("input", "parameter") or (node.root is not None and node.root.width is not None and not paired):
        return None
    return f"unknown({node.op})"


def _start_of_score(node: Node) -> Node:
    """Return where q and k meet: their rows in pairs, or a projection of pairs; else where the logits begin."""

    def meets(at: Node) -> bool:
        return (at.pairs is not None and at.pairs.both) or (at.root is not None and bool(at.root.paired))

    return next((at for at in back(node, None) if meets(at)), origin(node, None))


def _followed(node: Node, where: str, left: Node) -> ProductSide:
    """Return the side of an operand; an L2 norm along an axis that is not summed over does not bound q . k."""
    side = follow_side(node, where)
    fault = norm_fault(node, summed=-1 if node is left else -2) if side.norm == "l2" else None
    return side if fault is None else side.lost(where, fault, norm=None)


def _kv_heads(product: Node, layout: Layout, axes: Orientation) -> int | None:
    if len(product.shape) != 3:
        return None
    return product.shape[0] // (layout.batch * (layout.rows if axes.windowed else 1))


# -- sizes: which leading axes of the logits are heads, and which batch, windows or grids -----------------------------


def lay_out(
    logits: Tensor,
    product: Node,
    views: tuple[Node, ...],
    axes: Orientation,
    query: ProductSide,
    value: Tensor,
    heads_hint: int | None,
) -> Layout:
    """Return the sizes of an eager attention.

    Args:
        logits: the softmax's input, in its own layout.
        product: q . k.
        views: the views from the product to the softmax, innermost first.
        axes: the axes of queries and keys in the softmax's layout.
        query: q, read back to its projection.
        value: the values that the weights multiply.
        heads_hint: number of heads that the module declares.
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


def _by_shape(leading: tuple[int, ...], query: ProductSide, width: int, folded: bool, heads_hint: int | None) -> int:
    """Return the number of heads in a usual layout: batch first, then one axis of heads, then rows and columns."""
    if len(leading) >= 2:
        # `folded`: grouped query heads lie along the product's rows, (B, H, G * L, S), so all axes after B are heads
        return math.prod(leading[1:]) if folded else leading[-1]
    if not leading:
        return 1
    heads = query.folded_heads // width if query.folded_heads and width else heads_hint or 1
    if query.root is not None and query.root.shape[-1:] == (width,):
        heads = 1  # the projection is as wide as the product: one head a module
    return heads if heads and leading[0] % heads == 0 else 1


def _by_features(product: Node, views: tuple[Node, ...], axes: Orientation, operand: Node) -> tuple[int, int] | None:
    """Return (heads, entries of the leading axes after the heads), or None if the features do not tell.

    Entries that come from the same features of the projection belong to the same head.
    """
    if not axes.followed or any(view.op in ops.CONTRACTIONS for view in views):  # a mixing made more heads of them
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
    # An input or a sum may have its heads on an own axis, outside the features: one head is then no evidence.
    reliable = projected or heads > 1
    return (heads, inner) if reliable and bool((number == regular).all()) else None


def _heads_at(product: Node, views: tuple[Node, ...], axes: Orientation) -> Tensor | None:
    """Return the first query feature behind each row of the logits, in the softmax's layout without the keys."""
    numbers = projection_coordinate(_query_of(product, axes), features)
    if numbers is None:
        return None
    first = numbers[..., 0, :] if axes.swapped else numbers[..., 0]
    everywhere = coordinates(product, views, torch.device("cpu"))
    entry, row, column = (at.movedim(axes.keys, -1)[..., 0] for at in everywhere)
    return first.reshape(-1, first.shape[-1])[entry, column if axes.swapped else row]


def _query_of(product: Node, axes: Orientation) -> Node:
    left, right = [arg for arg in product.args if isinstance(arg, Node)][-2:]
    return right if axes.swapped else left
