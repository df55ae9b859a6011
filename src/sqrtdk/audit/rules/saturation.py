"""Saturated heads: rows whose largest weight leaves the softmax next to no gradient.

Formula: fraction of rows (two visible keys or more) with peak > 0.99, where the Jacobian's norm is below
sqrt(2) * 0.01. Thresholds: note when a head has more than half of its rows saturated, warn when most heads of the
model have. Trained heads that park on the first token (attention sinks, Xiao et al. 2023) are saturated in health.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.audit.context import Context
from sqrtdk.audit.records import Finding

ROWS = 0.5
HEADS = 0.5
SOURCE = "p(1 - p) < 0.01 at peak 0.99 (Vaswani et al. 2017, section 3.2.1); sinks: Xiao et al. 2023"


def check(context: Context) -> Iterable[Finding]:
    """At most one finding for the model, at the worst head."""
    heads = 0
    saturated: list[tuple[float, str, int]] = []
    for judged in context.calls:
        stats = judged.call.stats
        if stats is None or judged.call.key_len < 2:
            continue
        heads += stats.heads
        for head, fraction in enumerate(stats.saturated):
            if fraction > ROWS:
                saturated.append((fraction, judged.call.site, head))
    if not saturated:
        return
    fraction, site, head = max(saturated)
    many = len(saturated) > HEADS * heads
    yield Finding(
        rule="saturation",
        severity="warn" if many else "note",
        site=site,
        value=fraction,
        threshold=ROWS,
        message=f"{len(saturated)} of {heads} heads put over 0.99 on one key in most rows; worst: head {head}, "
        f"{100 * fraction:.0f}% of rows",
        fix="check the scale first; then the growth of the q and k projections",
        source=SOURCE,
    )
