"""Reading a fused attention: its arguments are the operands, and its scale argument is one more factor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sqrtdk.stats import head_stats_from_qk
from sqrtdk.trace import masks, numeric
from sqrtdk.trace.chain import Chain, Step
from sqrtdk.trace.draft import Draft, Layout, causal_mask, looks_ahead, mask_facts, root_mean_square
from sqrtdk.trace.events import Fused
from sqrtdk.trace.lineage import follow
from sqrtdk.trace.masks import Addend
from sqrtdk.trace.records import Factor, Mask


def read_fused(call: Fused, *, measure: bool, regress: bool) -> Draft:
    """A fused kernel ran: its arguments are the operands, its scale argument is one more factor."""
    q, k = call.query, call.key
    query, key = follow(call.query_node, "q"), follow(call.key_node, "k")
    width = q.shape[-1]
    heads = q.shape[-3] if q.dim() >= 4 else (query.folded_heads or width) // width if q.dim() == 3 else 1
    heads = heads if heads and math.prod(q.shape[:-2]) % heads == 0 else 1
    layout = Layout(
        math.prod(q.shape[:-2]) // max(heads, 1), heads, q.shape[-2], k.shape[-2], width, call.value.shape[-1]
    )
    scale = width**-0.5 if call.scale is None else float(call.scale)
    factor = Factor(scale, "op", "sdpa default 1/sqrt(E)" if call.scale is None else "sdpa scale")
    chain = Chain(None)
    draft = Draft(
        site=call.site,
        kind="sdpa",
        op=call.op,
        layout=layout,
        query=query,
        key=key,
        chain=chain,
        fused_factors=[factor],
        implicit_causal=call.is_causal,
        dtype=q.dtype,
        logits_dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        device=q.device,
        dropout=call.dropout,
        kv_axis=k.shape[-3] if k.dim() >= 4 else None,
    )
    bias = _read_fused_mask(draft, call)
    if q.is_meta:
        draft.slope_reason = draft.stats_reason = "no data on the meta device"
        return draft
    if regress:
        regress_product(draft, q, k, scale)
    if measure:
        draft.stats = head_stats_from_qk(
            q,
            k,
            scale=scale,
            bias=bias,
            visible=draft.visible,
            is_causal=call.is_causal,
            future=looks_ahead(draft),
        )
        draft.max_product = draft.stats.max_product
    draft.output_rms = root_mean_square(call.output)
    return draft


def _read_fused_mask(draft: Draft, call: Fused) -> Tensor | None:
    """Set the mask of the draft; the additive part of a float mask, where it is more than a mask, is returned."""
    if call.is_causal:
        draft.mask = causal_mask(draft.layout.rows)
    if call.mask is None or call.mask_node is None:
        return None
    shape = (*call.query.shape[:-1], call.key.shape[-2])
    if call.mask.dtype == torch.bool:
        visible = None if call.mask.is_meta else call.mask
        addend: Addend | None = Addend("mask", "bool", None, visible, -math.inf, [], shape, False)
    else:
        value = None if call.mask.is_meta else call.mask.detach()
        addend = masks.read_addend(call.mask_node, value, 1.0, [], shape)
    if addend is None:
        return None
    step = Step("mask" if addend.kind == "mask" else "bias", addend=addend)
    draft.chain.steps.append(step)
    if addend.visible is not None:
        name = masks.pattern(addend.visible)
        if name is not None:
            draft.mask_names[0] = name
            draft.visible = _four(addend.visible)
            draft.mask = mask_facts(draft, name, masks.given_form(addend), None, addend.fill, None)
    elif call.mask.is_meta and addend.kind.endswith("mask"):
        draft.mask_names[0] = "mask"
        draft.mask = Mask("mask", masks.given_form(addend))
    return added_bias(addend)


def added_bias(addend: Addend) -> Tensor | None:
    """What an addend puts on the visible logits; None where it only hides keys."""
    if addend.kind == "mask" or addend.value is None:
        return None
    return addend.value if addend.visible is None else addend.value.masked_fill(~addend.visible, 0.0)


def _four(mask: Tensor) -> Tensor:
    """(B, H, L, S), any of them 1, of a mask that broadcasts to it."""
    if mask.dim() < 4:
        return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    return mask.flatten(0, mask.dim() - 4)


def regress_product(draft: Draft, query: Tensor, key: Tensor, scale: float) -> None:
    """Read the scale from the operands, as they entered the kernel, against the projections' values."""
    if draft.query.basis is None or draft.key.basis is None:
        draft.slope_reason = "the projection's values could not be brought into the product's layout"
        return
    layout = draft.layout
    if draft.query.rope != draft.key.rope or (draft.query.rope and layout.rows != layout.columns):
        draft.slope_reason = "q and k are rotated by different positions"
        return
    sizes = (layout.batch, layout.heads, layout.rows, layout.columns)
    if 0 in sizes:
        draft.slope_reason = numeric.NO_VARIATION
        return
    x = numeric.products(draft.query.basis, draft.key.basis, *sizes, diagonal=draft.query.rope)
    y = scale * numeric.products(query, key, *sizes, diagonal=draft.query.rope)
    every = torch.ones_like(x, dtype=torch.bool)
    in_rows = numeric.row_count(layout.rows, diagonal=draft.query.rope)
    draft.slope = numeric.regress(x, y, every, eps=torch.finfo(draft.dtype).eps, rows=in_rows)
    if draft.slope is None:
        draft.slope_reason = numeric.NO_VARIATION
