"""The tolerance of the ledger, and comparisons of scales within it; a scale is one value, or one for each head."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqrtdk.tracing.records import AttentionCall

# Relative. A scale held in bf16 is off by up to 2^-8 = 0.4%, so a smaller tolerance would accuse rounding. A released
# 27B model (head_dim 128, query_pre_attn_scalar 144) is off by 5.7% under the textbook scale; 3% would hardly show it.
SCALE_TOLERANCE = 0.01


def inverse_root(dim: float) -> float:
    """Return 1/sqrt(dim), or NaN, which is close to nothing, if `dim` is not positive."""
    return 1.0 / math.sqrt(dim) if dim > 0 else math.nan


def is_close(value: float, expected: float, tolerance: float = SCALE_TOLERANCE) -> bool:
    """Return whether `value` is within `tolerance` (relative) of `expected`; nothing is close to an infinity.

    >>> is_close(0.1254, 0.125), is_close(0.118, 0.125), is_close(0.125, math.inf)
    (True, False, False)
    """
    return abs(value - expected) <= tolerance * abs(expected) < math.inf


def are_close(values: Sequence[float], expected: Sequence[float]) -> bool:
    """Return whether all `values` are close to `expected`; one expected value serves for all heads.

    >>> are_close((0.5, 0.5), (0.5,)), are_close((0.5, 0.25), (0.5, 0.25)), are_close((0.5, 0.25), (0.5,))
    (True, True, False)
    """
    if len(expected) == 1:
        return all(is_close(value, expected[0]) for value in values)
    return len(values) == len(expected) and all(map(is_close, values, expected))


def scales_of(call: AttentionCall) -> tuple[float, ...]:
    """Return the effective scale of a call: (value,) for all heads or one value per head; () if it was not read."""
    return call.scale.per_head or (() if call.scale.effective is None else (call.scale.effective,))


def heads_agree(values: Sequence[float]) -> bool:
    """Return whether all values equal the first within 1%; `values` has one scale for each head, or is empty."""
    return all(is_close(value, values[0]) for value in values)
