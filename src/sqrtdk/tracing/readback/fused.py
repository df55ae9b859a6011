"""Reads an attention that is one operation, by the argument names of the operator's schema.

The query is (..., Hq, L, E), (B, L, Hq, E), or packed sequences (T, Hq, E) with the end of each. Operators name the
same argument differently. The steps are scale, softcap, bias, ALiBi, mask, sinks, in this order.
Sources: torch 2.13 (`native_functions.yaml`, `nn/attention/varlen.py`), flash-attn 2.8 (`flash_attn_interface.py`),
flash-attn 3 (`hopper/flash_api.cpp`), xformers 0.0.35 (`ops/fmha`), `impl/kernel/attention.cpp`,
`impl/gpu/operators.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sqrtdk.impl.operands import of_pairs
from sqrtdk.messages import Message
from sqrtdk.tracing.readback.addends import as_passed, read_addend
from sqrtdk.tracing.readback.factors import tensor_factor
from sqrtdk.tracing.readback.lineage import follow_side
from sqrtdk.tracing.readback.orient import is_over_channels, paired_channels
from sqrtdk.tracing.readback.packed import PackedPair, Sequences
from sqrtdk.tracing.readback.reading import Layout, Reading, Vectors
from sqrtdk.tracing.readback.rotations import with_cancelled_decays
from sqrtdk.tracing.readback.side import PERMUTED, ProductSide
from sqrtdk.tracing.records import BY_ROW, Factor
from sqrtdk.tracing.steps import Bias, Hide, LearnedSinks, Scale, Softcap, Step, Unknown
from sqrtdk.tracing.steps.placed import StepTensor
from sqrtdk.tracing.tape.graph import distinct, is_learned
from sqrtdk.tracing.tape.node import Node, back
from sqrtdk.tracing.tape.recorder import KernelCall

# Each argument by the names that operators give it.
_ARGUMENT_NAMES = {
    "query": ("query", "q"),
    "key": ("key", "k"),
    "value": ("value", "v"),
    "scale": ("scale", "softmax_scale", "factor"),  # sqrtdk's kernels take a tensor `scale`, else a number `factor`
    "causal": ("is_causal", "causal"),
    "left": ("window_size_left", "window_left", "below"),
    "right": ("window_size_right", "window_right", "above"),
    "window": ("window_size",),
    "dropout": ("dropout_p", "p"),
    "softcap": ("softcap",),
    "slopes": ("alibi_slopes",),
    "bias": ("attn_bias", "attn_mask", "bias"),
    "distances": ("distances",),  # a table of j - i from 1 - L on
    "visible": ("visible",),
    "sinks": ("sinks",),
    "mask_type": ("custom_mask_type",),
    "query_ends": ("cu_seqlens_q", "cum_seq_q", "cu_seq_q", "seqstart_q"),
    "key_ends": ("cu_seqlens_k", "cum_seq_k", "cu_seq_k", "seqstart_k"),
    "query_used": ("seqused_q",),
    "key_used": ("seqused_k", "seqlen_k"),
    "longest_query": ("max_seqlen_q", "max_q"),
    "longest_key": ("max_seqlen_k", "max_k"),
    "pages": ("block_table", "block_tables", "page_table"),
}
# Arguments that change no formula: results by rounding at most, or which weights dropout drops. An argument in neither
# table is reported as not read.
_IDLE_ARGUMENTS = {
    "results": ("out", "out_", "return_softmax", "return_debug_mask", "compute_logsumexp", "compute_log_sumexp"),
    "of ours": ("statistics", "places", "seed", "wide"),
    "schedule": ("num_splits", "use_kvsplit", "pack_gqa", "sm_margin", "scheduler_metadata", "deterministic"),
    "without their tensors": ("is_rotary_interleaved", "rotary_interleaved", "page_size", "zero_tensors"),
    "others": ("enable_gqa", "dropout_mask"),
}
_KNOWN_ARGUMENTS = frozenset(
    name for table in (_ARGUMENT_NAMES, _IDLE_ARGUMENTS) for names in table.values() for name in names
)
_LOWER_RIGHT = 2  # values of `custom_mask_type`: 0 no mask, 1 causal from the upper left, 2 from the lower right
_RESHAPED = frozenset({"unsqueeze", "view", "_unsafe_view", "reshape", "clone"})
IMPLICIT_CAUSAL = Hide("implicit", -math.inf, name="causal", causal=True)


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The arguments of a call, looked up by the keys of `_ARGUMENT_NAMES`."""

    call: KernelCall
    kernel: Kernel

    def name(self, what: str) -> str | None:
        """Return the operator's own name for an argument, or None if it was not passed."""
        return next((name for name in _ARGUMENT_NAMES[what] if self.call.arguments.get(name) is not None), None)

    def __getitem__(self, what: str) -> Any:
        name = self.name(what)
        return None if name is None else self.call.arguments[name]

    def node(self, what: str) -> Node:
        """Return the node of a tensor argument that was passed."""
        return self.call.nodes[self.name(what) or ""]

    @property
    def by_token(self) -> bool:
        """Whether heads stand behind the rows: (B, L, H, E), or packed sequences (T, H, E)."""
        return self.kernel.dims == "BLHE" or self["query_ends"] is not None

    def lead(self, layout: Layout) -> Sequence[int]:
        """Return the leading axes of the logits to which the operator broadcasts its masks."""
        return (layout.batch, layout.heads) if self.by_token else self["query"].shape[:-2]

    @property
    def unread(self) -> tuple[Unknown, ...]:
        """Arguments that may change results and have no reader: switched on, or switched off against the default."""
        on = [name for name, value in self.call.arguments.items() if isinstance(value, Tensor) or value]
        names = [name for name in (*on, *sorted(self.call.turned_off)) if name not in _KNOWN_ARGUMENTS]
        return tuple(Unknown(Message("trace.step.argument", name=name)) for name in names)


