"""The opaque fast paths of nn.MultiheadAttention and nn.TransformerEncoderLayer, known by their contract.

In eval mode torch may run a whole attention, or a whole encoder layer, as one operation. Its contract is
`softmax(q k^T / sqrt(head_dim))` with q and k from the packed projection, so q and k are computed again from the
operation's arguments for the statistics. The operation itself runs untouched: outputs stay bit-equal.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.tracing.read.reading import Layout, Reading, Vectors
from sqrtdk.tracing.read.side import Side
from sqrtdk.tracing.records import Factor, Stage
from sqrtdk.tracing.steps import Hide, Scale
from sqrtdk.tracing.steps.placed import Placed
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.marks import Root
from sqrtdk.tracing.watch.recorder import KernelCall


def read_native(call: KernelCall) -> Reading:
    """Read a native call from its arguments."""
    op, site, arguments = call.op.removeprefix("aten::"), call.site, call.arguments
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
    packed = (*query.shape[:-1], 3 * query.shape[-1])  # q, k and v side by side
    root = Node("linear", packed, act=True, site=site, root=Root(width=query.shape[-1]))
    key_root = root if key is query else Node("linear", tuple(key.shape), act=True, site=site, root=Root())
    return Reading(
        site=site,
        kind="native",
        op=f"aten.{op}",
        layout=layout,
        query=Side(q, root, (Stage("q", "projection", "linear"),)),
        key=Side(k, key_root, (Stage("k", "projection", "linear"),)),
        steps=(Scale(Factor(width**-0.5, "op", "native 1/sqrt(E)")), *_masks(arguments, visible, layout)),
        operands=Vectors(q, k, width**-0.5, exists=exists),
        dtype=q.dtype,
        logits_dtype=q.dtype,
        device=q.device,
        kv_heads=heads,
        no_slope="the native kernel is known by its contract; its logits are not exposed",
    )


def _masks(arguments: dict[str, Any], padding: Tensor | None, layout: Layout) -> tuple[Hide, ...]:
    """The mask argument, else the padding of a nested batch."""
    mask = arguments.get("mask")
    if mask is None and padding is None:
        return ()
    visible = padding
    if mask is not None:
        visible = None if mask.is_meta else ~_four(mask, arguments.get("mask_type"), layout).bool()
    shape = (layout.batch, layout.heads, layout.rows, layout.columns)
    return (Hide("bool", -math.inf, None if visible is None else Placed(visible, (), shape)),)


def _padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """A nested batch as one padded tensor, and the keys that exist."""
    padded = torch.nested.to_padded_tensor(nested, 0.0)
    lengths = torch.tensor([piece.shape[0] for piece in nested.unbind()], device=padded.device)
    visible = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
    return padded, visible[:, None, None, :]


def _four(mask: Tensor, kind: int | None, layout: Layout) -> Tensor:
    """(B, H, L, S) view of a native mask: 0 is (L, S), 1 is padding (B, S), 2 is already of four dimensions."""
    if kind == 1 or (kind is None and mask.shape == (layout.batch, layout.columns)):
        return mask[:, None, None, :]
    return mask[None, None] if mask.dim() == 2 else mask
