"""Validates the arguments of `attention`, and brings them to the form that implementations run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk import _arguments as arguments
from sqrtdk._guesses import check_parameters
from sqrtdk._named import as_bias, as_request, as_scale, as_score, as_window, is_block_mask, mask_of_blocks
from sqrtdk._subclasses import causal_diagonal, check_class, is_causal_bias
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.impl.call import UNBOUNDED, Call, has_values
from sqrtdk.impl.extremes import above_infinity, holds_nonfinite, looked_at, needs_care
from sqrtdk.positions import PositionTerm
from sqrtdk.scales import ScaleRule, Sizes, sqrt_dk
from sqrtdk.scores import FoldedScore, PairScore
from sqrtdk.stats.request import AuxRequest

if TYPE_CHECKING:
    from jaxtyping import Float

    from sqrtdk._named import AnyBias, AnyScale, AnyScore, AnyWindow
    from sqrtdk._shapes import AnyKey, Bias, Factor, Query, Sinks, Value, Visible
    from sqrtdk.impl.mods import MaskMod, ScoreMod


def resolve_arguments(
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
) -> Call:
    """Check the arguments of `attention`, and return them as the one `Call` that all implementations run.

    `attention` documents the arguments and the errors.
    """
    arguments.check_flags(
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        causal_lower_right=causal_lower_right,
        window_lower_right=window_lower_right,
    )
    if window_lower_right and is_causal and not causal_lower_right:
        raise InvalidValueError(
            "window_lower_right aligns the last row with the last key, and is_causal the first row with the first key",
            hint="Pass causal_lower_right=True, which aligns the causal mask and the window with the last key.",
        )
    arguments.check_tensors(query, key, value)
    arguments.check_head_counts(query, key, value, enable_gqa)
    aux = as_request(return_aux)
    # As torch's own function does under autocast, and before the score is folded in, which computes in float32.
    query, key, value = _as_autocast(query, key, value)
    mods = (score_mod, mask_mod, block_mask)
    # NaN in a key matters to a row that can't see it, as 0 * NaN is NaN: so it counts whether anything hides keys.
    hides = attn_mask is not None or is_causal or causal_lower_right or window is not None or mods != (None,) * 3
    # Before a score changes the width: the default scale is that of the caller's query.
    head_dim = query.shape[-1]
    query, key, pairs, rule = _scored(score, query, key)
    # row i and key j are at one place of the sequence if j = i + shift
    shift = arguments.place("query_offset", query_offset) - arguments.place("key_offset", key_offset)
    if causal_lower_right or window_lower_right:
        if query_offset or key_offset:
            raise InvalidValueError(
                f"rows go by their offset or by the last key; got query_offset={query_offset}, key_offset={key_offset} "
                "beside causal_lower_right or window_lower_right",
                hint="The last row is aligned with the last key by query_offset = key_offset + S - L alone.",
            )
        shift = key.shape[-2] - query.shape[-2]
    # Upper-left as in SDPA: row i sees keys j <= i. Lower-right, as with a cache, adds S - L.
    diagonal = shift if is_causal or causal_lower_right else None
    if is_causal_bias(attn_mask):
        own = _causal_bias_diagonal(attn_mask, query.shape[-2], key.shape[-2], is_causal)
        diagonal, attn_mask = own if diagonal is None else min(own, diagonal), None
    if is_block_mask(attn_mask) and block_mask is None:
        attn_mask, block_mask = None, attn_mask
    call = Call(
        query,
        key,
        value,
        1.0,
        score=pairs,
        softcap=None if softcap is None else arguments.finite_number("softcap", softcap, above=0.0),
        score_mod=_at_places(_function("score_mod", score_mod, "score, b, h, q_idx, kv_idx"), query_offset, key_offset),
        diagonal=diagonal,
        window=UNBOUNDED if window is None else arguments.window_sides(as_window(window, diagonal, shift)),
        shift=shift,
        dropout_p=arguments.dropout_rate("dropout_p", dropout_p),
        aux=aux,
    )
    offset = bool(query_offset or key_offset)
    call = replace(call, **_masks(call, attn_mask, bias, offset=offset), sinks=_sinks(call, sinks))
    call = replace(call, mask_mods=_mask_mods(call, mask_mod, block_mask, query_offset, key_offset))
    # Last, because a rule such as log_n counts the visible keys, which all masks together leave.
    call = replace(call, scale=_beta(call, rule if scale is None else scale, head_dim))
    bad_bias = call.bias is not None and looked_at(call.bias) and holds_nonfinite(call.bias)
    return replace(call, unclean=bad_bias or needs_care(call.query, call.key, value, call.scale, hides))


def _scored(
    score: Any, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S Ek"]
) -> tuple[Float[Tensor, "*BHq L A"], Float[Tensor, "*BH S A"], PairScore | None, ScaleRule]:
    """Return query and key with the score folded in, the score of pairs, and the scale's default rule."""
    if score is None:
        arguments.check_widths(query, key)
        return query, key, None, sqrt_dk()
    arguments.check_scored(query, key)
    score = as_score(score)
    if isinstance(score, FoldedScore):
        # so that half types are rounded once, with the scale folded in
        dtype = torch.promote_types(query.dtype, torch.float32)
        query, key = score.fold(query.to(dtype), key.to(dtype))
        arguments.check_widths(query, key)
        return query, key, None, score.default_scale
    return *score.prepare(query, key), score, score.default_scale