def read_kernel(call: KernelCall, kernel: Kernel) -> Reading:
    """Return the reading of an attention whose operands and steps are all arguments of one operator.

    Args:
        call: the call of the operator.
        kernel: how the operator is read.
    """
    arguments = _Arguments(call, kernel)
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    kv_heads: int | None
    nodes = arguments.node("query"), arguments.node("key")
    query, key = with_cancelled_decays(follow_side(nodes[0], "q"), follow_side(nodes[1], "k"))
    query = query if paired_channels(*nodes) else query.then(PERMUTED)
    if arguments.by_token:
        k, v, pairs = _sequences(arguments, q, k, v)
        query, key = _by_head(query, q, pairs.queries), _by_head(key, k, pairs.keys)
        sizes = (pairs.queries.count, q.shape[-2], pairs.queries.longest, pairs.keys.longest)
        layout, kv_heads = Layout(*sizes, q.shape[-1], v.shape[-1]), int(k.shape[-2])
    else:
        layout, kv_heads = _layout(arguments, query)
        pairs = PackedPair(Sequences(layout.batch, layout.rows), Sequences(layout.batch, layout.columns), _device(q))
        if kernel.kind == "compiled" and q.shape[1] != layout.heads:
            q = q.reshape(layout.batch, layout.heads, *q.shape[-2:])
            k = k.reshape(layout.batch, -1, *k.shape[-2:])
    scale, scaled = _scale(arguments, layout)
    softcap = arguments["softcap"] or None  # flash-attn passes 0.0 for no softcap
    bias, no_bias = _bias(arguments, pairs, layout)
    hide, no_mask = _mask(arguments, pairs, layout)
    unread, exact = arguments.unread, kernel.kind != "sdpa"
    too_large = pairs.too_large() if all(exists is not None for exists in pairs.exist()) else None
    return Reading(
        site=call.site,
        kind=kernel.kind,
        op=call.op.replace("::", "."),
        layout=layout,
        query=query,
        key=key,
        steps=(
            scaled,
            *(() if softcap is None else (Softcap(softcap),)),
            *bias,
            *hide,
            *(() if arguments["sinks"] is None else (LearnedSinks(),)),
            *unread,
        ),
        operands=pairs.vectors(q, k, scale, softcap, exact=exact)
        if arguments.by_token
        else Vectors(q, k, scale, softcap, exact=exact),
        dtype=q.dtype,
        logits_dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        device=q.device,
        output=call.output,
        kv_heads=kv_heads,
        dropout=float(arguments["dropout"] or 0.0),
        axis="channels" if not arguments.by_token and is_over_channels(arguments.node("query")) else "positions",
        no_slope=unread[0].name if unread else None,
        no_stats=_not_read(unread[0].name) if unread else no_bias or no_mask or too_large,
    )


def _not_read(argument: str) -> str:
    return Message("trace.statistics.argument", name=argument)


def _device(tensor: Tensor) -> torch.device:
    """Return the device for masks: the CPU if the tensor is on the meta device, so that masks have values."""
    return torch.device("cpu") if tensor.is_meta else tensor.device


# -- sizes, and where the sequences lie --------------------------------------------------------------------------------


