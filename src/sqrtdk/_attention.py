"""The operation: validate, resolve the score, the scale and the masks, choose an implementation, run it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk import _arguments as arguments
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.impl.call import UNBOUNDED, Call, has_values
from sqrtdk.impl.choice import IMPLEMENTATIONS, LARGEST_DENSE, Choice, choose, pays_compiled
from sqrtdk.positions import PositionTerm
from sqrtdk.scales import ScaleRule, Sizes, sqrt_dk
from sqrtdk.scores import FoldedScore, PairScore
from sqrtdk.stats.request import AuxOutput, AuxRequest

if TYPE_CHECKING:
    from jaxtyping import Float

    from sqrtdk._shapes import AnyKey, Bias, Factor, Key, Output, Query, Sinks, Value, Visible

FEW_KEYS = 32  # fewer keys than a vector holds: torch's CPU kernel gives 0 for a NaN row
_log = logging.getLogger("sqrtdk")


def attention(
    query: Query,
    key: AnyKey,
    value: Value,
    attn_mask: Visible | Bias | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | Factor | ScaleRule | None = None,
    enable_gqa: bool = False,
    *,
    score: FoldedScore | PairScore | None = None,
    softcap: float | None = None,
    bias: Bias | PositionTerm | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: Sinks | float | None = None,
    causal_lower_right: bool = False,
    return_aux: AuxRequest | None = None,
    impl: str = "auto",
) -> Output | tuple[Output, AuxOutput]:
    r"""Attention with any score, scale, bias and mask; a drop-in for torch's `scaled_dot_product_attention`.

    `softmax(softcap(scale * score(q, k)) + bias + mask) v`, in this order; the scale multiplies neither bias nor mask.

    Args:
        query: (..., Hq, L, E), float64, float32, float16 or bfloat16.
        key: (..., H, S, Ek); Ek = E unless the score takes another.
        value: (..., Hv, S, Ev).
        attn_mask: broadcastable to (..., Hq, L, S): bool, True where the row sees the key, or floating, added to the
            logits; -inf hides a key.
        dropout_p: rate of dropout on the weights; the call does not know of train and eval.
        is_causal: row i sees keys j <= i (upper-left); with `attn_mask` both hold.
        scale: factor on the score: a number, a rule of `sqrtdk.scales`, a tensor broadcastable to (..., Hq, L, 1),
            which may carry a gradient. None: the score's own rule, 1/sqrt(E) for the dot product.
        enable_gqa: fewer key and value heads than query heads; query head h uses key head h // (Hq / H).
        score: a score of `sqrtdk.scores`; None: the dot product.
        softcap: c of c tanh(z / c), c > 0.
        bias: a tensor broadcastable to (..., Hq, L, S), or a term of `sqrtdk.positions`; a term that depends on q and
            k sees them as the score changed them.
        window: (left, right): row i sees keys i - left to i + right, both included; None or -1: no bound.
        sinks: (Hq,) logits, one number for all heads, or a tensor of two dimensions or more that broadcasts to
            (..., Hq, L, 1), one a row; they join the softmax's denominator and weigh no value. 0.0 is the off-by-one
            softmax.
        causal_lower_right: causal with the last row aligned with the last key, beside `is_causal` or without it: row i
            sees keys j <= i + S - L, and `window` and position terms count from there.
        return_aux: which statistics to return as a second value; see `AuxOutput` for their definitions.
        impl: "auto", "cpu" (the compiled kernel of CPUs with AVX-512; the first call by this name compiles it), "dense"
            (holds L x S), "fused" (torch's kernels), "tiled" (blocks of rows, recomputed in the backward pass; under
            `torch.func` all are kept), "triton" (the Triton kernel of GPUs). A named one runs or raises. "auto" starts
            no compiler of C++, makes no mask of more than 2^26 elements and takes nothing that holds more than 2^28
            pairs; see `explain` for what it takes.

    Returns:
        (..., Hq, L, Ev) of the value's dtype, and with `return_aux` also an `AuxOutput` of (..., Hq, L) tensors.
        A row that sees no key gives 0.

    Raises:
        InvalidValueError: shapes or values that do not fit.
        InvalidTypeError: arguments of the wrong type or dtype.
        UnsupportedError: a named implementation that can't run the call.

    Example:
        >>> q = k = v = torch.eye(4).view(1, 1, 4, 4)
        >>> output, aux = attention(q, k, v, is_causal=True, return_aux=AuxRequest(entropy=True, count=True))
        >>> aux.count.tolist()
        [[[1.0, 2.0, 3.0, 4.0]]]
        >>> round(float(aux.entropy[0, 0, 0]), 4)
        0.0

    Reference:
        Vaswani et al. 2017, Attention Is All You Need, section 3.2.1 (arXiv:1706.03762).

    Differs from torch:
        NaN or infinity in a key or value that a mask hides, or in its product with a query, does not reach the output
        (on a CPU, where looking for it costs little; not while compiling or under a transform); a row whose logits
        hold NaN is NaN, unless it sees no key. A float32 mask beside float64 tensors is read as what it is. Where
        finite q and k overflow to logits that are all -inf, torch's kernels give 0 and the others NaN.
    """
    extras = (score, softcap, bias, window, sinks, return_aux)
    both = is_causal and attn_mask is not None
    plain = impl == "auto" and not causal_lower_right and not both and all(extra is None for extra in extras)
    if plain and (scale is None or (type(scale) is float and (scale > 0.0 or not is_causal))):
        _check(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
        careless = not _needs_care(query, key, value, scale, attn_mask is not None or is_causal)
        pairs = _pairs(query, key, value)
        if careless and pairs <= LARGEST_DENSE and not pays_compiled(pairs, query, key, value, dropout_p):
            return functional.scaled_dot_product_attention(
                query, key, value, _as_torch(attn_mask, value), dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    call = resolve(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        score=score,
        softcap=softcap,
        bias=bias,
        window=window,
        sinks=sinks,
        causal_lower_right=causal_lower_right,
        return_aux=return_aux,
    )
    chosen = choose(call, impl)
    if not torch.compiler.is_compiling():
        _log.debug("attention runs on %s: %s", chosen.impl, chosen.reason)
    run = IMPLEMENTATIONS[chosen.impl]
    if arguments.autocast_dtype(query) is None:
        output, aux = run(call)
    else:
        with torch.autocast(query.device.type, enabled=False):
            output, aux = run(call)
    return output if return_aux is None else (output, aux)


def explain(*args: Any, impl: str = "auto", **kwargs: Any) -> Choice:
    """Which implementation `attention` would take for these arguments, and why; nothing is computed.

    Args:
        *args: those of `attention`.
        impl: that of `attention`.
        **kwargs: those of `attention`.

    Example:
        >>> q = torch.randn(1, 2, 8, 4)
        >>> explain(q.double(), q.double(), q.double(), softcap=30.0).impl
        'dense'
    """
    return choose(resolve(*args, **kwargs), impl)


def resolve(
    query: Query,
    key: AnyKey,
    value: Value,
    attn_mask: Visible | Bias | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | Factor | ScaleRule | None = None,
    enable_gqa: bool = False,
    *,
    score: FoldedScore | PairScore | None = None,
    softcap: float | None = None,
    bias: Bias | PositionTerm | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: Sinks | float | None = None,
    causal_lower_right: bool = False,
    return_aux: AuxRequest | None = None,
) -> Call:
    """Validate the arguments of `attention`, and bring them to the form that implementations run."""
    arguments.check_tensors(query, key, value)
    arguments.check_heads(query, key, value, enable_gqa)
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise InvalidTypeError(
            f"return_aux is an AuxRequest or None; got {return_aux!r}", hint="AuxRequest.all() asks for everything."
        )
    query, key, value = _as_autocast(query, key, value)
    hides = attn_mask is not None or is_causal or causal_lower_right or window is not None
    head_dim = query.shape[-1]
    query, key, pairs, rule = _scored(score, query, key)
    shift = key.shape[-2] - query.shape[-2] if causal_lower_right else 0
    call = Call(
        query,
        key,
        value,
        1.0,
        score=pairs,
        softcap=None if softcap is None else arguments.number("softcap", softcap, above=0.0),
        diagonal=shift if is_causal or causal_lower_right else None,
        window=UNBOUNDED if window is None else arguments.window_sides(window),
        shift=shift,
        dropout_p=arguments.probability(dropout_p),
        aux=return_aux,
    )
    call = replace(call, **_masks(call, attn_mask, bias), sinks=_sinks(call, sinks))
    call = replace(call, scale=_beta(call, rule if scale is None else scale, head_dim))
    bad_bias = call.bias is not None and _looked_at(call.bias) and _holds_nonfinite(call.bias)
    return replace(call, unclean=bad_bias or _needs_care(call.query, call.key, value, call.scale, hides))


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
    """What the plain path has to refuse."""
    if not arguments.fit_at_a_glance(query, key, value):
        arguments.check_tensors(query, key, value)
        arguments.check_heads(query, key, value, enable_gqa)
        arguments.check_widths(query, key)
    if attn_mask is not None:
        call = Call(query, key, value, 1.0)
        arguments.check_mask(attn_mask, (*call.lead, call.length, call.keys), value)
    if dropout_p != 0.0:
        arguments.probability(dropout_p)
    if scale is not None:
        arguments.number("scale", scale)


def _as_autocast(*tensors: Float[Tensor, "..."]) -> tuple[Float[Tensor, "..."], ...]:
    """In autocast, inputs but float64 take its dtype, as torch's own operation does."""
    dtype = arguments.autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _needs_care(query: Query, key: Key, value: Value, scale: float | Factor | None, hides: bool) -> bool:
    """Whether NaN or infinity is where torch's kernels mistreat it: at a hidden key, or in a row that sees few or none.

    It may stand there or come of the product. Looked for on a CPU only, where it costs no synchronisation, and never
    while tracing or under a transform.
    """
    if not _looked_at(query, key, value):
        return False
    if hides and _may_overflow(value, value, value.dtype, None):  # times a gradient of its size
        return True
    narrowed = value.dtype == torch.float16 and (isinstance(scale, Tensor) or query.dtype != value.dtype)
    exposed = hides or narrowed or key.shape[-2] < FEW_KEYS
    return exposed and _may_overflow(query, key, value.dtype, scale)


