"""The operation: resolve the arguments, choose an implementation, run it."""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from sqrtdk import _arguments as arguments
from sqrtdk._guesses import parameters_of, refuse_arguments
from sqrtdk._resolve import resolve_arguments
from sqrtdk._subclasses import PLAIN_TYPES, named_in_errors, torch_attention
from sqrtdk.impl.call import Call
from sqrtdk.impl.choice import IMPLEMENTATIONS, LARGEST_DENSE, pays_compiled, settle
from sqrtdk.impl.extremes import gives_infinity, may_lose_mass, needs_care, wants_gradients
from sqrtdk.impl.operands import in_order_of
from sqrtdk.impl.product import computed
from sqrtdk.impl.tiled import tiled, weighed
from sqrtdk.stats.request import AuxOutput, AuxRequest

if TYPE_CHECKING:
    from typing_extensions import Never

    from sqrtdk._named import AnyBias, AnyScale, AnyScore, AnyWindow
    from sqrtdk._shapes import AnyKey, Bias, Key, Output, Query, Sinks, Value, Visible
    from sqrtdk.impl.mods import MaskMod, ScoreMod

_log = logging.getLogger("sqrtdk")


@overload
def attention(
    query: Query,
    key: AnyKey,
    value: Value,
    attn_mask: Visible | Bias | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: AnyScale | None = None,
    enable_gqa: bool = False,
    *,
    score: AnyScore | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Any = None,
    softcap: float | None = None,
    bias: AnyBias | None = None,
    window: AnyWindow | None = None,
    sinks: Sinks | float | None = None,
    causal_lower_right: bool = False,
    window_lower_right: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
    return_aux: None = None,
    return_weights: Literal[False] = False,
    impl: str = "auto",
) -> Output: ...


@overload
def attention(
    query: Query,
    key: AnyKey,
    value: Value,
    attn_mask: Visible | Bias | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: AnyScale | None = None,
    enable_gqa: bool = False,
    *,
    score: AnyScore | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Any = None,
    softcap: float | None = None,
    bias: AnyBias | None = None,
    window: AnyWindow | None = None,
    sinks: Sinks | float | None = None,
    causal_lower_right: bool = False,
    window_lower_right: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
    return_aux: AuxRequest | Literal[True],
    return_weights: Literal[False] = False,
    impl: str = "auto",
) -> tuple[Output, AuxOutput]: ...


@overload
def attention(
    query: Query,
    key: AnyKey,
    value: Value,
    attn_mask: Visible | Bias | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: AnyScale | None = None,
    enable_gqa: bool = False,
    *,
    score: AnyScore | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Any = None,
    softcap: float | None = None,
    bias: AnyBias | None = None,
    window: AnyWindow | None = None,
    sinks: Sinks | float | None = None,
    causal_lower_right: bool = False,
    window_lower_right: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
    return_aux: AuxRequest | bool | None = None,
    return_weights: bool = False,
    impl: str = "auto",
) -> Any: ...