def _layout(arguments: _Arguments, query: ProductSide) -> tuple[Layout, int | None]:
    """Return the sizes of (..., H, L, E) operands, and the key's heads, or None if its shape does not tell them."""
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    width, entries, heads = q.shape[-1], math.prod(q.shape[:-2]), q.shape[-3] if q.dim() > 3 else 1
    folded = q.dim() == 3
    of_query = (query.folded_heads or width) // max(width, 1)
    # For a query (B * H, L, E) torch 2.14 calls its kernel with `q.unsqueeze(0)`, 2.13 with q itself, and sqrtdk's
    # kernels get a view. A model without a batch also passes (H, L, E): the projection's heads tell the two apart.
    if q.dim() == 4 and q.shape[0] == 1 and k.shape[-3] == heads and _dims_of_caller(arguments.node("query")) == 3:
        as_wide = query.root is not None and query.root.shape[-1:] == (width,)  # such a projection makes one head
        folded = bool(query.folded_heads or as_wide) and of_query > 0 and heads % of_query == 0
    if folded:
        heads = of_query
    heads = heads if heads and entries % heads == 0 else 1
    layout = Layout(entries // heads, heads, q.shape[-2], k.shape[-2], width, v.shape[-1])
    return layout, None if k.dim() < 4 or folded else int(k.shape[-3])


def _dims_of_caller(node: Node) -> int:
    """Return the number of dimensions of the caller's query, before it was reshaped to four."""
    return next((len(at.shape) for at in back(node, _RESHAPED) if len(at.shape) != 4), 4)


def _sequences(arguments: _Arguments, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, PackedPair]:
    """Return k and v, read from the pages if the cache is paged, and the places of the sequences."""
    pages, ends = arguments["pages"], arguments["key_ends"]
    if pages is not None:
        k, v, ends = _paged(k, pages), _paged(v, pages), None
    queries = Sequences.of(q, arguments["query_ends"], arguments["query_used"], arguments["longest_query"])
    keys = Sequences.of(k, ends, arguments["key_used"], arguments["longest_key"])
    alike = ends is not None and arguments["key_used"] is None and arguments["query_ends"] is not None
    alike = alike and arguments.node("query_ends") is arguments.node("key_ends")
    return k, v, PackedPair(queries, keys, _device(q), alike)


def _paged(pool: Tensor, pages: Tensor) -> Tensor:
    """Return (N, S, H, E) from a pool (pages, page size, H, E) and the page numbers of each sequence."""
    if pool.is_meta or pages.is_meta:
        return pool.new_empty(pages.shape[0], pages.shape[1] * pool.shape[1], *pool.shape[2:], device="meta")
    return pool[pages.long().clamp(0, len(pool) - 1)].flatten(1, 2)


def _by_head(side: ProductSide, operand: Tensor, sequences: Sequences) -> ProductSide:
    """Return the side of an operand (..., L, H, E) with its basis as (B, H, L, E)."""
    factors = tuple(f for f in side.factors if f.per_head is None or len(f.per_head) == operand.shape[-2])
    if len(factors) < len(side.factors):  # axis -3 holds positions in this layout, not heads
        side = replace(side, factors=factors, unknown=(*side.unknown, Message("trace.step.factor_of_position")))
    basis = side.basis
    known = basis is not None and not basis.is_meta and basis.shape[:-1] == operand.shape[:-1]
    return replace(side, basis=sequences.spread(basis) if known and basis is not None else None)


# -- scale, bias, mask -------------------------------------------------------------------------------------------------


def _scale(arguments: _Arguments, layout: Layout) -> tuple[float | Tensor, Scale]:
    """Return the scale, a number or a tensor (B, H, L, 1), and its step."""
    passed = arguments["scale"]
    if isinstance(passed, Tensor):
        node = arguments.node("scale")
        factor = tensor_factor(node, passed, "op", heads_axis=-3)
        value = _shaped(passed, arguments.lead(layout), layout, 1)
        return value, Scale(factor or Factor(None, "op", BY_ROW, learned=is_learned(node)))
    number = layout.width**-0.5 if passed is None else float(passed)
    name = "sqrtdk" if arguments.kernel.kind == "compiled" else arguments.kernel.kind
    return number, Scale(Factor(number, "op", f"{name} default 1/sqrt(E)" if passed is None else f"{name} scale"))


def _shaped(tensor: Tensor, lead: Sequence[int], layout: Layout, columns: int) -> Tensor:
    """Return (B, H, L, columns) from a tensor that broadcasts to (*lead, L, columns).

    Broadcast dimensions keep size 1 (B, H and L only).
    """
    tensor = tensor.detach().expand(*lead, layout.rows, columns)
    return distinct(tensor.reshape(layout.batch, layout.heads, layout.rows, columns), last=1)


def _bias(arguments: _Arguments, pairs: PackedPair, layout: Layout) -> tuple[tuple[Step, ...], str | None]:
    """Return the steps of the addend (a bias or a float mask) and of ALiBi, and the reason if they can't be read."""
    steps: tuple[Step, ...] = ()
    bias, slopes, name = arguments["bias"], arguments["slopes"], arguments.name("bias")
    if bias is not None and pairs.unlike:
        packed = Message("trace.step.packed_bias", name=name or "")
        return (Unknown(packed),), _not_read(packed)
    if bias is not None and bias.dtype != torch.bool:
        value = _shaped(bias, arguments.lead(layout), layout, layout.columns)
        steps = as_passed(read_addend(arguments.node("bias"), value, 1.0, (), layout.shape))
    table = arguments["distances"]
    if table is not None:
        value = _shaped(of_pairs(table.squeeze(-2), layout.rows), arguments.lead(layout), layout, layout.columns)
        steps += as_passed(read_addend(arguments.node("distances"), value, 1.0, (), layout.shape))
    if slopes is None:
        return steps, None
    if slopes.is_meta or pairs.too_large():
        return (*steps, Bias("alibi", None)), pairs.too_large()
    size = slopes.detach().float()[..., None, None]  # (H, 1, 1) or (B, H, 1, 1)
    value = -size * pairs.distance(lower_right=True).abs()
    return (*steps, Bias("alibi", StepTensor(value, (), tuple(value.shape)))), None


def _mask(arguments: _Arguments, pairs: PackedPair, layout: Layout) -> tuple[tuple[Hide, ...], str | None]:
    """Return one step for mask, causal flag and window together, and the reason if it can't be measured."""
    bias, passed = arguments["bias"], arguments["visible"]
    passed = bias if bias is not None and bias.dtype == torch.bool else passed
    left, right, lower_right = _band(arguments)
    banded, form = left is not None or right is not None, "implicit" if passed is None else "bool"
    if passed is None and not banded:
        return (), None
    bounded = left is not None and left < (layout.columns if lower_right else layout.rows) - 1
    if passed is None and right == 0 and not bounded and (pairs.square or not lower_right):
        return (IMPLICIT_CAUSAL,), None
    if passed is not None and passed.is_meta:
        return (Hide(form, -math.inf),), None
    last = right == (0 if lower_right else layout.columns - layout.rows)  # the last row sees the last key
    name = "causal_lower_right" if last and not bounded else "window"
    if banded and (not pairs.known or pairs.too_large()):
        reason = pairs.too_large() if pairs.known else None
        return (Hide(form, -math.inf, name=name if passed is None else "mask"),), reason
    band = pairs.visible(left, right, lower_right=lower_right) if banded else None
    if band is None and passed is None and lower_right:
        return (), None  # decoding: a single row at the last key sees every key
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=pairs.device) if band is None else band
    if passed is not None:
        visible = visible & _shaped(passed, arguments.lead(layout), layout, layout.columns)
    # With unlike lengths the shorter sequences do not show the pattern, so the name comes from the arguments.
    hide = Hide(form, -math.inf, StepTensor(visible, (), layout.shape), name=name if pairs.unlike else None)
    return (hide,), None