def _looked_at(*tensors: Float[Tensor, "..."]) -> bool:
    return tensors[0].device.type == "cpu" and has_values(*tensors)


def _largest(tensor: Float[Tensor, "..."]) -> float:
    """The largest magnitude; NaN where there is one."""
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor.detach())
    return max(-low.item(), high.item()) if math.isfinite(low.item()) else math.inf


def _holds_nonfinite(tensor: Float[Tensor, "..."]) -> bool:
    return not math.isfinite(_largest(tensor))


def _may_overflow(
    query: Float[Tensor, "... E"], key: Float[Tensor, "... E"], dtype: torch.dtype, scale: float | Factor | None
) -> bool:
    """Whether a logit may be no finite number, or a query that is scaled first may leave the range of the dtype."""
    factor = _largest(scale) if isinstance(scale, Tensor) else abs(scale or 1.0)
    rows = _largest(query)
    product = rows * _largest(key) * query.shape[-1] * max(1.0, factor)
    logits = torch.float64 if query.dtype == torch.float64 else torch.float32
    return not (product < torch.finfo(logits).max and rows * factor < torch.finfo(dtype).max)


def _scored(
    score: Any, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S Ek"]
) -> tuple[Float[Tensor, "*BHq L A"], Float[Tensor, "*BH S A"], PairScore | None, ScaleRule]:
    """Query and key with the score folded in, the score of pairs, the scale's default rule."""
    if score is None:
        arguments.check_widths(query, key)
        return query, key, None, sqrt_dk()
    if isinstance(score, FoldedScore):
        dtype = torch.promote_types(query.dtype, torch.float32)  # half types are rounded once, with the scale folded in
        query, key = score.fold(query.to(dtype), key.to(dtype))
        arguments.check_widths(query, key)
        return query, key, None, score.default_scale
    if isinstance(score, PairScore):
        return *score.prepare(query, key), score, score.default_scale
    raise InvalidTypeError(f"score is a score of sqrtdk.scores; got {score!r}", hint="scores.cosine(), for one.")


