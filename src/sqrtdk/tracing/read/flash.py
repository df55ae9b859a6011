"""Reading the attention operators of flash-attention, xformers and torch by their schemas: nothing is imported.

They take query (B, L, Hq, E), key (B, S, H, E) and value (B, S, H, Ev), or sequences end to end, (T, Hq, E), with
where each ends. Their names for one thing differ; the steps are scale, softcap, ALiBi, mask.
Sources: flash-attn 2.8 (`flash_attn_interface.py`), flash-attn 3 (`hopper/flash_api.cpp`), xformers 0.0.35
(`ops/fmha`), torch 2.13 (`native_functions.yaml`, `nn/attention/varlen.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.read.fused import CAUSAL
from sqrtdk.tracing.read.masks import as_passed, read_addend
from sqrtdk.tracing.read.packed import Pairs, Sequences
from sqrtdk.tracing.read.reading import Layout, Reading, Vectors
from sqrtdk.tracing.read.side import Side, follow
from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.steps import Bias, Hide, Scale, Softcap, Step, Unknown
from sqrtdk.tracing.steps.placed import Placed
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.recorder import KernelCall

# What an argument is, whatever the operator calls it.
_NAMES = {
    "query": ("query", "q"),
    "key": ("key", "k"),
    "value": ("value", "v"),
    "scale": ("scale", "softmax_scale"),
    "causal": ("is_causal", "causal"),
    "left": ("window_size_left", "window_left"),
    "right": ("window_size_right", "window_right"),
    "window": ("window_size",),
    "dropout": ("dropout_p", "p"),
    "softcap": ("softcap",),
    "slopes": ("alibi_slopes",),
    "bias": ("attn_bias", "bias"),
    "mask_type": ("custom_mask_type",),
    "query_ends": ("cu_seqlens_q", "cum_seq_q", "cu_seq_q", "seqstart_q"),
    "key_ends": ("cu_seqlens_k", "cum_seq_k", "cu_seq_k", "seqstart_k"),
    "query_used": ("seqused_q",),
    "key_used": ("seqused_k", "seqlen_k"),
    "longest_query": ("max_seqlen_q", "max_q"),
    "longest_key": ("max_seqlen_k", "max_k"),
    "pages": ("block_table", "block_tables", "page_table"),
}
# Arguments that change no number, but by rounding.
_IDLE = frozenset(
    {
        "out",
        "out_",
        "enable_gqa",
        "return_softmax",
        "return_debug_mask",
        "compute_logsumexp",
        "compute_log_sumexp",
        "num_splits",
        "use_kvsplit",
        "pack_gqa",
        "sm_margin",
        "scheduler_metadata",
        "deterministic",
        "zero_tensors",
        "is_rotary_interleaved",
        "rotary_interleaved",
        "page_size",
    }
)
_READ = frozenset(name for names in _NAMES.values() for name in names)
_UPPER_LEFT, _LOWER_RIGHT = 1, 2  # `custom_mask_type`


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The arguments of a call by what they are."""

    call: KernelCall

    def name(self, what: str) -> str | None:
        """What the operator calls an argument that was passed."""
        return next((name for name in _NAMES[what] if self.call.arguments.get(name) is not None), None)

    def __getitem__(self, what: str) -> Any:
        name = self.name(what)
        return None if name is None else self.call.arguments[name]

    def node(self, what: str) -> Node:
        """Of an argument that is a tensor and was passed."""
        return self.call.nodes[self.name(what) or ""]

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of arguments that were passed, may change numbers, and are not read."""
        passed = {k: v for k, v in self.call.arguments.items() if k not in _READ and k not in _IDLE}
        return tuple(name for name, value in passed.items() if isinstance(value, Tensor) or value)


def read_flash(call: KernelCall) -> Reading:
    """An operator that takes (B, L, H, E), or packed sequences, and aligns its masks to the lower right."""
    return _read(_Arguments(call), lower_right=True)


def read_heads_first(call: KernelCall) -> Reading:
    """One that takes (B, H, L, E), or packed sequences, and aligns its masks to the upper left."""
    arguments = dict(call.arguments)
    if call.arguments["query"].dim() == 4:
        for name in ("query", "key", "value"):
            arguments[name] = arguments[name].transpose(1, 2)
    return _read(_Arguments(replace(call, arguments=arguments)), lower_right=False, transposed=True)


def read_xformers(call: KernelCall) -> Reading:
    """One that says by number where its masks are aligned, and counts the row's own key into its window."""
    kind, window = call.arguments.get("custom_mask_type"), call.arguments.get("window_size")
    arguments = {**call.arguments, "is_causal": bool(kind), "window_size": None}
    if window and window > 0:
        arguments["window_size_left"] = window - 1
    return _read(_Arguments(replace(call, arguments=arguments)), lower_right=kind == _LOWER_RIGHT)


