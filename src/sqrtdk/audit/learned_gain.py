"""A learned gain on the logits, and the mistakes that no gain excuses: those in the fixed factors beside it."""

from __future__ import annotations

from sqrtdk.audit.mistakes import MISTAKES, UNKNOWN, name_mistake, root_factors
from sqrtdk.audit.norms import normalised
from sqrtdk.audit.tolerance import close, inverse_root, matches
from sqrtdk.tracing.records import AttentionCall, Factor


def learned_gain(call: AttentionCall) -> Factor | None:
    """The first factor of the call that is a parameter, None where there is none."""
    return next((factor for factor in call.scale.factors if factor.learned), None)


def mistake_beside_gain(call: AttentionCall) -> str | None:
    """A mistake in the fixed factors that stand beside a learned gain.

    Two that no gain is meant to undo; and, where the gain is 1 and so explains nothing, every one that nobody intends.
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
