"""Names that other libraries use: an unknown argument, attribute or option is refused with what stands in its place.

torch, transformers, FlexAttention, flash-attn and x-transformers name the same things differently. Where one name is
enough, the function takes it (`return_aux=True`, `window=8`); where the meaning differs, the error says the cure.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from sqrtdk._leads import OF_CALLS
from sqrtdk.errors import InvalidTypeError, did_you_mean

if TYPE_CHECKING:
    from typing import NoReturn

P = ParamSpec("P")
R = TypeVar("R")
_LEAVE_OUT = "It changes nothing here: leave it out."
_PASS_MASK = "Pass attn_mask, True where the key takes part: (batch, keys) as mask.bool()[:, None, None, :]."
_PASS_PACKED = "Pass mask_mod=lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx], for one."
_PASS_QK_NORM = "Norm q and k before the call, or pass score='cosine'; a module takes qk_norm='rms'."
_PASS_ROTATION = "Rotate q and k before the call: q, k = sqrtdk.positions.rope(q, k)."
_PASS_SCALE = "Pass scale, the factor on q k^T; a temperature t is scale=scales.temperature(t)."
_PASS_SLOPES = (
    "Pass bias='alibi', or bias=positions.alibi(slopes=slopes), in a call that is not causal with symmetric=True."
)
_PASS_WEIGHTS = "Pass return_weights=True to `attention`, need_weights=True to a module."
_PASS_WINDOW = (
    "Pass window=n in a causal call, n keys with the row's own, or window=(left, right). It counts from the first key; "
    "from the last, as in flash-attn and x-transformers: causal_lower_right=True or window_lower_right=True."
)

# arguments of other libraries' attention, by what stands in their place
_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(("mask", "attention_mask", "key_padding_mask", "padding_mask"), _PASS_MASK),
    **dict.fromkeys(("attn_bias", "position_bias", "rel_pos"), "Pass bias, added to the scaled scores."),
    **dict.fromkeys(("alibi", "alibi_slopes", "alibi_pos_bias"), _PASS_SLOPES),
    **dict.fromkeys(("window_size", "sliding_window", "local_window_size", "max_attend_past"), _PASS_WINDOW),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "document_ids", "segment_ids"), _PASS_PACKED),
    **dict.fromkeys(("need_weights", "output_attentions", "return_attn_probs", "return_attention"), _PASS_WEIGHTS),
    **dict.fromkeys(("qk_norm", "q_norm", "k_norm"), _PASS_QK_NORM),
    **dict.fromkeys(("rope", "rotary", "rotary_pos_emb", "position_embeddings"), _PASS_ROTATION),
    **dict.fromkeys(("temperature", "softmax_scale", "sm_scale", "scaling", "scale_factor", "tau"), _PASS_SCALE),
    **dict.fromkeys(("logit_cap", "logits_soft_cap", "logit_softcapping", "softclamp"), "Pass softcap=c."),
    **dict.fromkeys(("sink", "learnable_sink", "s_aux", "attention_sink"), "Pass sinks, a logit a head."),
    **dict.fromkeys(("return_stats", "stats", "return_statistics"), "Pass return_aux=True, or an AuxRequest."),
    **dict.fromkeys(("deterministic", "kernel_options", "training"), _LEAVE_OUT),
    "return_lse": "Pass return_aux=AuxRequest(lse=True).",
    "return_softmax_lse": "Pass return_aux=AuxRequest(lse=True).",
    "causal": "Pass is_causal=True; aligned to the last key, as flash-attn does it: causal_lower_right=True.",
    "dropout": "Pass dropout_p, which applies in train and eval alike.",
    "softmax": "The weights are always those of the softmax; sinks=0.0 is the off-by-one softmax.",
    "position": "Pass bias=positions.alibi(heads), for one; a rotation is applied to q and k before the call.",
    "value": "The statistics of the logits need no value.",
}
# the same in the call of a module, whose bool masks are the other way round
_MODULE_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("mask", "attention_mask", "key_padding_mask", "padding_mask", "src_mask", "src_key_padding_mask"),
        "Pass attn_mask, True where a key is hidden: mask == 0 of one whose 0 hides; MultiHeadAttention also takes "
        "key_padding_mask, (batch, keys).",
    ),
    **dict.fromkeys(("return_weights", "output_attentions", "return_attention"), "Pass need_weights=True."),
    **dict.fromkeys(("return_lse", "return_softmax_lse"), "Pass return_aux=AuxRequest(lse=True)."),
    **dict.fromkeys(("return_stats", "stats", "return_statistics"), "Pass return_aux=True, or an AuxRequest."),
    **dict.fromkeys(("deterministic", "kernel_options", "training"), _LEAVE_OUT),
    "causal": "Pass is_causal=True.",
}
# names of `sqrtdk` and its rooms
_HOMES: Mapping[str, str] = {
    "Attention": "sqrtdk.attention, or the module sqrtdk.nn.MultiHeadAttention",
    "MultiheadAttention": "sqrtdk.nn.MultiHeadAttention",
    "MultiHeadAttention": "sqrtdk.nn.MultiHeadAttention",
    "scaled_dot_product_attention": "sqrtdk.attention",
    "flex_attention": "sqrtdk.attention, which takes score_mod and mask_mod",
    "logit_stats": "sqrtdk.measure",
    "audit": "sqrtdk.check",
    "compare": "sqrtdk.diff",
    "Watch": "sqrtdk.watch",
    **dict.fromkeys(("Report", "AuditReport"), "sqrtdk.CheckReport"),
    **dict.fromkeys(("sdpa", "dot_product_attention", "flash_attn_func"), "sqrtdk.attention"),
    **dict.fromkeys(
        ("entropy", "max_logit", "logits", "effective_keys", "peak"), "a statistic of sqrtdk.measure(q, k)"
    ),
    **dict.fromkeys(
        ("plot", "visualize", "heatmap", "show", "draw", "picture"),
        "sqrtdk.measure(q, k).plot(), or report.plot() of what sqrtdk.check returned",
    ),
    **dict.fromkeys(("softmax", "attention_weights", "weights"), "sqrtdk.attention(..., return_weights=True)"),
    **dict.fromkeys(("rope", "alibi", "apply_rotary_pos_emb"), "in sqrtdk.positions"),
    **dict.fromkeys(
        ("scale", "sqrt_dk", "effective_scale"), "sqrtdk.scales.sqrt_dk(), a rule; sqrtdk.check measures scales"
    ),
    **dict.fromkeys(("assert_scale", "assert_ok", "assert_laws", "assert_gradients"), "in sqrtdk.testing"),
    **dict.fromkeys(("fix", "repair_", "clip", "qk_clip"), "sqrtdk.qk_clip_, fold_scale_ or entropy_floor"),
    **dict.fromkeys(("ask", "laws_of", "check_laws"), "sqrtdk.laws.ask"),
    **dict.fromkeys(("diagnose", "lint", "analyze", "analyse", "inspect", "summary"), "sqrtdk.check"),
    **dict.fromkeys(("version", "VERSION"), "sqrtdk.__version__"),
    "Monitor": "sqrtdk.watch",
    "lab": "the package sqrtdk_lab (pip install 'sqrtdk[lab]')",
}
_NEAR_STATISTICS: Mapping[str, str] = {
    "entropy": "did you mean 'entropy_nats'?",
    "max": "did you mean 'max_logit'?",
    "max_scores": "did you mean 'max_logit'?",
    "std": "it is the root of 'variance'",
    "effective_keys": "it is 1 / 'collision', and sqrtdk.measure(q, k) has it",
    "off_peak": "it is 1 - 'peak', and sqrtdk.measure(q, k) has it without cancellation",
    "var": "did you mean 'variance'?",
    **dict.fromkeys(("logits", "weights", "probs"), "attention(..., return_weights=True) returns the weights"),
}
# names and formulas of scores and scale rules
_VALUES: Mapping[str, str] = {
    **dict.fromkeys(("mup", "1/d", "1/dk", "1/d_k", "1/head_dim"), "dk"),
    **dict.fromkeys(("sqrt", "1/sqrt(d)", "1/sqrt(d_k)", "1/sqrt(dk)", "1/sqrt(head_dim)", "default"), "sqrt_dk"),
    **dict.fromkeys(("dot_product", "scaled_dot_product", "dotproduct"), "dot"),
    **dict.fromkeys(("l2", "euclidean", "l2_distance"), "distance"),
    **dict.fromkeys(("qk_norm", "l2_norm"), "cosine"),
    **dict.fromkeys(("gaussian", "rbf_kernel", "gauss"), "rbf"),
    **dict.fromkeys(("l1", "laplacian", "manhattan"), "laplace"),
    "bahdanau": "additive",
    "general": "luong_general",
    "concat": "luong_concat",
    "no": "none",
    "log": "log_n",
    "ALiBi": "alibi",
    "t5": "t5_bias",
}


def refuse_arguments(call: str, unknown: Mapping[str, Any], known: Iterable[str]) -> NoReturn:
    """Raise `TypeError` for keyword arguments that a call does not have, with a guess at what was meant.

    Args:
        call: Name of the call.
        unknown: The unknown arguments.
        known: Names of the call's own arguments.
    """
    name = next(iter(unknown))
    own = [*known]
    hint = OF_CALLS.get(call, _ARGUMENTS).get(name, "")
    if "need_weights" in own:  # the call of a module
        made = f"Make the module with it. {hint}" if hint else ""
        hint = _MODULE_ARGUMENTS.get(name, made)
    near = "" if hint else did_you_mean(name, own)
    raise InvalidTypeError(f"{call} has no argument {name!r}{near}", hint=hint or f"Its arguments: {', '.join(own)}.")


def with_leads(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse arguments that it does not have with `refuse_arguments`, also a second one without a name.

    Example:
        >>> import sqrtdk
        >>> sqrtdk.trace(None, None)
        Traceback (most recent call last):
        sqrtdk.errors.InvalidTypeError: trace takes 1 argument without a name; got 2
        Hint: Call the model inside: with sqrtdk.trace(model) as run: model(x).
    """
    own, taken = parameters_of(function), inspect.signature(function).parameters.values()
    most = sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in taken)

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        if unknown := {name: value for name, value in named.items() if name not in own}:
            refuse_arguments(function.__name__, unknown, own)
        if len(arguments) > most:
            takes = f"takes {most} argument{'s' * (most != 1)} without a name"
            hint = OF_CALLS[function.__name__].get("inputs", f"In this order: {', '.join(own[:most])}.")
            raise InvalidTypeError(f"{function.__name__} {takes}; got {len(arguments)}", hint=hint)
        return function(*arguments, **named)

    return call


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters, without `self`, `*args` and `**kwargs`.

    Example:
        >>> parameters_of(lambda query, *rest, scale=None: query)
        ['query', 'scale']
    """
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds and p.name != "self"]


def no_attribute(owner: str, name: str, names: Iterable[str]) -> NoReturn:
    """Raise `AttributeError` for a name that a module does not have, with a guess at what was meant or where it is.

    Args:
        owner: Name of the module.
        name: The unknown name.
        names: Names that the module has.
    """
    home = _HOMES.get(name)
    home = None if home == f"in {owner}" else home
    near = f"; it is {home}" if home else did_you_mean(name, names) if name[0] != "_" else ""
    raise AttributeError(f"module {owner!r} has no attribute {name!r}{near}")


def near_statistic(name: str, names: Iterable[str]) -> str:
    """Return a guess at which statistic was meant, for the end of an error; "" if there is none.

    Example:
        >>> near_statistic("varience", ["variance", "mean"])
        "; did you mean 'variance'?"
    """
    other = _NEAR_STATISTICS.get(name)
    return f"; {other}" if other else did_you_mean(name, names)


def near_value(name: str, names: Iterable[str]) -> str:
    """Return a guess at which scale rule, score or position was meant, for the end of an error; "" if there is none.

    Names in other libraries and formulas are known.

    Args:
        name: The unknown name.
        names: Names in the table.
    """
    return did_you_mean(_VALUES.get(name, name), names)


def check_parameters(argument: str, function: Callable[..., Any], parameters: str) -> None:
    """Check that a function can be called with given arguments; one whose parameters can't be read passes.

    Args:
        argument: Name of the argument, for the error.
        function: The function.
        parameters: Names of the arguments that it will be called with, as "b, h, q, kv".

    Raises:
        InvalidTypeError: It can't be called so.
    """
    try:
        taken = inspect.signature(function)
    except (TypeError, ValueError):  # builtins and some callables have none
        return
    try:
        taken.bind(*parameters.split(", "))
    except TypeError as error:
        raise InvalidTypeError(
            f"{argument} is a function, {argument}({parameters}); got one with the parameters {taken}",
            hint=f"Give it {len(parameters.split(', '))} parameters.",
        ) from error