def _function(name: str, function: Any, parameters: str) -> Any:
    if function is not None and not callable(function):
        raise InvalidTypeError(
            f"{name} is a function, {name}({parameters}); got {type(function).__name__}",
            hint="A BlockMask is block_mask." if is_block_mask(function) else "A tensor is bias or attn_mask.",
        )
    # A compiler can't read a signature.
    if function is not None and not torch.compiler.is_compiling():
        check_parameters(name, function, parameters)
    return function


def _at_places(function: Any, query_offset: int, key_offset: int) -> Any:
    """Return a function of pairs, which gets the places of row and key last, as one of a block's rows and keys."""
    if function is None or not (query_offset or key_offset):
        return function
    return lambda *pair: function(*pair[:-2], pair[-2] + query_offset, pair[-1] + key_offset)


def _mask_mods(call: Call, mask_mod: Any, block_mask: Any, query_offset: int, key_offset: int) -> tuple[MaskMod, ...]:
    lead = call.lead
    if block_mask is not None and (query_offset or key_offset):
        raise InvalidValueError(
            f"a BlockMask has no offsets; got query_offset={query_offset}, key_offset={key_offset}",
            hint="Pass its function: mask_mod=block_mask.mask_mod.",
        )
    sizes = math.prod(lead[:-1]), lead[-1] if lead else 1, call.length, call.keys
    of_blocks = None if block_mask is None else mask_of_blocks(block_mask, *sizes)
    own = _at_places(_function("mask_mod", mask_mod, "b, h, q_idx, kv_idx"), query_offset, key_offset)
    mods = (own, of_blocks)
    return tuple(mod for mod in mods if mod is not None)


def _causal_bias_diagonal(mask: Any, length: int, keys: int, is_causal: bool) -> int:
    """Return the diagonal of torch's causal bias, which torch refuses beside `is_causal`."""
    if is_causal:
        raise InvalidValueError(
            "attn_mask is a causal bias or is_causal is True; got both", hint="The bias alone is enough."
        )
    return causal_diagonal("attn_mask", mask, length, keys)


def _masks(call: Call, attn_mask: Visible | Bias | None, bias: Any, *, offset: bool) -> dict[str, Any]:
    """Return the fields `visible`, `bias` and `term`: a float mask is a bias whose -inf hides."""
    full = (*call.lead, call.length, call.keys)
    ahead = 0 if offset else call.keys - call.length - call.shift
    bias = as_bias(bias, call.heads, ahead if call.diagonal is None else None)
    visible = added = term = None
    if attn_mask is not None:
        arguments.check_mask(attn_mask, full, call.value)
        if attn_mask.dtype == torch.bool:
            visible = attn_mask
        # A mask without -inf hides nothing; keeping it a bias saves the kernels a second mask.
        elif above_infinity(attn_mask):
            added = attn_mask
        else:
            visible = attn_mask != -math.inf
            # The gradient of -inf would be NaN, so hidden entries add 0, and a bool mask hides them.
            added = attn_mask.masked_fill(~visible, 0.0)
    if isinstance(bias, Tensor):
        check_class("bias", bias)
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
    """Return the sinks as logits, (Hq,) or (..., Hq, L, 1); None if there are none.

    Raises:
        InvalidValueError: Their shape does not fit.
    """
    if sinks is None:
        return None
    if isinstance(sinks, Tensor):
        check_class("sinks", sinks)
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
    value = arguments.finite_number("sinks", sinks)
    return torch.full((call.heads,), value, dtype=call.dtype, device=call.query.device)


def _beta(call: Call, scale: Any, head_dim: int) -> float | Factor:
    """Return the factor that a scale argument stands for: a number, or a tensor that broadcasts to (..., Hq, L, 1)."""
    scale = as_scale(scale)
    if isinstance(scale, ScaleRule) and not head_dim:
        return 1.0  # the products are all 0, and 1/sqrt(0) is not a number
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
    if not isinstance(scale, Tensor):
        return arguments.scale_number(scale)
    check_class("scale", scale)
    if not scale.is_floating_point():
        raise InvalidTypeError(f"a scale tensor has a floating dtype; got {scale.dtype}", hint="Convert it first.")
    arguments.check_device("scale", scale, call.query)
    if call.heads > 1 and tuple(scale.shape) == (call.heads,):
        scale = scale[:, None, None]
    arguments.check_broadcast("scale", scale, (*call.lead, call.length, 1))
    # On a GPU the check would wait for the device.
    if scale.device.type == "cpu" and has_values(scale) and holds_nonfinite(scale):
        raise InvalidValueError(
            "a scale tensor is finite; got NaN or infinity in it", hint="Check where it comes from."
        )
    return scale  # type: ignore[no-any-return]


def _as_autocast(*tensors: Float[Tensor, "..."]) -> tuple[Float[Tensor, "..."], ...]:
    """Cast inputs to the dtype of autocast, except float64, as torch's own operation does."""
    dtype = arguments.autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    # autocast leaves float64 alone.
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
