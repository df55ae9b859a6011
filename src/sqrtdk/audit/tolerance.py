"""The one tolerance of the ledger, and what is compared within it: the scales of a call, one value or one a head."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqrtdk.tracing.records import AttentionCall

# Relative. A scale held in bf16 is off by up to 2^-8 = 0.4%, so less would accuse rounding; a released 27B model
# (head_dim 128, query_pre_attn_scalar 144) is off by 5.7% under the textbook scale, so 3% is too much to see it well.
SCALE_TOLERANCE = 0.01


def inverse_root(dim: float) -> float:
    """1/sqrt(dim); NaN, which nothing is close to, where there is no dimension to take the root of."""
    return 1.0 / math.sqrt(dim) if dim > 0 else math.nan


def close(value: float, expected: float, tolerance: float = SCALE_TOLERANCE) -> bool:
    """Whether `value` is within `tolerance` (relative) of `expected`; nothing is close to an infinity.

    >>> close(0.1254, 0.125), close(0.118, 0.125), close(0.125, math.inf)
    (True, False, False)
    """
    return abs(value - expected) <= tolerance * abs(expected) < math.inf


def matches(values: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether all `values` are close to `expected`; one expected value serves for all heads.

    >>> matches((0.5, 0.5), (0.5,)), matches((0.5, 0.25), (0.5, 0.25)), matches((0.5, 0.25), (0.5,))
    (True, True, False)
    """
    if len(expected) == 1:
        return all(close(value, expected[0]) for value in values)
    return len(values) == len(expected) and all(map(close, values, expected))


def scales_of(call: AttentionCall) -> tuple[float, ...]:
    """The effective scale of a call: one value for all heads, or one a head; empty if it was not read."""
    return call.scale.per_head or (() if call.scale.effective is None else (call.scale.effective,))


def heads_agree(values: Sequence[float]) -> bool:
    """Whether all heads have one scale."""
    return all(close(value, values[0]) for value in values)
