"""How each fused attention operator is read, by its qualified name; none of their packages is imported."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.messages import Message
from sqrtdk.tracing.readback.fused import Kernel as Kernel
from sqrtdk.tracing.readback.fused import read_kernel
from sqrtdk.tracing.readback.own import OPERATION
from sqrtdk.tracing.readback.reading import Reading, Vectors
from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.steps import Scale
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.node import Node, Root
from sqrtdk.tracing.tape.recorder import KernelCall


def read_native(call: KernelCall, kernel: Kernel) -> Reading:
    """Return the reading of a whole attention or encoder layer that torch runs as one operation in eval mode.

    By contract the operation computes `softmax(q k^T / sqrt(head_dim))` with q and k from the packed projection. The
    reader computes q and k again from the arguments. The operation itself runs untouched: outputs stay bit-equal.

    Args:
        call: the call, with the arguments by the names of the operator's schema.
        kernel: how the operator is read.
    """
    arguments = call.arguments
    x: Tensor = arguments["query"] if "query" in arguments else arguments["src"]
    other, mask, exists = arguments.get("key", x), arguments.get("mask"), None
    heads = int(arguments.get("num_head", arguments.get("num_heads", 1)))
    width = int(arguments["embed_dim"]) // heads
    if x.is_nested:
        lengths = torch.tensor([piece.shape[0] for piece in x.unbind()])
        x = other = torch.nested.to_padded_tensor(x, 0.0)
        exists = (torch.arange(x.shape[1]) < lengths[:, None]).to(x.device)[:, None, :, None]
    if mask is not None:
        mask = ~_four(mask, arguments.get("mask_type"), (x.shape[0], other.shape[1])).bool()
    elif exists is not None:
        mask = exists.mT
    if call.op.endswith("_transformer_encoder_layer_fwd") and arguments.get("norm_first"):
        weight, bias = arguments["norm_weight_1"], arguments["norm_bias_1"]
        x = other = functional.layer_norm(x, (x.shape[-1],), weight, bias, arguments["eps"])
    weights, biases = (arguments[name] for name in ("qkv_weight", "qkv_bias"))
    biases = (None,) * 3 if biases is None else biases.chunk(3)
    q, k = (
        functional.linear(y, weight, bias).reshape(*y.shape[:-1], heads, width).transpose(1, 2)
        for y, weight, bias in zip((x, other), weights.chunk(3), biases, strict=False)
    )
    packed = (*x.shape[:-1], 3 * x.shape[-1])  # q, k and v side by side
    root = Node("linear", packed, act=True, site=call.site, root=Root(width=x.shape[-1], projects=True))
    key_root = root
    if other is not x:
        key_root = Node("linear", tuple(other.shape), act=True, site=call.site, root=Root(projects=True))
    inner = {"query": q, "key": k, "value": k, "attn_mask": mask}
    nodes = {"query": root, "key": key_root, "attn_mask": root}
    reading = read_kernel(replace(call, arguments=inner, nodes=nodes, turned_off=frozenset()), kernel)
    return replace(
        reading,
        query=replace(reading.query, basis=q),
        key=replace(reading.key, basis=k),
        steps=(Scale(Factor(width**-0.5, "op", "native 1/sqrt(E)")), *reading.steps[1:]),
        operands=Vectors(q, k, width**-0.5, exists=exists),
        logits_dtype=q.dtype,
        output=None,
        no_slope=Message("trace.scale.native"),
    )


def _four(mask: Tensor, kind: int | None, padding: tuple[int, int]) -> Tensor:
    """Return a (B, H, L, S) view of a native mask: kind 0 is (L, S), 1 is padding (B, S), 2 is (B, H, L, S)."""
    if kind == 1 or (kind is None and mask.shape == padding):
        return mask[:, None, None, :]
    return mask[None, None] if mask.dim() == 2 else mask


_FLASH = Kernel("kernel", "BLHE", "lower right")
KERNELS: dict[str, Kernel] = {
    **{f"aten::{name}": Kernel() for name in ops.FUSED_KERNELS},
    # SDPA never sets this flag if L differs from S; `torch.nn.attention.bias.causal_lower_right` does.
    "aten::_scaled_dot_product_flash_attention": Kernel(corner="lower right"),
    **{f"aten::{name}": Kernel("native", query=None, read=read_native) for name in ops.NATIVE_BLOCKS},
    **{name: Kernel("compiled") for name in (*ops.OWN_KERNELS, OPERATION)},
    "aten::_flash_attention_forward": _FLASH,
    "aten::_flash_attention_forward_no_dropout_inplace": _FLASH,
    "aten::_efficient_attention_forward": _FLASH,
    "aten::_cudnn_attention_forward": Kernel("kernel"),
    "torch_attn::_varlen_attn": _FLASH,
    "torch_attn::_varlen_attn_out": _FLASH,
    "flash_attn::_flash_attn_forward": _FLASH._replace(query="q"),
    "flash_attn::_flash_attn_varlen_forward": _FLASH._replace(query="q"),
    "flash_attn_3::fwd": _FLASH._replace(query="q"),
    "flash_attn_3::_flash_attn_forward": _FLASH._replace(query="q"),
    "xformers::efficient_attention_forward_cutlass": _FLASH,
    "xformers::efficient_attention_forward_ck": _FLASH,
    "xformers_flash::flash_fwd": _FLASH,
    "xformers_flash3::flash_fwd": _FLASH,
}
