"""Factors and norms that explain a scale: normalised q and k, a gain that is a parameter, a factor of the data.

If both q and k are normalised, their size is known, and rules other than 1/sqrt(d) apply. If only one is, the product
still grows with d. The factors beside a gain are judged as well: the `1/sqrt(d)` of de-stationary attention's
`(tau q.k + delta) / sqrt(d)` is the textbook's, and `exp(logit_scale) q.k / d` is a scale that was applied twice.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import NamedTuple

from sqrtdk.audit.attributes import AS_IT_IS, INVERSE, SCALE_ATTRIBUTES, ScaleAttribute
from sqrtdk.audit.mistakes import MISTAKES, UNKNOWN_MISTAKE, name_mistake, root_factors
from sqrtdk.audit.records import DeclaredAs
from sqrtdk.audit.tolerance import are_close, heads_agree, inverse_root, is_close
from sqrtdk.messages import Message, joined
from sqrtdk.tracing.records import BY_ROW, FROM_DATA, AttentionCall, EffectiveScale, Factor

# Classes of released code whose tensor factor is tau, wherever it is computed (Time-Series-Library, PyPOTS).
DE_STATIONARY = ("DSAttention", "DeStationaryAttention")

# Recurrent layers, as torch's operations and modules and ONNX's operators name the start of q or k.
RECURRENCES = frozenset((
    "rnn", "gru", "lstm", "rnncell", "grucell", "lstmcell", "rnn_tanh", "rnn_relu", "mkldnn_rnn_layer", "_cudnn_rnn",
))  # fmt: skip


def norm_of_q_and_k(call: AttentionCall) -> str | None:
    """Return the normalisation of q and k ("rms", "layer", "l2", ...), or None if q and k are not both normalised."""
    sides = {stage.where for stage in call.stages if stage.name == "norm"} & {"q", "k"}
    return None if len(sides) == 1 else call.norm


def norm_sigma(ratio: float | None, size: int) -> float:
    """Return the standard deviation of the logits of normalised q and k: |ratio| / size.

    Args:
        ratio: The scale times sqrt(head_dim), or None if it is unknown.
        size: Result of `norm_size` for the call.

    Returns:
        The standard deviation; 0 if q and k are not normalised or the ratio is unknown.
    """
    return abs(ratio) / size if ratio is not None and size else 0.0


def norm_size(call: AttentionCall) -> int:
    """Return the divisor of the scale ratio in `norm_sigma`.

    It is the head dimension if q and k have length 1, and 1 if each of their channels has size 1. Without a
    normalisation it is 0.
    """
    norm = norm_of_q_and_k(call)
    return 0 if norm is None else call.head_dim if norm == "l2" else 1


def _dropped(call: AttentionCall, attributes: tuple[ScaleAttribute, ...]) -> bool:
    """Return whether an attribute of the module holds the textbook scale, but no factor of the run is that scale."""
    if root_factors(call):
        return False
    textbook = {AS_IT_IS: (inverse_root(call.head_dim),), INVERSE: (math.sqrt(call.head_dim),)}
    for attribute in attributes:
        if attribute.flag:
            continue
        expected = textbook.get(SCALE_ATTRIBUTES[attribute.name][0])
        if expected and attribute.values and not attribute.learned and are_close(attribute.values, expected):
            return True
    return False


class ComputedRule(NamedTuple):
    """A rule of the computation that admits a scale, and its kind where a decision hangs on it."""

    by: str
    kind: DeclaredAs | None = None


def _gains(call: AttentionCall, effective: tuple[float, ...]) -> str | None:
    """Return the sides with a gain of their norm ("q and k"), if the other factors make 1 or 1/sqrt(d); else None."""
    gains = [f for f in call.scale.factors if f.where in ("q", "k") and f.source.startswith(("tensor", "parameter"))]
    if not gains or any(factor.value is None for factor in call.scale.factors):
        return None
    sides = tuple(dict.fromkeys(factor.where for factor in gains))
    rest = math.prod(factor.value or 0.0 for factor in call.scale.factors if factor not in gains)
    if not is_close(rest, 1.0) and not is_close(rest, inverse_root(call.head_dim)):
        return None
    mistake = name_mistake(call, effective[0])[0] if heads_agree(effective) else UNKNOWN_MISTAKE
    # `q * head_dim**-0.5` after a norm is a scale that was written on q, and no gain of the norm.
    if len(sides) == 1 and (MISTAKES[mistake].unmistakable or mistake == "twice"):
        return None
    return joined(sides, "and")  # an RMS norm with gain d^-1/2 on both sides is the l2 norm


def norm_rule(
    call: AttentionCall, effective: tuple[float, ...], attributes: tuple[ScaleAttribute, ...]
) -> ComputedRule | None:
    """Return the rule that makes a scale right because q and k are normalised, or None.

    Args:
        call: The attention.
        effective: The scale that ran: one value for all heads, or one for each head.
        attributes: The module's scale attributes. One that holds 1/sqrt(head_dim) and was not applied speaks against a
            scale of 1.

    Returns:
        None if q and k are not both normalised, or if no rule gives this scale. Rules exist for norms with gains, for a
        scale of 1, and for sqrt(head_dim) after q and k of unit length.
    """
    norm = norm_of_q_and_k(call)
    if norm is None:
        return None
    if sides := _gains(call, effective):
        return ComputedRule(Message("sources.declared.norm_with_gains", norm=norm, sides=sides))
    if are_close(effective, (1.0,)) and not _dropped(call, attributes):
        return ComputedRule(Message("sources.declared.norm", norm=norm), "norm")
    if norm == "l2" and are_close(effective, (math.sqrt(call.head_dim),)):
        return ComputedRule(Message("sources.declared.unit_norm"), "norm")
    return None


def of_recurrent_states(call: AttentionCall) -> bool:
    """Return whether q or k is a state of a recurrence (GRU, LSTM), as torch and ONNX name the operation."""
    starts = (stage.detail for stage in call.stages if stage.where in ("q", "k") and stage.name == "projection")
    return any(start.lower() in RECURRENCES for start in starts)


def divided_cosine(call: AttentionCall) -> bool:
    """Return whether the product is a cosine: q and k have unit length, and no channel has a gain of its own."""
    return norm_of_q_and_k(call) == "l2" and not call.norm_gain


def cosine_gain(call: AttentionCall, effective: tuple[float, ...]) -> ComputedRule | None:
    """Return the rule that admits a fixed gain on the cosine of q and k, or None if it does not apply.

    A cosine is at most 1, so it takes a gain above 1 for the softmax to be selective; one below 1 would only flatten
    it.

    Args:
        call: The attention; the rule applies if q and k are normalised to unit length.
        effective: The scale that ran, one value for all heads or one for each; all must be at least 1.
    """
    low, high = min(effective), max(effective)
    if norm_of_q_and_k(call) != "l2" or low < 1.0:
        return None
    gain = f"{low:.6g}"
    gain = gain if is_close(high, low) else Message("rules.bound.range", low=gain, high=f"{high:.6g}")
    return ComputedRule(Message("sources.declared.cosine_gain", gain=gain), "norm")


def _from_inputs(call: AttentionCall, factor: Factor) -> bool:
    tensor = factor.where == "logits" and factor.source in ("tensor", "0-d tensor")
    return factor.source in (FROM_DATA, BY_ROW) or (tensor and call.module_class in DE_STATIONARY)


def gained_by_inputs(call: AttentionCall) -> bool:
    """Return whether a factor of the call comes from the data (Liu et al. 2022: `(tau q.k + delta) / sqrt(d)`)."""
    return any(_from_inputs(call, factor) for factor in call.scale.factors)


def gained_by_rows(call: AttentionCall) -> bool:
    """Return whether every factor that comes from the data is computed by the model, as one number for each query.

    True also without any such factor.
    """
    return all(factor.source == BY_ROW for factor in call.scale.factors if _from_inputs(call, factor))


def without_input_gains(call: AttentionCall) -> AttentionCall | None:
    """Return the call as it would be without the factors of its scale that are computed from the input data.

    Returns:
        A copy with the remaining factors and their product as the effective scale, which is None if one of them has no
        known value (a learned gain on the meta device). None instead of a copy if no factor comes from the data, or if
        the scale was not read completely.
    """
    if not gained_by_inputs(call) or call.unknown or call.scale.agree is False:
        return None
    factors = tuple(factor for factor in call.scale.factors if not _from_inputs(call, factor))
    values = [factor.value for factor in factors if factor.value is not None]
    effective = math.prod(values) if len(values) == len(factors) else None  # a learned gain on meta has no value
    several = [factor.per_head for factor in factors if factor.per_head is not None]
    same = math.prod(factor.value for factor in factors if factor.per_head is None and factor.value is not None)
    per_head = tuple(same * math.prod(each[h % len(each)] for each in several) for h in range(call.heads))
    if effective is None:
        return replace(call, scale=EffectiveScale(None, None, None, None, None, factors, reason=call.scale.reason))
    ratio = effective * math.sqrt(call.head_dim)
    scale = EffectiveScale(effective, ratio, effective, None, None, factors, per_head=per_head if several else None)
    return replace(call, scale=scale)


def learned_gain(call: AttentionCall) -> Factor | None:
    """Return the first factor of the call that is a parameter, or None."""
    return next((factor for factor in call.scale.factors if factor.learned), None)


def mistake_beside_gain(call: AttentionCall) -> str | None:
    """Return the mistake in the constant factors of a call that also has a learned gain, or None.

    "twice" and "inverted" are mistakes beside any gain. A gain of 1 explains nothing: beside it, every mistake whose
    value has no other explanation is named.

    Returns:
        A key of `MISTAKES`. None if no mistake is recognised, or if the value of a factor is unknown.
    """
    fixed, idle = 1.0, True
    for factor in call.scale.factors:
        if factor.learned:
            idle = idle and factor.value is not None and are_close(factor.per_head or (factor.value,), (1.0,))
        elif factor.value is None:
            return None
        else:
            fixed *= factor.value
            idle = idle and factor.per_head is None
    if root_factors(call) >= 2 and is_close(fixed, inverse_root(call.head_dim) ** 2):
        return "twice"
    if norm_of_q_and_k(call) != "l2" and call.head_dim > 1 and is_close(fixed, call.head_dim**0.5):
        return "inverted"
    named = name_mistake(call, fixed)[0] if idle else UNKNOWN_MISTAKE
    return named if named != "inverted" and MISTAKES[named].unmistakable else None


def gain_text(gain: Factor) -> str:
    """Return the name of a learned gain for a report: the parameter's name, `attn.log_t` for `exp(-attn.log_t)`."""
    names = re.findall(r"[A-Za-z_][\w.]*", gain.source.removeprefix("parameter "))
    return Message("sources.declared.parameter", name=names[-1] if names else gain.source)
