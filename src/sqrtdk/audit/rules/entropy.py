"""Heads that spread their weight over too few keys, as Gaussian logits of the frozen phase do: entropy collapse.

Formula: a head's mean entropy H (nats) against the finite-n expectation H*(n, sigma_c) at the critical standard
deviation sigma_c = sqrt(2 log n): above it a Gaussian row depends on few keys only (random energy model, Derrida
1981). Thresholds: heads with n >= 16 keys only; a head is collapsed at H < H*; note when a quarter of a model's heads
are, warn when three quarters are (Zhai et al. 2023: collapse goes with instability; a level without its trend proves
little, so this never fails). Where q and k are normalised the scale alone sets the logits' standard deviation, r after
an RMS or layer norm and r / d after an l2 norm, and a declared one may lie beyond sigma_c: then the bar is H* at 1.5
times that deviation. The finding's value and threshold are H and H* of the lowest head, both in nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from sqrtdk.audit.context import Context
from sqrtdk.audit.norms import norm_sigma, norm_size, normalised
from sqrtdk.audit.records import Finding
from sqrtdk.audit.rules.max_logit import NORMALISED
from sqrtdk.theory.gaussian import critical_sigma, expected_entropy_nats

LEAST_KEYS = 16
NOTE_FRACTION = 0.25
WARN_FRACTION = 0.75
SLACK = 1.5  # on the declared deviation: directions of q and k are not quite isotropic, and norms have gains
FIX = "check the scale; where the model is still trained, watch the entropy: if it falls, normalise q and k"
SOURCE = "Zhai et al. 2023 (entropy collapse); bar: Gaussian logits of deviation sqrt(2 log keys), Derrida 1981"


@lru_cache(maxsize=256)
def frozen_entropy(keys: int) -> float:
    """Expected entropy (nats) of a row of `keys` Gaussian logits at the critical standard deviation."""
    return float(expected_entropy_nats(keys, critical_sigma(keys)))


def bar_nats(keys: int, sigma: float) -> float:
    """Least entropy (nats) of a healthy row of `keys` logits, to which the scale gives the deviation `sigma`."""
    frozen = frozen_entropy(keys)
    return frozen if SLACK * sigma <= critical_sigma(keys) else min(frozen, expected_entropy_nats(keys, SLACK * sigma))


def check(context: Context) -> Iterable[Finding]:
    """At most one finding for the model, at the site with the lowest entropy."""
    heads = 0
    low: list[tuple[float, float, float, int, int]] = []
    for place, judged in enumerate(context.calls):
        stats = judged.call.stats
        if stats is None:
            continue
        call = judged.call
        sigma = norm_sigma(call.scale.ratio, norm_size(call)) if judged.verdict in ("exact", "declared") else 0.0
        for head, (keys, entropy) in enumerate(zip(stats.keys, stats.entropy_nats, strict=True)):
            if not (math.isfinite(entropy) and keys >= LEAST_KEYS):
                continue
            heads += 1
            bar = bar_nats(round(keys), sigma)
            if entropy < bar:
                low.append((entropy / bar, entropy, bar, place, head))
    if not heads or len(low) < NOTE_FRACTION * heads:
        return
    _, entropy, bar, place, head = min(low)
    lowest = context.calls[place]
    yield Finding(
        rule="entropy",
        severity="warn" if len(low) >= WARN_FRACTION * heads else "note",
        site=lowest.call.site,
        value=entropy,
        threshold=bar,
        message=f"{len(low)} of {heads} heads spread their weight over too few keys (low entropy); lowest: head {head} "
        f"with {entropy:.3g} nats, where at least {bar:.3g} is healthy{context.which(lowest)}",
        fix=NORMALISED if normalised(lowest.call) else FIX,
        source=SOURCE,
    )
