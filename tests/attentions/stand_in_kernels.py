"""Stand-ins for the operators of flash-attn, xformers and torch's CUDA build: their schemas, computed by plain PyTorch.

The schemas are those of flash-attn 2.8.3 (`flash_attn_interface.py`) and 3 (`hopper/flash_api.cpp`), xformers 0.0.35
(`ops/fmha/flash.py`, `flash3.py`, `csrc/attention`) and torch 2.13; what is computed follows their documentation: the
last query stands beside the last key, ALiBi is -slope |i + S - L - j|, a window counts keys beside the row's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.tracing import AttentionCall

_FLASH = (
    "(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_FLASH_VARLEN = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_FLASH_3 = (
    "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_XFORMERS = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, Tensor? seqstart_q, Tensor? seqstart_k, "
    "int? max_seqlen_q, float dropout_p, bool compute_logsumexp, int custom_mask_type, float? scale, "
    "Tensor? seqlen_k, int? window_size) -> (Tensor, Tensor, int, int)"
)
_XFORMERS_FLASH = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, bool is_causal, SymInt window_left, "
    "SymInt window_right, bool return_softmax, Tensor? block_tables) -> (Tensor, Tensor, Tensor)"
)
_XFORMERS_FLASH_3 = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "Tensor? leftpad_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, bool is_causal, "
    "Tensor? descale_q=None, Tensor? descale_k=None, Tensor? descale_v=None, Tensor? block_table=None, "
    "bool use_kvsplit=False, SymInt window_left=-1, SymInt window_right=-1) -> (Tensor, Tensor)"
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    left: int = -1,
    right: int = -1,
    lower_right: bool = True,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """(L, Hq, Ev) of one sequence: q (L, Hq, E), k (S, H, E), v (S, H, Ev), slopes (Hq,), bias (Hq, L, S)."""
    logits = logits_of(q, k, scale, softcap=softcap, slopes=slopes, bias=bias)
    hidden = ~visible(q.shape[0], k.shape[0], left=left, right=right, lower_right=lower_right)
    weights = logits.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1).to(weights.dtype)
    return torch.einsum("hij,jhe->ihe", weights, v).to(q.dtype)


def logits_of(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """(Hq, L, S) before the mask."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    z = torch.einsum("ihe,jhe->hij", q, k) * scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    if slopes is not None:
        i = torch.arange(len(q))[:, None] + len(k) - len(q)
        z = z - slopes[:, None, None] * (i - torch.arange(len(k))).abs()
    return z if bias is None else z + bias


def visible(rows: int, columns: int, *, left: int = -1, right: int = -1, lower_right: bool = True) -> Tensor:
    """(L, S) True where the row sees the key."""
    shift = columns - rows if lower_right else 0
    distance = torch.arange(rows)[:, None] + shift - torch.arange(columns)
    seen = torch.ones(rows, columns, dtype=torch.bool)
    seen &= (distance <= left) | (left < 0)
    return seen & ((distance >= -right) | (right < 0))


def attend_all(q: Tensor, k: Tensor, v: Tensor, scale: float, **rest: Any) -> Tensor:
    """A dense batch (B, L, H, E), or packed sequences (T, H, E) with `ends`, how many `used`, and their `pages`."""
    query_ends, key_ends = rest.pop("query_ends", None), rest.pop("key_ends", None)
    used, pages, slopes = rest.pop("used", None), rest.pop("pages", None), rest.pop("slopes", None)
    if pages is not None:
        k, v = (x[pages.long()].flatten(1, 2) for x in (k, v))
    packed = query_ends is not None and q.dim() == 4
    if packed:
        q, k, v = (x[0] for x in (q, k, v))
    out = torch.zeros_like(q[..., :1].expand(*q.shape[:-1], v.shape[-1]))
    for n in range(len(q) if query_ends is None else len(query_ends) - 1):
        rows = n if query_ends is None else slice(int(query_ends[n]), int(query_ends[n + 1]))
        keys, values = (_keys_of(x, n, None if pages is not None else key_ends, used) for x in (k, v))
        slope = slopes if slopes is None or slopes.dim() == 1 else slopes[n]
        out[rows] = attend(q[rows], keys, values, scale, slopes=slope, **rest)
    return out[None] if packed else out


def _keys_of(tokens: Tensor, n: int, ends: Tensor | None, used: Tensor | None) -> Tensor:
    whole = tokens[n] if ends is None else tokens[int(ends[n]) : int(ends[n + 1])]
    return whole if used is None else (whole if ends is None else tokens[int(ends[n]) :])[: int(used[n])]


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float, causal: bool, *rest: Any) -> Any:
    left, right, softcap, slopes, _ = rest
    right = 0 if causal else right
    out = attend_all(q, k, v, scale, left=left, right=right, softcap=softcap, slopes=slopes)
    return out, *_aside(q, 3)


def _flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    scale: float,
    causal: bool,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    return_softmax: bool = False,
    pages: Tensor | None = None,
    leftpad: Tensor | None = None,
    used: Tensor | None = None,
    zero_tensors: bool = False,
) -> Any:
    right = 0 if causal else right
    sides = {"query_ends": query_ends, "key_ends": key_ends, "used": used, "pages": pages}
    out = attend_all(q, k, v, scale, left=left, right=right, softcap=softcap, slopes=slopes, **sides)
    return out, *_aside(q, 3)


