"""Reads graph attention: a softmax over each node's edges, with logits q[target] . k[source] or an additive score."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.lower.pairs import is_additive
from sqrtdk.tracing.readback.chain import READERS, Link, read_chain
from sqrtdk.tracing.readback.eager import unknown_start
from sqrtdk.tracing.readback.factors import factor_of_edges
from sqrtdk.tracing.readback.lineage import follow_side
from sqrtdk.tracing.readback.reading import Edges, Layout, Reading, of_softmax
from sqrtdk.tracing.readback.side import ProductSide
from sqrtdk.tracing.records import NotAttentionCode, Stage
from sqrtdk.tracing.steps import Scale, Step, Unknown
from sqrtdk.tracing.tape.node import EdgeGroups, Node, SoftmaxRun, back

EDGE_SOFTMAX = "edge softmax"
_MOST_PADDED_LOGITS = 2**24  # logits held for statistics, after every node is padded to the largest number of edges


def read_edges(
    softmax_run: SoftmaxRun, groups: EdgeGroups, value: Tensor, output: Tensor
) -> Reading | NotAttentionCode:
    """Return the reading of a softmax over the edges of each node of a graph, whose weights multiply values.

    Args:
        softmax_run: the softmax.
        groups: its groups of edges, one for each node.
        value: the values, one row for each edge.
        output: the weighted sums, one row for each node.

    Returns:
        The reading; or the code of the reason why it is not an attention.
    """
    # (q[target] * k[source]).sum(-1): one product for each edge and head, which the softmax joins by target.
    way = read_chain(softmax_run.node, {**READERS, "mul": _multiplied})
    layout = _layout(softmax_run.logits, groups, value)
    if way.product is None or way.product.product is None:
        return _without_product(softmax_run, layout, value)
    left, right = (arg for arg in way.product.args if isinstance(arg, Node))
    query, key = (_side(node, where) for node, where in ((left, "q"), (right, "k")))
    width, fault = left.shape[-1], softmax_run.fault
    paired = math.prod(way.product.shape) * width == math.prod(left.shape) == math.prod(right.shape)
    reading = of_softmax(
        softmax_run,
        query,
        key,
        way.steps if fault is None else (*way.steps, Unknown(Message(f"trace.step.{fault}"), fault)),
        layout=replace(layout, columns=_sources(right) or layout.rows, width=width),
        operands=Edges(softmax_run.logits, way.product, way.views, groups.axis, groups.index) if paired else None,
        dtype=value.dtype,
        logits_dtype=softmax_run.stored,
        output=None if fault is not None else output,
        fault=None if fault is None else Message("trace.fault.sum_of_node"),
        no_slope=None if paired else Message("trace.scale.rows"),
        no_stats=None if paired and _fits(groups, layout) else Message("trace.statistics.edges"),
    )
    return replace(reading, kind=EDGE_SOFTMAX)


def _without_product(softmax_run: SoftmaxRun, layout: Layout, value: Tensor) -> Reading | NotAttentionCode:
    """Reads logits that are not a product of q and k; returns a code if they come from a single projection."""
    score = "additive" if is_additive(softmax_run.node) else unknown_start(softmax_run.node)
    if score is None:
        return "of_edges"
    additive = score == "additive"
    stage = Stage("logits", "score" if additive else "unknown", score)
    reading = of_softmax(
        softmax_run,
        ProductSide(None, None, (stage,), unknown=() if additive else (score,)),
        ProductSide(None, None),
        (),
        layout=layout,
        operands=None,
        dtype=value.dtype,
        logits_dtype=softmax_run.logits.dtype,
        score=score,
        fault=Message("trace.fault.logits", what=score),
    )
    return replace(reading, kind=EDGE_SOFTMAX)


def _layout(logits: Tensor, groups: EdgeGroups, value: Tensor) -> Layout:
    """Return the sizes: (batch, edges, heads) is the usual order; if the edges come last, heads stand before them."""
    before, after = math.prod(logits.shape[: groups.axis]), math.prod(logits.shape[groups.axis + 1 :])
    last = groups.axis == logits.dim() - 1
    batch, heads = (1, before) if last else (before, after)
    return Layout(batch, heads, groups.nodes, groups.nodes, 0, value.shape[-1])


def _fits(groups: EdgeGroups, layout: Layout) -> bool:
    """Whether the logits can be held with one row per node, and at least one node has several edges to choose from."""
    if groups.index is None or not groups.index.numel():
        return False
    count = groups.index.bincount()
    return 1 < int(count.max()) <= _MOST_PADDED_LOGITS // max(len(count) * layout.batch * layout.heads, 1)


def _side(node: Node, where: str) -> ProductSide:
    """Return the side q or k of the edges; `x[target]` takes a row several times, which is not a repeat of heads."""
    side = follow_side(node, where)
    return replace(side, growth=1, stages=tuple(stage for stage in side.stages if stage.name != "repeat"))


def _sources(node: Node) -> int | None:
    """Return the number of nodes that `k[source]` picks from, or None if no such pick is found."""
    for at, main in pairwise(back(node, None)):
        if at.op in ("index", "index_select"):
            return math.prod(main.shape[:-1]) // max(math.prod(at.shape[1:-1]), 1)
    return None


def _multiplied(link: Link) -> tuple[Step, ...]:
    """Reads a factor, which may differ by the kind of the edge: relation priors of HGT (Hu et al. 2020)."""
    steps, node = READERS[link.node.op](link), link.node
    other = node.args[1] if node.args[0] is link.main else node.args[0]
    if not isinstance(other, Node) or not isinstance(steps[0], Unknown):
        return steps
    factor = factor_of_edges(other, node.operands.get(node.args.index(other)), node.shape[-1], inverse=False)
    return steps if factor is None else (Scale(factor),)