def _band(arguments: _Arguments) -> tuple[int | None, int | None, bool]:
    """Return (left, right, lower_right): a row sees `left` keys before its own and `right` after it.

    None means no bound. With `lower_right` the last row's own key is the last key.
    """
    left, right, both, kind = (arguments[what] for what in ("left", "right", "window", "mask_type"))
    lower_right, causal = arguments.kernel.corner == "lower right", arguments["causal"]
    if arguments.name("mask_type") is not None or isinstance(both, int):  # xformers' arguments
        lower_right, causal = kind == _LOWER_RIGHT, bool(kind)
        both = None if not both or both < 0 else (both - 1, -1)  # xformers counts the row's own key in its window
    left, right = both or (left, right)
    if arguments.kernel.kind != "compiled":  # flash-attn: -1 is not a bound; in sqrtdk's kernels it is a bound
        left, right = (None if side is None or side < 0 else int(side) for side in (left, right))
    return left, 0 if causal else right, lower_right


class Kernel(NamedTuple):
    """How one operator is read.

    Attributes:
        kind: `kind` of the record.
        dims: layout of its tensors; packed sequences are (T, H, E) with either value.
        corner: which corner causal flag and windows start from: first row at first key, or last row at last key.
        query: name of the argument q; None if the operation projects q itself.
        read: returns the reading of a call.
    """

    kind: str = "sdpa"
    dims: str = "BHLE"
    corner: str = "upper left"
    query: str | None = "query"
    read: Callable[[KernelCall, Kernel], Reading] = read_kernel
