"""The statistics of an attention's logits, from the logits themselves or from q and k."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sqrtdk.stats import CallStats, HeadStats, head_stats_from_logits, head_stats_from_qk
from sqrtdk.tracing.read.reading import Edges, Logits, Reading, Vectors
from sqrtdk.tracing.steps import Bias, Offset, scaled_by
from sqrtdk.tracing.tell.sight import Sight

NO_DATA = "no data on the meta device"


def unmeasured(reading: Reading) -> str | None:
    """Why the statistics can't be measured; None where they can."""
    return reading.fault or (NO_DATA if reading.without_data else reading.no_stats)


def measure(reading: Reading, sight: Sight) -> CallStats:
    """Exact statistics of a reading that has data."""
    operands = reading.operands
    assert operands is not None
    if isinstance(operands, Edges):
        stats = _of_edges(operands, sight)
    else:
        stats = _of_logits(operands, sight) if isinstance(operands, Logits) else _of_vectors(operands, sight)
    # What a row gives to later keys is not what the softmax gave, where the weights were masked afterwards.
    return replace(stats, future_weight=None) if reading.carried.remasked else stats


def _of_logits(operands: Logits, sight: Sight) -> CallStats:
    whole = operands.arrange(operands.values)
    # The softmax does not see a row's own maximum, a largest logit does: it is put back.
    for i, step in enumerate(sight.steps):
        if isinstance(step, Offset) and step.addend is not None and operands.axes.followed:
            whole = whole - operands.at_logits(step.addend) * (scaled_by(sight.steps, i) or 1.0)
    stats = head_stats_from_logits(whole, sight.visible, future=sight.ahead)
    product = operands.product.product
    largest = None if product is None or product.largest is None else float(product.largest)
    return replace(stats, max_product=largest)


def _of_edges(operands: Edges, sight: Sight) -> CallStats:
    """A row for each node that has several edges; the node's largest logit, which was taken off, is put back."""
    logits = operands.arrange(operands.values)
    for i, step in enumerate(sight.steps):
        if isinstance(step, Offset) and step.addend is not None:
            logits = logits - operands.arrange(step.addend.at_softmax()) * (scaled_by(sight.steps, i) or 1.0)
    return head_stats_from_logits(*operands.by_node(logits))


def _of_vectors(operands: Vectors, sight: Sight) -> CallStats:
    visible, exists = sight.visible, operands.exists
    if operands.keys is not None:
        visible = operands.keys if visible is None else visible & operands.keys
    stats = head_stats_from_qk(
        operands.query,
        operands.key,
        scale=operands.scale,
        softcap=operands.softcap,
        bias=next((s.addend.value for s in sight.steps if isinstance(s, Bias) and s.addend is not None), None),
        visible=visible if exists is None or visible is None else visible & exists,
        is_causal=sight.causal,
        future=sight.ahead,
    )
    return stats if exists is None else replace(stats, heads=_without_padding(stats.heads, exists))


def _without_padding(heads: HeadStats, exists: Tensor) -> HeadStats:
    """Rows of padding were counted as blind; a nested batch does not have them."""
    padding = int((~exists).sum())
    blind = tuple(count - padding for count in heads.blind_rows)
    return replace(heads, rows=heads.rows - padding, blind_rows=blind)