def _masks(call: Call, attn_mask: Visible | Bias | None, bias: Any) -> dict[str, Any]:
    """The fields `visible`, `bias` and `term`: a float mask is a bias whose -inf hides."""
    full = (*call.lead, call.length, call.keys)
    visible = added = term = None
    if attn_mask is not None:
        arguments.check_mask(attn_mask, full, call.value)
        if attn_mask.dtype == torch.bool:
            visible = attn_mask
        else:
            visible = attn_mask != -math.inf
            added = attn_mask.masked_fill(~visible, 0.0)
    if isinstance(bias, Tensor):
        if not bias.is_floating_point():
            raise InvalidTypeError(f"bias is a floating tensor; got {bias.dtype}", hint="A bool mask is attn_mask.")
        arguments.check_device("bias", bias, call.query)
        arguments.check_broadcast("bias", bias, full)
        added = bias if added is None else added.to(call.dtype) + bias
    elif isinstance(bias, PositionTerm):
        term = bias
    elif bias is not None:
        raise InvalidTypeError(
            f"bias is a tensor or a term of sqrtdk.positions; got {bias!r}", hint="positions.alibi(heads), for one."
        )
    return {"visible": visible, "bias": added, "term": term}


def _sinks(call: Call, sinks: Any) -> Sinks | None:
    if sinks is None:
        return None
    if isinstance(sinks, Tensor):
        rows = sinks.ndim > 1
        if not sinks.is_floating_point() or not (rows or tuple(sinks.shape) == (call.heads,)):
            raise InvalidValueError(
                f"sinks has one floating logit a query head, ({call.heads},), or a row, (..., {call.heads}, "
                f"{call.length}, 1); got {sinks.dtype} {tuple(sinks.shape)}",
                hint="A number serves all heads.",
            )
        if rows:
            arguments.check_broadcast("sinks", sinks, (*call.lead, call.length, 1))
        arguments.check_device("sinks", sinks, call.query)
        return sinks
    value = arguments.number("sinks", sinks)
    return torch.full((call.heads,), value, dtype=call.dtype, device=call.query.device)