def _read(arguments: _Arguments, *, lower_right: bool, transposed: bool = False) -> Reading:
    call, q, k, v = arguments.call, arguments["query"], arguments["key"], arguments["value"]
    pages = arguments["pages"]
    if pages is not None:
        k, v = (_paged(x, pages) for x in (k, v))
    key_ends = arguments["key_ends"] if pages is None else None
    pairs = Pairs(
        Sequences.of(q, arguments["query_ends"], arguments["query_used"], arguments["longest_query"]),
        Sequences.of(k, key_ends, arguments["key_used"], arguments["longest_key"]),
        torch.device("cpu") if q.is_meta else q.device,
    )
    query = _arranged(follow(arguments.node("query"), "q"), q, pairs.queries, transposed)
    key = _arranged(follow(arguments.node("key"), "k"), k, pairs.keys, transposed)
    layout = Layout(
        pairs.queries.count, q.shape[-2], pairs.queries.longest, pairs.keys.longest, q.shape[-1], v.shape[-1]
    )
    passed = arguments["scale"]
    scale = q.shape[-1] ** -0.5 if passed is None else float(passed)
    factor = Factor(scale, "op", "kernel default 1/sqrt(E)" if passed is None else "kernel scale")
    softcap = arguments["softcap"] or None
    bias, no_bias = _bias(arguments, pairs, layout)
    hide, no_mask = _mask(arguments, pairs, layout, lower_right)
    exists, columns = (side.exists(q.device) for side in (pairs.queries, pairs.keys))
    no_pairs = None if exists is None or columns is None else pairs.too_large()
    unread = tuple(Unknown(f"{name} of the kernel") for name in arguments.unread)
    return Reading(
        site=call.site,
        kind="kernel",
        op=call.op.replace("::", "."),
        layout=layout,
        query=query,
        key=key,
        steps=(Scale(factor), *(() if softcap is None else (Softcap(softcap),)), *bias, *hide, *unread),
        operands=Vectors(
            q if q.is_meta else pairs.queries.spread(q),
            k if k.is_meta else pairs.keys.spread(k),
            scale,
            softcap,
            exact=True,
            exists=None if exists is None else exists[:, None, :, None],
            keys=None if columns is None else columns[:, None, None, :],
        ),
        dtype=q.dtype,
        logits_dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        device=q.device,
        output=call.output,
        kv_heads=k.shape[-2],
        dropout=float(arguments["dropout"] or 0.0),
        no_slope=unread[0].name if unread else None,
        no_stats=f"{unread[0].name} is not read" if unread else no_bias or no_mask or no_pairs,
    )


def _paged(pool: Tensor, pages: Tensor) -> Tensor:
    """(N, S, H, E) of a pool (pages, page size, H, E), by the numbers of the pages of each sequence."""
    if pool.is_meta or pages.is_meta:
        return pool.new_empty(pages.shape[0], pages.shape[1] * pool.shape[1], *pool.shape[2:], device="meta")
    return pool[pages.long().clamp(0, len(pool) - 1)].flatten(1, 2)


def _arranged(side: Side, operand: Tensor, sequences: Sequences, transposed: bool) -> Side:
    """The side with its basis in the layout of the operand that is read."""
    factors = tuple(f for f in side.factors if f.per_head is None or len(f.per_head) == operand.shape[-2])
    if len(factors) < len(side.factors):  # they stand where another layout has its heads
        side = replace(side, factors=factors, unknown=(*side.unknown, "a factor for each position"))
    basis = side.basis
    if basis is not None and transposed and basis.dim() == 4:
        basis = basis.transpose(1, 2)
    if basis is None or basis.is_meta or basis.shape[:-1] != operand.shape[:-1]:
        return replace(side, basis=None)
    return replace(side, basis=sequences.spread(basis))


def _bias(arguments: _Arguments, pairs: Pairs, layout: Layout) -> tuple[tuple[Step, ...], str | None]:
    """The steps of the bias and of ALiBi, and why they can't be looked at where they can't."""
    steps: tuple[Step, ...] = ()
    bias, slopes = arguments["bias"], arguments["slopes"]
    if bias is not None and pairs.unlike:
        name = arguments.name("bias")
        return (Unknown(f"{name} of packed sequences"),), f"{name} of packed sequences is not read"
    if bias is not None:
        shape = (layout.batch, layout.heads, layout.rows, layout.columns)
        steps = as_passed(read_addend(arguments.node("bias"), None if bias.is_meta else bias.detach(), 1.0, (), shape))
    if slopes is None:
        return steps, None
    too_large = pairs.too_large()
    if slopes.is_meta or too_large:
        return (*steps, Bias("alibi", None)), too_large
    size = slopes.detach().float()[..., None, None]  # (H, 1, 1) or (B, H, 1, 1)
    value = -size * pairs.distance(lower_right=True).abs()
    return (*steps, Bias("alibi", Placed(value, (), tuple(value.shape)))), None


def _mask(
    arguments: _Arguments, pairs: Pairs, layout: Layout, lower_right: bool
) -> tuple[tuple[Step, ...], str | None]:
    """The step of the causal flag and the window, and why it can't be looked at where it can't."""
    left, right = _sides(arguments)
    if left is None and right is None:
        return (), None
    causal = left is None and right == 0
    square = layout.rows == layout.columns
    if pairs.unlike:
        square = square and not bool(pairs.offset().any())
    elif not pairs.known:
        square = square and _same_ends(arguments)
    if causal and (square or not lower_right):
        return (CAUSAL,), None
    name = "window" if not causal else "causal_lower_right"
    if not pairs.known or pairs.too_large():
        return (Hide("implicit", -math.inf, name=name),), pairs.too_large() if pairs.known else None
    visible = pairs.visible(left, right, lower_right=lower_right)
    if visible is None:
        return (), None
    shape = (layout.batch, layout.heads, layout.rows, layout.columns)
    return (Hide("implicit", -math.inf, Placed(visible, (), shape), name=name if pairs.unlike else None),), None


def _same_ends(arguments: _Arguments) -> bool:
    """Whether q and k end at the same places by one tensor, whose values are not known."""
    if arguments["query_ends"] is None or arguments["key_ends"] is None or arguments["key_used"] is not None:
        return False
    return arguments.node("query_ends") is arguments.node("key_ends")


def _sides(arguments: _Arguments) -> tuple[int | None, int | None]:
    """Keys before the row's own and after it that it sees; None without a bound."""
    left, right, both = arguments["left"], arguments["right"], arguments["window"]
    if both is not None:
        left, right = both
    left, right = (None if side is None or side < 0 else int(side) for side in (left, right))
    return left, 0 if arguments["causal"] else right
