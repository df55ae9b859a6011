"""The opaque fast paths of nn.MultiheadAttention and nn.TransformerEncoderLayer, known by their contract.

In eval mode torch may run a whole attention, or a whole encoder layer, as one operation. Its contract is
`softmax(q k^T / sqrt(head_dim))` with q and k from the packed projection, so q and k are computed again from the
operation's arguments for the statistics. The operation itself runs untouched: outputs stay bit-equal.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.stats import HeadStats, head_stats_from_qk
from sqrtdk.trace import masks
from sqrtdk.trace.chain import Chain, Step
from sqrtdk.trace.draft import Draft, Layout, mask_facts
from sqrtdk.trace.graph import Node
from sqrtdk.trace.lineage import Side
from sqrtdk.trace.masks import Addend
from sqrtdk.trace.records import Factor, Stage


def read(op: str, site: str, arguments: dict[str, Any], *, measure: bool) -> Draft:
    """Read a native call from its arguments."""
    query = arguments.get("query", arguments.get("src"))
    assert isinstance(query, Tensor)
    key = arguments.get("key", query)
    heads = int(arguments.get("num_head", arguments.get("num_heads", 1)))
    width = int(arguments["embed_dim"]) // heads
    visible: Tensor | None = None
    exists: Tensor | None = None  # rows of a nested batch that are no padding
    if query.is_nested:
        query, visible = _padded(query)
        exists = visible.transpose(-1, -2)
        key = query
    if op == "_transformer_encoder_layer_fwd" and arguments.get("norm_first"):
        query = key = functional.layer_norm(
            query,
            (query.shape[-1],),
            arguments["norm_weight_1"],
            arguments["norm_bias_1"],
            arguments["eps"],
        )
    weight, bias = arguments["qkv_weight"], arguments["qkv_bias"]
    q_weight, k_weight, _ = weight.chunk(3)
    q_bias, k_bias, _ = bias.chunk(3) if bias is not None else (None, None, None)
    q, k = (
        functional.linear(x, w, b).reshape(*x.shape[:-1], heads, width).transpose(1, 2)
        for x, w, b in ((query, q_weight, q_bias), (key, k_weight, k_bias))
    )
    layout = Layout(q.shape[0], heads, q.shape[-2], k.shape[-2], width, width)
    root = Node("linear", (*query.shape[:-1], 3 * query.shape[-1]), act=True, site=site)  # q, k and v side by side
    root.is_root, root.width, root.source = True, query.shape[-1], root.serial
    key_root = root if key is query else Node("linear", tuple(key.shape), act=True, site=site)
    draft = Draft(
        site=site,
        kind="native",
        op=f"aten.{op}",
        layout=layout,
        query=Side(q, [], [Stage("q", "projection", "linear")], root),
        key=Side(k, [], [Stage("k", "projection", "linear")], key_root),
        chain=Chain(None),
        fused_factors=[Factor(width**-0.5, "op", "native 1/sqrt(E)")],
        implicit_causal=False,
        dtype=q.dtype,
        logits_dtype=q.dtype,
        device=q.device,
        slope_reason="the native kernel is known by its contract; its logits are not exposed",
        kv_axis=heads,
    )
    mask = arguments.get("mask")
    if mask is not None:
        visible = ~_four(mask, arguments.get("mask_type"), layout).bool() if not mask.is_meta else None
        draft.chain.steps.append(Step("mask", addend=Addend("mask", "bool", None, visible, -math.inf, [], (), False)))
    if visible is not None:
        if mask is None:
            draft.chain.steps.append(
                Step("mask", addend=Addend("mask", "bool", None, visible, -math.inf, [], (), False))
            )
        name = masks.pattern(visible)
        if name is not None:
            draft.mask_names[0] = name
            draft.visible = visible
            draft.mask = mask_facts(draft, name, "bool", None, -math.inf, None)
    if q.is_meta:
        draft.stats_reason = "no data on the meta device"
    elif measure:
        draft.stats = head_stats_from_qk(
            q,
            k,
            scale=width**-0.5,
            visible=draft.visible if exists is None or draft.visible is None else draft.visible & exists,
            future=layout.rows == layout.columns and (draft.mask is None or draft.mask.kind != "causal"),
        )
        if exists is not None:
            draft.stats = replace(draft.stats, heads=_without_padding(draft.stats.heads, exists))
        draft.max_product = draft.stats.max_product
    return draft


def _padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """A nested batch as one padded tensor, and the keys that exist."""
    padded = torch.nested.to_padded_tensor(nested, 0.0)
    lengths = torch.tensor([piece.shape[0] for piece in nested.unbind()], device=padded.device)
    visible = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
    return padded, visible[:, None, None, :]


def _without_padding(heads: HeadStats, exists: Tensor) -> HeadStats:
    """Rows of padding were counted as blind; a nested batch does not have them."""
    padding = int((~exists).sum())
    blind = tuple(count - padding for count in heads.blind_rows)
    return replace(heads, rows=heads.rows - padding, blind_rows=blind)


def _four(mask: Tensor, kind: int | None, layout: Layout) -> Tensor:
    """(B, H, L, S) view of a native mask: 0 is (L, S), 1 is padding (B, S), 2 is already of four dimensions."""
    if kind == 1 or (kind is None and mask.shape == (layout.batch, layout.columns)):
        return mask[:, None, None, :]
    return mask[None, None] if mask.dim() == 2 else mask