def _beta(call: Call, scale: Any, head_dim: int) -> float | Factor:
    """The factor on the score."""
    if isinstance(scale, ScaleRule):
        scale = scale.beta(
            Sizes(
                head_dim=head_dim,
                heads=call.heads,
                query_len=call.length,
                key_len=call.keys,
                dtype=call.query.dtype,
                device=call.query.device,
                visible_keys=call.visible_keys,
            )
        )
    if callable(scale) and not isinstance(scale, Tensor):
        raise InvalidTypeError(f"scale is a number, a rule or a tensor; got {scale!r}", hint="Call it: scales.log_n().")
    if not isinstance(scale, Tensor):
        return arguments.number("scale", scale)
    if not scale.is_floating_point():
        raise InvalidTypeError(f"a scale tensor has a floating dtype; got {scale.dtype}", hint="Convert it first.")
    arguments.check_device("scale", scale, call.query)
    arguments.check_broadcast("scale", scale, (*call.lead, call.length, 1))
    if scale.device.type == "cpu" and has_values(scale) and _holds_nonfinite(scale):
        raise InvalidValueError(
            "a scale tensor is finite; got NaN or infinity in it", hint="Check where it comes from."
        )
    return scale


def _as_torch(mask: Visible | Bias | None, value: Value) -> Visible | Bias | None:
    """A mask that torch's kernels read right: of two dimensions, and of float64 beside float64."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and value.dtype == torch.float64:
        mask = mask.double()
    return mask.unsqueeze(0) if mask.ndim == 1 else mask
