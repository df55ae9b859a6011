"""Attentions that are one operation: the reader of each, by the operator's whole name.

A reader takes the call, with the arguments by the names of the operator's schema, and returns a `Reading`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sqrtdk.tracing.read.flash import read_flash, read_heads_first, read_xformers
from sqrtdk.tracing.read.fused import read_fused
from sqrtdk.tracing.read.native import read_native
from sqrtdk.tracing.read.own import read_own
from sqrtdk.tracing.read.reading import Reading
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.recorder import KernelCall


class Kernel(NamedTuple):
    """A reader, and the name of the argument that is q; None where the operation projects q itself."""

    read: Callable[[KernelCall], Reading]
    query: str | None = "query"


KERNELS: dict[str, Kernel] = {
    **{f"aten::{name}": Kernel(read_fused) for name in ops.FUSED},
    **{f"aten::{name}": Kernel(read_native, None) for name in ops.NATIVE},
    **{name: Kernel(read_own) for name in ops.OWN},
    "aten::_flash_attention_forward": Kernel(read_flash),
    "aten::_flash_attention_forward_no_dropout_inplace": Kernel(read_flash),
    "aten::_efficient_attention_forward": Kernel(read_xformers),
    "aten::_cudnn_attention_forward": Kernel(read_heads_first),
    "torch_attn::_varlen_attn": Kernel(read_flash),
    "torch_attn::_varlen_attn_out": Kernel(read_flash),
    "flash_attn::_flash_attn_forward": Kernel(read_flash, "q"),
    "flash_attn::_flash_attn_varlen_forward": Kernel(read_flash, "q"),
    "flash_attn_3::fwd": Kernel(read_flash, "q"),
    "flash_attn_3::_flash_attn_forward": Kernel(read_flash, "q"),
    "xformers::efficient_attention_forward_cutlass": Kernel(read_xformers),
    "xformers::efficient_attention_forward_ck": Kernel(read_xformers),
    "xformers_flash::flash_fwd": Kernel(read_flash),
    "xformers_flash3::flash_fwd": Kernel(read_flash),
}
