"""Reading an eager attention: a softmax met a value product; its formula lies in the lineage of its logits."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from sqrtdk.tracing.classify.additive import summed_by_hand
from sqrtdk.tracing.read.blocks import Span, aligned, beside, join_beside
from sqrtdk.tracing.read.chain import Chain, read_chain
from sqrtdk.tracing.read.masks import as_passed
from sqrtdk.tracing.read.orient import operands, orientation
from sqrtdk.tracing.read.reading import Cell, Layout, Logits, Reading
from sqrtdk.tracing.read.side import Side, follow
from sqrtdk.tracing.records import Factor, Stage
from sqrtdk.tracing.steps import Scale, Sink, Step, Unknown
from sqrtdk.tracing.watch.events import Weighing
from sqrtdk.tracing.watch.graph import Node

_MATH = "aten._safe_softmax"  # of SDPA's unfused path


def read_eager(weighing: Weighing, value: Tensor, output: Tensor, *, heads_hint: int | None) -> Reading | str:
    """A softmax met a value product: read it back. A string says why it is no attention.

    Args:
        weighing: the softmax.
        value: the values that its weights met.
        output: their product.
        heads_hint: heads as the module declares them.
    """
    chain = read_chain(weighing.node)
    if chain.product is None:
        return _without_product(weighing, chain, value)
    if chain.fork is not None:
        spans = beside(chain.fork, weighing)
        cells = [Cell(0, span.first, aligned(read_span(weighing, value, output, span, heads_hint))) for span in spans]
        joined = join_beside(weighing, cells) if cells else None
        if joined is not None:
            return joined
    return read_span(weighing, value, output, Span(chain), heads_hint)


def read_span(weighing: Weighing, value: Tensor, output: Tensor, span: Span, heads_hint: int | None) -> Reading:
    """Read keys of one product, all of the softmax's or a part of them; the arguments are those of `read_eager`."""
    chain = span.chain
    assert chain.product is not None
    left, right = operands(chain.product)
    axes = orientation(chain.product, chain.views, weighing.dim, weighing.logits.dim())
    query_node, key_node = (right, left) if axes.swapped else (left, right)
    query, key = follow(query_node, "q"), follow(key_node, "k")
    logits = axes.apply(weighing.logits)
    logits = logits if span.size is None else logits.narrow(-1, span.first, span.size)
    layout = _layout(logits, query, query_node, axes.swapped, value, heads_hint)
    steps = chain.steps
    by_sdpa = weighing.op == _MATH and not weighing.flex
    if by_sdpa:
        query, key, steps = _merge_scale(query, key, steps)
    if weighing.sinks:
        steps = (*steps, Sink(column=False))
    if weighing.fault is not None:
        steps = (*steps, Unknown(weighing.fault))
    elif span.size is None and any(isinstance(step, Sink) and step.column for step in steps):
        layout = replace(layout, columns=layout.columns - 1)
    return Reading(
        site=weighing.entry.site,
        kind="sdpa" if by_sdpa else "flex" if weighing.flex else "eager",
        op="aten._scaled_dot_product_attention_math" if by_sdpa else weighing.op,
        layout=layout,
        query=query,
        key=key,
        steps=steps,
        operands=Logits(weighing.logits, weighing.weights, chain.product, chain.views, axes, layout, span.first),
        dtype=value.dtype,
        logits_dtype=weighing.stored,
        device=weighing.logits.device,
        output=None if weighing.fault is not None else output,
        kv_heads=chain.product.shape[0] // layout.batch if len(chain.product.shape) == 3 else None,
        dropout=weighing.dropout,
        carried=weighing.carried,
        fault="the weights of a query do not sum to 1" if weighing.fault is not None else None,
    )


def _without_product(weighing: Weighing, chain: Chain, value: Tensor) -> Reading | str:
    node = weighing.node
    while not node.is_root:
        parent = node.main()
        if parent is None:
            break
        node = parent
    additive = (node.root is not None and node.root.additive) or summed_by_hand(weighing.node)
    if not additive and (node.op in ("input", "parameter") or (node.root is not None and node.root.width is not None)):
        return "its logits come from one projection: a router or a pooling"
    name = "additive" if additive else f"unknown({node.op})"
    logits = weighing.logits.movedim(weighing.dim, -1)
    stage = Stage("logits", "score" if additive else "unknown", name)
    return Reading(
        site=weighing.entry.site,
        kind="eager",
        op=weighing.op,
        layout=Layout(
            batch=logits.shape[0],
            heads=math.prod(logits.shape[1:-2]) if logits.dim() >= 4 else 1,
            rows=logits.shape[-2] if logits.dim() > 1 else 1,
            columns=logits.shape[-1],
            width=0,
            value_width=value.shape[-1],
        ),
        query=Side(None, None, (stage,), unknown=() if additive else (name,)),
        key=Side(None, None),
        steps=chain.steps,
        operands=None,
        dtype=value.dtype,
        logits_dtype=logits.dtype,
        device=logits.device,
        score=name,
        fault=f"the logits are no product of q and k: {name}",
    )


def _layout(logits: Tensor, query: Side, node: Node, swapped: bool, value: Tensor, heads_hint: int | None) -> Layout:
    width, product_rows = node.shape[-2:] if swapped else node.shape[:-3:-1]
    rows = logits.shape[-2] if logits.dim() > 1 else 1
    columns = logits.shape[-1]
    if logits.dim() >= 4:
        folded = product_rows != rows  # query heads of a group along the product's rows
        heads = math.prod(logits.shape[1:-2]) if folded else logits.shape[-3]
    elif logits.dim() == 3:
        heads = query.folded_heads // width if query.folded_heads and width else heads_hint or 1
        if query.root is not None and query.root.shape[-1:] == (width,):
            heads = 1  # the projection is as wide as the product: one head a module
        heads = heads if heads and logits.shape[0] % heads == 0 else 1
    else:
        heads = 1
    batch = math.prod(logits.shape[:-2]) // max(heads, 1)
    return Layout(batch, heads, rows, columns, width, value.shape[-1])


def _merge_scale(query: Side, key: Side, steps: tuple[Step, ...]) -> tuple[Side, Side, tuple[Step, ...]]:
    """SDPA's unfused path multiplies q and k by the root of its scale each: that is one factor of the call.

    Its masks are told in the form in which it got them.
    """
    steps = as_passed(steps)
    if not query.factors or not key.factors:
        return query, key, steps
    left, right = query.factors[-1].value, key.factors[-1].value
    if left is None or left != right:
        return query, key, steps
    merged = Scale(Factor(left * right, "op", "sdpa scale"))
    return _without_last_scale(query), _without_last_scale(key), (merged, *steps)


def _without_last_scale(side: Side) -> Side:
    last = max(i for i, stage in enumerate(side.stages) if stage.name == "scale")
    return replace(side, factors=side.factors[:-1], stages=(*side.stages[:last], *side.stages[last + 1 :]))
