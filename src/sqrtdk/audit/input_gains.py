"""A factor on the logits that is computed from the data (de-stationary attention): what stands beside it is judged."""

from __future__ import annotations

import math
from dataclasses import replace

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
    """The call as its other factors alone would scale it; None where no factor is of the data, or more was not read."""
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
