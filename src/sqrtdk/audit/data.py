"""A factor on the logits that is computed from the data (de-stationary attention): what stands beside it is judged."""

from __future__ import annotations

import math
from dataclasses import replace

from sqrtdk.trace.records import DATA, AttentionCall, Factor

# Classes of released code whose tensor factor is tau, wherever the caller had it from (Time-Series-Library, PyPOTS).
DE_STATIONARY = ("DSAttention", "DeStationaryAttention")


def _of_the_data(call: AttentionCall, factor: Factor) -> bool:
    tensor = factor.where == "logits" and factor.source in ("tensor", "0-d tensor")
    return factor.source == DATA or (tensor and call.module_class in DE_STATIONARY)


def scaled_by_data(call: AttentionCall) -> bool:
    """Whether a factor of the call is computed from the data (Liu et al. 2022: `(tau q.k + delta) / sqrt(d)`)."""
    return any(_of_the_data(call, factor) for factor in call.scale.factors)


def without_data(call: AttentionCall) -> AttentionCall | None:
    """The call as its other factors alone would scale it; None where no factor is of the data, or more was not read."""
    if not scaled_by_data(call) or call.unknown or call.scale.agree is False:
        return None
    factors = tuple(factor for factor in call.scale.factors if not _of_the_data(call, factor))
    values = [factor.value for factor in factors]
    if any(value is None for value in values):
        return None
    effective = math.prod(value for value in values if value is not None)
    heads = [factor.per_head for factor in factors if factor.per_head is not None]
    rest = math.prod(factor.value for factor in factors if factor.per_head is None and factor.value is not None)
    scale = replace(
        call.scale,
        effective=effective,
        ratio=effective * math.sqrt(call.head_dim),
        symbolic=effective,
        numeric=None,
        r_squared=None,
        factors=factors,
        per_head=(
            tuple(rest * math.prod(values[h % len(values)] for values in heads) for h in range(call.heads))
            if heads
            else None
        ),
        agree=None,
        reason=None,
    )
    return replace(call, scale=scale)
