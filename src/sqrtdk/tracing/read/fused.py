"""Reading a fused attention: its arguments are the operands, and its scale argument is one more factor."""

from __future__ import annotations

import math

import torch

from sqrtdk.tracing.read import bands
from sqrtdk.tracing.read.masks import as_passed, read_addend
from sqrtdk.tracing.read.orient import over_channels
from sqrtdk.tracing.read.reading import Layout, Reading, Vectors
from sqrtdk.tracing.read.rotations import paired
from sqrtdk.tracing.read.side import Side, follow
from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.steps import Hide, Scale, Step
from sqrtdk.tracing.steps.placed import Placed
from sqrtdk.tracing.watch.events import KernelCall

# SDPA gives it no flag where L differs from S; `torch.nn.attention.bias.causal_lower_right` does.
_LOWER_RIGHT = "aten::_scaled_dot_product_flash_attention"
CAUSAL = Hide("implicit", -math.inf, name="causal", causal=True)


def read_fused(call: KernelCall) -> Reading:
    """A fused kernel ran: its arguments are the operands, its scale argument is one more factor."""
    q, k, passed = call.arguments["query"], call.arguments["key"], call.arguments.get("scale")
    query, key = paired(follow(call.nodes["query"], "q"), follow(call.nodes["key"], "k"))
    scale = q.shape[-1] ** -0.5 if passed is None else float(passed)
    factor = Factor(scale, "op", "sdpa default 1/sqrt(E)" if passed is None else "sdpa scale")
    return Reading(
        site=call.site,
        kind="sdpa",
        op=call.op.replace("::", "."),
        layout=_layout(call, query),
        query=query,
        key=key,
        steps=(Scale(factor), *_masks(call)),
        operands=Vectors(q, k, scale),
        dtype=q.dtype,
        logits_dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        device=q.device,
        output=call.output,
        kv_heads=_kv_heads(call, query),
        dropout=float(call.arguments.get("dropout_p") or 0.0),
        axis="channels" if over_channels(call.nodes["query"]) else "positions",
    )


def _layout(call: KernelCall, query: Side) -> Layout:
    q, k, v = (call.arguments[name] for name in ("query", "key", "value"))
    width = q.shape[-1]
    if q.dim() == 3 or _without_heads(call, query):
        heads = (query.folded_heads or width) // width
    else:
        heads = q.shape[-3] if q.dim() >= 4 else 1
    heads = heads if heads and math.prod(q.shape[:-2]) % heads == 0 else 1
    batch = math.prod(q.shape[:-2]) // max(heads, 1)
    return Layout(batch, heads, q.shape[-2], k.shape[-2], width, v.shape[-1])


def _kv_heads(call: KernelCall, query: Side) -> int | None:
    """Heads of the key; None where its shape does not tell them."""
    q, k = call.arguments["query"], call.arguments["key"]
    if k.dim() < 4 or (q.shape[-3] == k.shape[-3] and _without_heads(call, query)):
        return None
    return int(k.shape[-3])


def _without_heads(call: KernelCall, query: Side) -> bool:
    """Whether the third last dimension of the kernel's query may be a batch, with or without heads in it.

    For a query of three dimensions, torch 2.14 calls its kernel with `q.unsqueeze(0)`, and 2.13 with q itself. A model
    without a batch writes the same, with its heads in that dimension. The heads that the projection holds tell.
    """
    q, node = call.arguments["query"], call.nodes["query"]
    if node.op != "unsqueeze" or q.dim() != 4 or q.shape[0] != 1:
        return False
    width = q.shape[-1]
    if query.folded_heads:
        heads = query.folded_heads // width
    else:  # a projection as wide as a head has one
        heads = int(query.root is not None and query.root.shape[-1:] == (width,))
    return bool(heads) and q.shape[1] % heads == 0


def _masks(call: KernelCall) -> tuple[Step, ...]:
    """The steps that the mask argument is, and the causal flag last."""
    steps: tuple[Step, ...] = ()
    name = next((name for name in ("attn_mask", "attn_bias") if call.arguments.get(name) is not None), None)
    if name is not None:
        mask = call.arguments[name]
        shape = (*call.arguments["query"].shape[:-1], call.arguments["key"].shape[-2])
        if mask.dtype == torch.bool:
            steps = (Hide("bool", -math.inf, None if mask.is_meta else Placed(mask, (), shape)),)
        else:
            steps = read_addend(call.nodes[name], None if mask.is_meta else mask.detach(), 1.0, (), shape)
    return (*as_passed(steps), *((_causal(call),) if call.arguments.get("is_causal") else ()))


def _causal(call: KernelCall) -> Hide:
    """The causal flag: upper-left, but of torch's CUDA flash kernel, which stands at the last key."""
    query, rows, columns = call.arguments["query"], call.arguments["query"].shape[-2], call.arguments["key"].shape[-2]
    if call.op != _LOWER_RIGHT or rows == columns:
        return CAUSAL
    device = torch.device("cpu") if query.is_meta else query.device
    visible = bands.mask(rows, columns, columns - rows, None, device)
    return Hide("implicit", -math.inf, Placed(visible, (), (*query.shape[:-1], columns)))
