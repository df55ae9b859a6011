"""Measures the statistics of an attention's logits, from the logits themselves or from q and k."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.stats import (
    AttentionRows,
    CallStats,
    LogitSource,
    ProductSource,
    call_rows,
    call_stats,
    logit_source,
    product_source,
)
from sqrtdk.tracing.calls.call_rows import sampled_rows, stats_of_call
from sqrtdk.tracing.calls.scale import each_head
from sqrtdk.tracing.calls.visible_keys import NO_DATA, VisibleKeys
from sqrtdk.tracing.readback.reading import Edges, Logits, Reading, Vectors
from sqrtdk.tracing.steps import Bias, Blocks, Hide, Offset, Scale, scaled_by
from sqrtdk.tracing.tensors import CallRows


def why_unmeasured(reading: Reading) -> str | None:
    """Return the reason why the statistics of an attention can't be measured; None if they can."""
    return reading.fault or (Message(NO_DATA) if reading.without_data else reading.no_stats)


def exact_statistics(reading: Reading, visible_keys: VisibleKeys) -> CallStats:
    """Return the statistics over all rows of an attention.

    Rows of padding that a nested batch does not contain are not counted.

    Args:
        reading: what was read of the attention; `why_unmeasured` must return None for it.
        visible_keys: its combined masks.
    """
    if reading.whole is not None:
        return stats_of_call(reading.whole, future=visible_keys.ahead)
    stats = call_stats(_source(reading, visible_keys), future=visible_keys.ahead)
    operands = reading.operands
    if isinstance(operands, Logits):
        stats = replace(stats, max_product=None if (largest := _stored(operands)) is None else float(largest))
    if isinstance(operands, Vectors) and operands.exists is not None:
        # A nested batch was padded to compute this. Its padding rows count as rows without a key, so subtract them.
        padding, heads = int((~operands.exists).sum()), stats.heads
        blind = tuple(count - padding for count in heads.blind_rows)
        stats = replace(stats, heads=replace(heads, rows=heads.rows - padding, blind_rows=blind))
    # A mask on the weights changes the weight of later keys, and the softmax does not show it.
    return replace(stats, future_weight=None) if reading.weight_steps.remasked else stats


def measure_rows(reading: Reading, visible_keys: VisibleKeys, most: int | None) -> CallRows:
    """Return the statistics of single rows, as tensors on the model's device; no value is copied to the CPU.

    Args:
        reading: what was read of the attention; `why_unmeasured` must return None for it.
        visible_keys: its combined masks.
        most: the largest number of rows of a sequence; they are evenly spaced, with the first and the last. None is
            all.
    """
    operands, rows = reading.operands, None
    exists = operands.exists if isinstance(operands, Vectors) else None
    batch, _, length, _ = reading.layout.shape
    source = None if reading.whole is not None else _source(reading, visible_keys)
    if source is not None:
        batch, _, length, _ = source.shape
    if most is not None and most < length:  # includes the first and the last row
        rows = torch.linspace(0, length - 1, most, device=reading.device).round().long()
        exists = None if exists is None else exists[:, :, rows]
    if source is None:
        assert reading.whole is not None
        found = sampled_rows(reading.whole, rows)
    else:
        found = call_rows(source if rows is None else source.sample(slice(None), rows))
    return CallRows(
        rows=found.rows.map(lambda field: field.transpose(0, 1).flatten(1)),
        max_product=_unscaled(reading, found),
        total_rows=batch * length,
        padding=None if exists is None else (~exists).sum(),
        query_nonfinite=_nonfinite(operands.query if isinstance(operands, Vectors) else reading.query.basis),
        key_nonfinite=_nonfinite(operands.key if isinstance(operands, Vectors) else reading.key.basis),
        stored_product=_stored(operands) if isinstance(operands, Logits) else None,
    )


def _unscaled(reading: Reading, found: AttentionRows) -> Tensor | None:
    """Return the largest |q . k| of a visible key without any scale, also without factors on q and k, or None.

    From logits it is the largest |logit| divided by the factors, if there are only factors, masks and offsets in
    between. The stored product can't be used, because it includes hidden keys.
    """
    operands, heads = reading.operands, reading.layout.heads
    if reading.score is not None or reading.distance is not None or reading.whole is not None:
        return None
    if reading.query.unknown or reading.key.unknown:
        return None
    factors = [*reading.query.factors, *reading.key.factors]
    on_logits = [step.factor for step in reading.steps if isinstance(step, Scale)]
    if isinstance(operands, Logits):
        if not all(isinstance(step, Scale | Hide | Offset | Blocks) for step in reading.steps):
            return None
        offsets = [step for step in reading.steps if isinstance(step, Offset)]
        if any(step.addend is None for step in offsets) or (offsets and not operands.axes.followed):
            return None
        rows = found.rows
        largest = torch.maximum(rows.max_logit.abs(), rows.min_logit.abs()).masked_fill(rows.keys == 0, 0.0)
        factors += on_logits
    elif isinstance(operands, Vectors) and found.max_product is not None:
        largest = found.max_product
        if not isinstance(operands.scale, Tensor):  # a kernel's single scale may be split between q and k
            largest, factors = largest * abs(operands.scale), factors + on_logits
    else:
        return None
    if not largest.numel() or any(len(factor.per_head or (1,)) not in (1, heads) for factor in factors):
        return None
    scale = [abs(by) for by in each_head(factors, heads) or (0.0,)]
    if not all(0.0 < by < math.inf for by in scale):
        return None
    return (largest / torch.tensor(scale, dtype=largest.dtype, device=largest.device)[:, None]).amax()


def _nonfinite(vector: Tensor | None) -> Tensor | None:
    """Return the number of NaN and infinite elements of q or k, or None if unknown."""
    if vector is None or vector.is_meta or vector.is_nested or vector.dtype.itemsize == 1:
        return None
    return torch.count_nonzero(vector.detach() - vector.detach())  # x - x is 0 if x is finite, else NaN


def _stored(operands: Logits) -> Tensor | None:
    """Return the largest |q . k| over all keys as stored, which includes factors on q and k."""
    product = operands.product.product
    return None if product is None else product.largest


def _source(reading: Reading, visible_keys: VisibleKeys) -> LogitSource | ProductSource:
    operands = reading.operands
    assert operands is not None
    if isinstance(operands, Vectors):
        return _of_vectors(operands, visible_keys)
    logits = operands.arrange(operands.values)
    followed = isinstance(operands, Edges) or operands.axes.followed
    for i, step in enumerate(visible_keys.steps):
        # A row's maximum that was subtracted cancels in the softmax, but not in the largest logit: add it back.
        if isinstance(step, Offset) and step.addend is not None and followed:
            offset = operands.arrange(step.addend.at_softmax()).to(logits.device)
            logits = logits - offset * (scaled_by(visible_keys.steps, i) or 1.0)
    if isinstance(operands, Edges):  # one row for each node with several edges
        return logit_source(*operands.by_node(logits))
    return logit_source(logits, visible_keys.visible)


def _of_vectors(operands: Vectors, visible_keys: VisibleKeys) -> ProductSource:
    visible, exists = visible_keys.visible, operands.exists
    if operands.keys is not None:
        visible = operands.keys if visible is None else visible & operands.keys
    return product_source(
        operands.query,
        operands.key,
        scale=operands.scale,
        softcap=operands.softcap,
        bias=next((s.addend.value for s in visible_keys.steps if isinstance(s, Bias) and s.addend is not None), None),
        visible=visible if exists is None or visible is None else visible & exists,
        is_causal=visible_keys.causal,
    )
