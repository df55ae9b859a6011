"""Reading a fused attention: its arguments are the operands, and its scale argument is one more factor."""

from __future__ import annotations

import math

import torch

from sqrtdk.tracing.read.masks import as_given, read_addend
from sqrtdk.tracing.read.reading import Layout, Reading, Vectors
from sqrtdk.tracing.read.side import Side, follow
from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.steps import Hide, Scale, Step
from sqrtdk.tracing.steps.placed import Placed
from sqrtdk.tracing.watch.events import FusedCall

CAUSAL = Hide("implicit", -math.inf, name="causal", causal=True)


def read_fused(call: FusedCall) -> Reading:
    """A fused kernel ran: its arguments are the operands, its scale argument is one more factor."""
    q, k = call.query, call.key
    query, key = follow(call.query_node, "q"), follow(call.key_node, "k")
    scale = q.shape[-1] ** -0.5 if call.scale is None else float(call.scale)
    factor = Factor(scale, "op", "sdpa default 1/sqrt(E)" if call.scale is None else "sdpa scale")
    return Reading(
        site=call.site,
        kind="sdpa",
        op=call.op,
        layout=_layout(call, query),
        query=query,
        key=key,
        steps=(Scale(factor), *_masks(call)),
        operands=Vectors(q, k, scale),
        dtype=q.dtype,
        logits_dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        device=q.device,
        output=call.output,
        kv_heads=k.shape[-3] if k.dim() >= 4 else None,
        dropout=call.dropout,
    )


def _layout(call: FusedCall, query: Side) -> Layout:
    q = call.query
    width = q.shape[-1]
    heads = q.shape[-3] if q.dim() >= 4 else (query.folded_heads or width) // width if q.dim() == 3 else 1
    heads = heads if heads and math.prod(q.shape[:-2]) % heads == 0 else 1
    batch = math.prod(q.shape[:-2]) // max(heads, 1)
    return Layout(batch, heads, q.shape[-2], call.key.shape[-2], width, call.value.shape[-1])


def _masks(call: FusedCall) -> tuple[Step, ...]:
    """The steps that the mask argument is, and the causal flag last."""
    steps: tuple[Step, ...] = ()
    if call.mask is not None and call.mask_node is not None:
        shape = (*call.query.shape[:-1], call.key.shape[-2])
        if call.mask.dtype == torch.bool:
            steps = (Hide("bool", -math.inf, None if call.mask.is_meta else Placed(call.mask, (), shape)),)
        else:
            value = None if call.mask.is_meta else call.mask.detach()
            steps = read_addend(call.mask_node, value, 1.0, (), shape)
    return (*as_given(steps), *((CAUSAL,) if call.is_causal else ()))