def attention(
    query: Query,
    key: AnyKey,
    value: Value,
    attn_mask: Visible | Bias | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: AnyScale | None = None,
    enable_gqa: bool = False,
    *,
    score: AnyScore | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Any = None,
    softcap: float | None = None,
    bias: AnyBias | None = None,
    window: AnyWindow | None = None,
    sinks: Sinks | float | None = None,
    causal_lower_right: bool = False,
    window_lower_right: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
    return_aux: AuxRequest | bool | None = None,
    return_weights: bool = False,
    impl: str = "auto",
    **_unknown: Never,
) -> Any:
    r"""Attention with any score, scale, bias and mask; a drop-in for torch's `scaled_dot_product_attention`.

    `softmax(score_mod(softcap(scale * score(q, k))) + bias + mask) v`, in this order; the scale multiplies neither bias
    nor mask.

    Args:
        query: (..., Hq, L, E), float64, float32, float16 or bfloat16.
        key: (..., H, S, Ek); Ek = E unless the score takes another.
        value: (..., Hv, S, Ev).
        attn_mask: broadcastable to (..., Hq, L, S): bool, True where the row sees the key, or floating, added to the
            logits; -inf hides a key; or `torch.nn.attention.bias.causal_upper_left` or `causal_lower_right` of L, S; or
            a BlockMask, as `block_mask`.
        dropout_p: rate of dropout on the weights; it applies in train and eval alike.
        is_causal: row i sees keys j <= i (upper-left); combined with `attn_mask`, a key must pass both.
        scale: factor on the score: a number, a rule of `sqrtdk.scales` or its name, or a tensor, (Hq,) or broadcastable
            to (..., Hq, L, 1), which may carry a gradient. None: the score's own rule, 1/sqrt(E) for the dot product.
        enable_gqa: fewer key and value heads than query heads; query head h uses key head h // (Hq / H).
        score: a score of `sqrtdk.scores`, or its name; None: the dot product. Or a function of q (..., Hq, R, E), a
            block of rows, and k (..., Hq, S, Ek), half types as float32; it returns the scores (..., Hq, R, S), and if
            no scale is given they get none.
        score_mod: FlexAttention's `score_mod(score, b, h, q_idx, kv_idx)`, any function that torch's own accepts. It
            gets the scaled score of a pair, float32 or float64, and its place, and returns the logit; -inf hides the
            key. Tensors that it captures may carry gradients. b counts through all leading dimensions but the heads.
        mask_mod: FlexAttention's `mask_mod(b, h, q_idx, kv_idx)`: True where the row sees the key. Beside other masks a
            key must pass all.
        block_mask: FlexAttention's BlockMask, of which only the mask_mod is used.
        softcap: c of c tanh(z / c), c > 0.
        bias: a tensor broadcastable to (..., Hq, L, S), a term of `sqrtdk.positions`, or "alibi", which is
            `positions.alibi(Hq)` in a causal call and -m |i + S - L - j| in any other; a term that depends on q and k
            gets them after the score has changed them.
        window: (left, right): row i sees keys i - left to i + right, both included; None or -1: no bound. In a causal
            call also a number n of keys, the row's own included, as transformers' `sliding_window`: (n - 1, 0).
        sinks: (Hq,) logits, one number for all heads, or a tensor of two or more dimensions that broadcasts to (...,
            Hq, L, 1), one per row. Sinks enter the softmax's denominator and have no value. 0.0 is the off-by-one
            softmax.
        causal_lower_right: causal with the last row aligned with the last key, with or without `is_causal`: row i sees
            keys j <= i + S - L, and `window` and position terms count from there.
        window_lower_right: the same for a call that is not causal: `window` and position terms count from i + S - L,
            as in flash-attn and x-transformers; default False: from i.
        query_offset: place of the first row in the sequence, where query is a block of its rows; see `key_offset`.
        key_offset: place of the first key, where key and value are a block of the keys: `is_causal`, `window`, position
            terms, `score_mod` and `mask_mod` go by the places query_offset + i and key_offset + j. `attn_mask` and a
            bias tensor are those of the block, and a scale rule that counts keys counts the block's. `merge` joins the
            blocks by their lse.
        return_aux: which statistics to return as the last value, True for all; see `AuxOutput` for their definitions.
        return_weights: return the weights (..., Hq, L, S) as the second value, after dropout. They are held in memory.
        impl: "auto", "cpu" (the compiled kernel for CPUs; the first call with this name compiles it; functions make
            their logits in torch, by blocks of rows), "dense" (holds L x S), "fused" (torch's kernels), "tiled" (blocks
            of rows, recomputed in the backward pass; under `torch.func` all are kept), "triton" (the Triton kernel for
            GPUs). A named implementation runs or raises. "auto" never starts a C++ compiler, makes no mask of more than
            2^26 elements, and avoids any implementation that holds more than 2^28 pairs; see `explain` for its choice.
            On a CPU it runs a score_mod or mask_mod as the bias, softcap, causal mask or window that its operations
            prove it to be.

    Returns:
        (..., Hq, L, Ev) of the value's dtype, its dimensions in the query's order in memory; with `return_weights` or
        `return_aux` a tuple: output, weights of the value's dtype, `AuxOutput` of (..., Hq, L) tensors. A row that sees
        no key gives 0.

    Raises:
        InvalidValueError: Shapes or values do not fit.
        InvalidTypeError: An argument has the wrong type or dtype.
        UnsupportedError: A named implementation can't run the call.

    Example:
        >>> import sqrtdk
        >>> q = k = v = torch.eye(4).view(1, 1, 4, 4)
        >>> output, aux = attention(q, k, v, is_causal=True, return_aux=AuxRequest(entropy_nats=True, keys=True))
        >>> aux.keys.tolist()
        [[[1.0, 2.0, 3.0, 4.0]]]
        >>> round(float(aux.entropy_nats[0, 0, 0]), 4)
        0.0
        >>> slopes = torch.tensor([0.5])
        >>> def alibi(score, b, h, q_idx, kv_idx):
        ...     return score - slopes[h] * (q_idx - kv_idx)
        >>> modified = attention(q, k, v, score_mod=alibi, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
        >>> expected = attention(q, k, v, is_causal=True, bias=sqrtdk.positions.alibi(slopes=[0.5]))
        >>> torch.allclose(modified, expected)
        True

    Reference:
        Vaswani et al. 2017, Attention Is All You Need, section 3.2.1 (arXiv:1706.03762).

    Differs from torch:
        A NaN or infinity in a key or value that a mask hides, or in its product with a query, does not reach the
        output. A row whose logits hold NaN or +inf, or are all -inf, is NaN, unless it sees no key; torch gives 0 for
        some. A row that a float mask hides whole by a large finite number has right gradients. All this is checked only
        on a CPU, where it costs little, and not while compiling or under a transform. A float32 mask beside float64
        tensors is read as float32.
    """
    if _unknown:
        refuse_arguments("attention", _unknown, parameters_of(attention))
    arguments.check_flags(
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        causal_lower_right=causal_lower_right,
        window_lower_right=window_lower_right,
    )
    both = is_causal and attn_mask is not None
    plain = impl == "auto" and not (causal_lower_right or window_lower_right or both or return_aux or return_weights)
    plain = plain and score is None and score_mod is None and mask_mod is None and block_mask is None
    plain = plain and softcap is None and bias is None and window is None and sinks is None
    plain = plain and type(query_offset) is type(key_offset) is int and query_offset == key_offset
    foreign = not (type(query) in PLAIN_TYPES and type(key) in PLAIN_TYPES and type(value) in PLAIN_TYPES)
    foreign = foreign or not (attn_mask is None or type(attn_mask) in PLAIN_TYPES)
    if plain and not foreign and (scale is None or (type(scale) is float and (scale > 0.0 or not is_causal))):
        _check(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
        hides = attn_mask is not None or is_causal
        pairs = _pairs(query, key, value)
        torch_runs = pairs <= LARGEST_DENSE and not needs_care(query, key, value, scale, hides)
        torch_runs = torch_runs and not pays_compiled(pairs, query, key, value)
        torch_runs = torch_runs and not gives_infinity(query, key, value, scale, hides)
        if torch_runs and not (wants_gradients(query, key, value) and may_lose_mass(attn_mask)):
            output = torch_attention(
                query, key, value, _as_torch(attn_mask, value), dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return in_order_of(query, output)
    tensors = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    with named_in_errors({**tensors, "scale": scale, "bias": bias, "sinks": sinks, "score": score}):
        call = resolve_arguments(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, score=score, score_mod=score_mod,
            mask_mod=mask_mod, block_mask=block_mask, softcap=softcap, bias=bias, window=window, sinks=sinks,
            causal_lower_right=causal_lower_right, window_lower_right=window_lower_right, query_offset=query_offset,
            key_offset=key_offset, return_aux=return_aux,
        )  # fmt: skip
        arguments.check_flags(return_weights=return_weights)
        with outside_autocast(query):
            call, product, chosen = settle(call, impl, weights=return_weights)
            if not torch.compiler.is_compiling():
                _log.debug("attention runs on %s: %s", chosen.impl, chosen.reason)
            run, exact = (weighed, weighed) if return_weights else (IMPLEMENTATIONS[chosen.impl], tiled)
            output, *rest = computed(call, product, run, exact)
            results = (in_order_of(query, output), *(rest if call.aux is not None else rest[:-1]))
    return results if len(results) > 1 else results[0]


def outside_autocast(query: Query) -> AbstractContextManager[Any]:
    """Return a context in which autocast, which has cast the arguments of a call by then, casts nothing more."""
    lowered = arguments.autocast_dtype(query) is not None
    return torch.autocast(query.device.type, enabled=False) if lowered else nullcontext()


def _pairs(query: Query, key: Key, value: Value) -> int:
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return math.prod(query.shape[:-1]) * key.shape[-2]
    return Call(query, key, value, 1.0).elements


def _check(
    query: Query,
    key: AnyKey,
    value: Value,
    attn_mask: Visible | Bias | None,
    dropout_p: float,
    scale: Any,
    enable_gqa: bool,
) -> None:
    """Check the arguments of the plain path, which skips `resolve_arguments`."""
    if not arguments.fit_at_a_glance(query, key, value):
        arguments.check_tensors(query, key, value)
        arguments.check_head_counts(query, key, value, enable_gqa)
        arguments.check_widths(query, key)
    if attn_mask is not None:
        call = Call(query, key, value, 1.0)
        arguments.check_mask(attn_mask, (*call.lead, call.length, call.keys), value)
    if dropout_p != 0.0:
        arguments.dropout_rate("dropout_p", dropout_p)
    if scale is not None:
        arguments.scale_number(scale)


def _as_torch(mask: Visible | Bias | None, value: Value) -> Visible | Bias | None:
    """Return the mask in a form that torch's kernels read correctly: two-dimensional, and float64 beside float64."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and value.dtype == torch.float64:
        mask = mask.double()
    return mask.unsqueeze(0) if mask.ndim == 1 else mask