def _flash_3(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    names = [part.split("=")[0].split()[-1] for part in _FLASH_3[1 : _FLASH_3.index(" -> ") - 1].split(", ")]
    named = {**dict(zip(names[3:], args, strict=False)), **kwargs}
    scale = named.get("softmax_scale")
    out = attend_all(
        q,
        k,
        v,
        q.shape[-1] ** -0.5 if scale is None else scale,
        left=named.get("window_size_left", -1),
        right=0 if named.get("is_causal") else named.get("window_size_right", -1),
        softcap=named.get("softcap", 0.0),
        query_ends=named.get("cu_seqlens_q"),
        key_ends=named.get("cu_seqlens_k"),
        used=named.get("seqused_k"),
        pages=named.get("page_table"),
    )
    into = named.get("out")
    return (out if into is None else into.copy_(out)), *_aside(q, 3)


def _xformers(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *args: Any) -> Any:
    query_ends, key_ends, _, _, _, kind, scale, used, window = args
    out = attend_all(
        q,
        k,
        v,
        q.shape[-1] ** -0.5 if scale is None else scale,
        left=window - 1 if window else -1,
        right=0 if kind else -1,
        lower_right=kind == 2,
        query_ends=query_ends,
        key_ends=key_ends,
        used=used,
        bias=None if bias is None else bias[0],
    )
    return out, q.new_zeros(1), 0, 0


def _xformers_flash(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
    query_ends, key_ends, used, _, _, _, scale, causal, left, right, _, pages = args
    sides = {"query_ends": query_ends, "key_ends": key_ends, "used": used, "pages": pages}
    return attend_all(q, k, v, scale, left=left, right=0 if causal else right, **sides), *_aside(q, 2)


def _xformers_flash_3(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    query_ends, key_ends, used, _, _, _, _, scale, causal, *rest = args
    left, right = (*rest[5:], -1, -1)[:2] if len(rest) > 5 else (-1, -1)
    sides = {"query_ends": query_ends, "key_ends": key_ends, "used": used, "pages": rest[3] if len(rest) > 3 else None}
    return attend_all(q, k, v, scale, left=left, right=0 if causal else right, **sides), *_aside(q, 1)


def _aside(q: Tensor, count: int) -> tuple[Tensor, ...]:
    """The log-sum-exp, and other results that nothing reads."""
    return tuple(q.new_zeros(1) for _ in range(count))


def _without_data(name: str) -> Callable[..., Any]:
    others = {"flash_attn": 3, "flash_attn_3": 3, "xformers_flash": 2, "xformers_flash3": 1}

    def run(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        namespace = name.split("::")[0]
        return (out, q.new_empty(1), 0, 0) if namespace == "xformers" else (out, *_aside(q, others[namespace]))

    return run


OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "flash_attn::_flash_attn_forward": (_FLASH, _flash),
    "flash_attn::_flash_attn_varlen_forward": (_FLASH_VARLEN, _flash_varlen),
    "flash_attn_3::fwd": (_FLASH_3, _flash_3),
    "xformers::efficient_attention_forward_cutlass": (_XFORMERS, _xformers),
    "xformers_flash::flash_fwd": (_XFORMERS_FLASH, _xformers_flash),
    "xformers_flash3::flash_fwd": (_XFORMERS_FLASH_3, _xformers_flash_3),
}


@contextmanager
def registered() -> Iterator[None]:
    """The operators exist, and run on a CPU and without data."""
    libraries: dict[str, torch.library.Library] = {}
    try:
        for name, (schema, run) in OPERATORS.items():
            namespace, short = name.split("::")
            library = libraries.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
            library.define(short + schema)
            library.impl(short, run, "CPU")
            library.impl(short, _without_data(name), "Meta")
        yield
    finally:
        for library in libraries.values():
            library._destroy()


def traced(model: nn.Module, x: Tensor) -> tuple[AttentionCall, Tensor]:
    """The one call of a run in float64, its output bit-equal to the run without a trace; and the input."""
    model, x = model.double(), x.double()
    with torch.no_grad():
        plain = model(x)
        with sqrtdk.trace(model) as run:
            output = model(x)
    assert torch.equal(plain, output)
    assert run.not_measured == ()
    (call,) = run.calls
    return call, x


def check_statistics(
    call: AttentionCall,
    queries: Iterable[Tensor],
    keys: Iterable[Tensor],
    scale: float,
    sides: dict[str, Any],
    **rest: Any,
) -> None:
    """The record's statistics are those of each sequence's own logits; rows and keys that do not exist don't count."""
    rows: list[dict[str, Tensor]] = []
    with torch.no_grad():
        for q, k in zip(queries, keys, strict=True):
            seen = visible(len(q), len(k), **sides)
            z = logits_of(q, k, scale, **rest).masked_fill(~seen, -math.inf)
            entropy, told = torch.special.entr(z.softmax(-1)).sum(-1), seen.any(-1)
            rows.append({"largest": z.amax((1, 2)), "entropy": entropy[:, told], "keys": seen[told].sum(-1).double()})
            rows[-1]["blind"] = (~told).sum()
    stats, heads = call.stats, len(rows[0]["largest"])
    assert stats is not None
    assert stats.blind_rows == (int(sum(row["blind"] for row in rows)),) * heads
    largest = torch.stack([row["largest"] for row in rows]).amax(0)
    assert stats.max_logit == pytest.approx(largest.tolist(), rel=1e-6)
    entropy = torch.cat([row["entropy"] for row in rows], 1).mean(1)
    assert stats.entropy_nats == pytest.approx(entropy.tolist(), rel=1e-6)
    assert stats.keys == pytest.approx([float(torch.cat([row["keys"] for row in rows]).mean())] * heads)
