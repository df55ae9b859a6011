"""Saturated heads: rows that put nearly all of their weight on one key.

Formula: fraction of rows (two visible keys or more) with peak > 0.99. There the Frobenius norm of the softmax's
Jacobian diag(p) - p p^T is below 2 p (1 - p) = 0.0198, the value with all that is left on one other key. What reaches q
is that times the spread of the keys, which grows with the logits: it is small, but not nothing. Thresholds: note when a
head has more than half of its rows saturated, warn when most heads of the model have. Trained heads that park on the
first token (attention sinks, Xiao et al. 2023) are saturated in health.
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
    saturated: list[tuple[float, int, int]] = []
    for place, judged in enumerate(context.calls):
        stats = judged.call.stats
        if stats is None or judged.call.key_len < 2:
            continue
        heads += stats.heads
        for head, fraction in enumerate(stats.saturated):
            if fraction > ROWS:
                saturated.append((fraction, place, head))
    if not saturated:
        return
    fraction, place, head = max(saturated)
    worst = context.calls[place]
    many = len(saturated) > HEADS * heads
    yield Finding(
        rule="saturation",
        severity="warn" if many else "note",
        site=worst.call.site,
        value=fraction,
        threshold=ROWS,
        message=f"{len(saturated)} of {heads} heads put over 0.99 on one key in most rows; worst: head {head}, "
        f"{100 * fraction:.0f}% of rows{context.which(worst)}",
        fix="check the scale first; then the growth of the q and k projections",
        source=SOURCE,
    )
