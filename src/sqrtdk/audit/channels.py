"""Attention over channels: rows and keys are features of q and k, and the product sums over positions.

No scale is the textbook's there. XCiT (El-Nouby et al. 2021, arXiv:2106.09681) and Restormer (Zamir et al. 2022,
arXiv:2111.09881) take cosines times a learned temperature, which are rules of `norms` and `learned_gain`.
"""

from __future__ import annotations

from sqrtdk.audit.tolerance import inverse_root, matches
from sqrtdk.tracing.records import AttentionCall

_BARE = "attention over channels: no scale (Fu et al. 2019, DANet)"


def channel_rule(call: AttentionCall, effective: tuple[float, ...]) -> str | None:
    """The rule that admits a scale of attention over channels, or None."""
    if call.axis != "channels":
        return None
    rules = {
        1.0: _BARE,
        -1.0: _BARE,  # the row's maximum less the product
        inverse_root(call.query_len): "attention over channels: 1/sqrt(channels of a head) (Ding et al. 2022, DaViT)",
        1.0 / call.head_dim: "attention over channels: the mean over positions",
    }
    return next((rule for value, rule in rules.items() if matches(effective, (value,))), None)


def unruled(call: AttentionCall, effective: tuple[float, ...]) -> str | None:
    """Why a scale that nothing explains is no mistake of an attention over channels; None for any other."""
    if call.axis != "channels":
        return None
    return f"attention over channels has no textbook scale, and nothing declares {effective[0]:.4g}"
