"""The statistics of an attention whose tensors were read from a run of a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.stats.heads import CallStats, head_stats_from_logits
from sqrtdk.tracing.tensors import CallTensors

MOST_LOGITS = 2**28  # elements


def stats_of(call: CallTensors) -> CallStats | str:
    """Statistics of the logits, or why there are none.

    They are those of softmax's own inputs: scale, softcap, bias and mask in their order.
    """
    if call.missing is not None or call.terms is None:
        return call.missing or "its formula was not read"
    query, key = call.query.values, call.key.values
    heads = query.shape[1]
    if query.shape[0] * heads * query.shape[2] * key.shape[2] > MOST_LOGITS:
        return f"more than {MOST_LOGITS} logits"
    key = key if key.shape[1] == heads else key.repeat_interleave(heads // key.shape[1], 1)
    logits = query.float() @ key.float().mT
    product = float(logits.abs().max()) if logits.numel() else None
    visible: Tensor | None = None
    for term in call.terms:
        value = term.value
        if term.name == "scale" and value is not None:
            logits = logits * value
        elif term.name == "softcap" and isinstance(value, float):
            logits = value * torch.tanh(logits / value)
        elif term.name == "bias" and isinstance(value, Tensor):
            logits = logits + value.float()
        elif term.name == "mask" and isinstance(value, Tensor):
            shown = value.bool().expand(logits.shape)
            visible = shown if visible is None else visible & shown
        elif term.name == "sinks":
            return "a sink joins its rows"
        else:
            return f"{term.name} of the logits was not read"
    future = logits.shape[-1] == logits.shape[-2]
    stats = head_stats_from_logits(logits, visible, future=future)
    return CallStats(stats.heads, product, stats.future_weight)
