"""Over-flat attention: rows that average their keys whatever the query.

Formula: entropy / log(n) of a head, and the within-row standard deviation of its logits. Thresholds: fraction > 0.999
at n >= 16 keys and standard deviation < 0.1 (then H = log n - sigma^2/2, so the two say the same); a note when at
least half of a model's heads are flat. Fresh weights are flat by design (initialiser 0.02), so it is a note only.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.audit.context import Context
from sqrtdk.audit.records import Finding

FRACTION = 0.999
STD = 0.1
LEAST_KEYS = 16
SHARE = 0.5
SOURCE = "H = log n - sigma^2/2 for Gaussian logits: 0.999 log n at n = 64 is sigma = 0.09"


def check(context: Context) -> Iterable[Finding]:
    """At most one note for the model, at the first flat site."""
    heads = 0
    flat: list[tuple[str, float, float]] = []
    for judged in context.calls:
        stats = judged.call.stats
        if stats is None:
            continue
        for keys, fraction, std in zip(stats.keys, stats.entropy_fraction, stats.std_logit, strict=True):
            if keys >= LEAST_KEYS:
                heads += 1
                if fraction > FRACTION and std < STD:
                    flat.append((judged.call.site, fraction, std))
    if not flat or len(flat) < SHARE * heads:
        return
    site, fraction, std = flat[0]
    yield Finding(
        rule="flat",
        severity="note",
        site=site,
        value=fraction,
        threshold=FRACTION,
        message=f"{len(flat)} of {heads} heads average their keys (entropy {fraction:.5f} of log n, "
        f"logit standard deviation {std:.2g})",
        fix="expected of fresh weights; in a trained model look for a scale applied twice or a dead query projection",
        source=SOURCE,
    )
