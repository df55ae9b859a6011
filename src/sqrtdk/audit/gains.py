"""Factors on the logits that no mistake explains: a gain that is a parameter, and one that is computed from the data.

What stands beside them is judged all the same: `(tau q.k + delta) / sqrt(d)` of de-stationary attention by its
`1/sqrt(d)`, and `exp(logit_scale) q.k / d` as a scale that was applied twice.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sqrtdk.audit.mistakes import MISTAKES, UNKNOWN, name_mistake, root_factors
from sqrtdk.audit.norms import normalised
from sqrtdk.audit.tolerance import close, inverse_root, matches
from sqrtdk.tracing.records import DATA, ROWS, AttentionCall, Factor

# Classes of released code whose tensor factor is tau, wherever the caller had it from (Time-Series-Library, PyPOTS).
DE_STATIONARY = ("DSAttention", "DeStationaryAttention")


def _from_inputs(call: AttentionCall, factor: Factor) -> bool:
    tensor = factor.where == "logits" and factor.source in ("tensor", "0-d tensor")
    return factor.source in (DATA, ROWS) or (tensor and call.module_class in DE_STATIONARY)


def gained_by_inputs(call: AttentionCall) -> bool:
    """Whether a factor of the call is computed from the data (Liu et al. 2022: `(tau q.k + delta) / sqrt(d)`)."""
    return any(_from_inputs(call, factor) for factor in call.scale.factors)


def gained_by_rows(call: AttentionCall) -> bool:
    """Whether all of these factors are the model's own, one number for each row."""
    return all(factor.source == ROWS for factor in call.scale.factors if _from_inputs(call, factor))


def gains_text(call: AttentionCall) -> str:
    """What the factors are, as reports have it."""
    return "a factor for each row" if gained_by_rows(call) else "a factor computed from the data"


def without_input_gains(call: AttentionCall) -> AttentionCall | None:
    """The call with its other factors alone; None if no factor is of the data, or if one of them was not read."""
    if not gained_by_inputs(call) or call.unknown or call.scale.agree is False:
        return None
    factors = tuple(factor for factor in call.scale.factors if not _from_inputs(call, factor))
    values = [factor.value for factor in factors if factor.value is not None]
    effective = math.prod(values) if len(values) == len(factors) else None  # a learned gain has none on meta
    several = [factor.per_head for factor in factors if factor.per_head is not None]
    same = math.prod(factor.value for factor in factors if factor.per_head is None and factor.value is not None)
    per_head = tuple(same * math.prod(each[h % len(each)] for each in several) for h in range(call.heads))
    scale = replace(
        call.scale,
        effective=effective,
        ratio=None if effective is None else effective * math.sqrt(call.head_dim),
        symbolic=effective,
        numeric=None,
        r_squared=None,
        factors=factors,
        per_head=per_head if several and effective is not None else None,
        agree=None,
        reason=None if effective is not None else call.scale.reason,
    )
    return replace(call, scale=scale)


def learned_gain(call: AttentionCall) -> Factor | None:
    """The first factor of the call that is a parameter, or None."""
    return next((factor for factor in call.scale.factors if factor.learned), None)


def mistake_beside_gain(call: AttentionCall) -> str | None:
    """The mistake in the fixed factors that stand beside a learned gain, or None.

    Twice and inverted are mistakes beside any gain. A gain that is 1 explains nothing: beside it every mistake that
    nobody intends is named.
    """
    fixed, idle = 1.0, True
    for factor in call.scale.factors:
        if factor.learned:
            idle = idle and factor.value is not None and matches(factor.per_head or (factor.value,), (1.0,))
        elif factor.value is None:
            return None
        else:
            fixed *= factor.value
            idle = idle and factor.per_head is None
    if root_factors(call) >= 2 and close(fixed, inverse_root(call.head_dim) ** 2):
        return "twice"
    if normalised(call) != "l2" and call.head_dim > 1 and close(fixed, call.head_dim**0.5):
        return "inverted"
    named = name_mistake(call, fixed)[0] if idle else UNKNOWN
    return named if named != "inverted" and MISTAKES[named].excuse == "nothing" else None


def gain_text(gain: Factor) -> str:
    """The name of a gain, as reports have it."""
    return gain.source if gain.source.startswith("parameter") else f"parameter {gain.source}"
