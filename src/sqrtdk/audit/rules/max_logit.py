"""The largest logit of each head.

Formula: max over rows and visible keys of the signed logit (scaled, after bias), nats. Thresholds, ascending: 50 note
and 100 warn (Kimi K2 clips q and k at 100, Moonlight watches it from 50), 1e3 fail (Wortsman et al. 2023, figure on
attention logit growth: the loss degrades), 1e4 critical (there, all runs diverged).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sqrtdk.audit.context import Context
from sqrtdk.audit.records import Finding

LEVELS: tuple[tuple[str, float, str], ...] = (  # worst first
    ("critical", 1e4, "Wortsman et al. 2023: all runs with logits beyond 1e4 diverged"),
    ("fail", 1e3, "Wortsman et al. 2023: the loss degrades from about 1e3"),
    ("warn", 100.0, "Kimi K2 technical report 2025: QK-clip acts at 100"),
    ("note", 50.0, "Moonlight technical report 2025: logits beyond 50 are watched"),
)


def check(context: Context) -> Iterable[Finding]:
    """One finding for each call above a level, with its worst head; the largest logit first."""
    too_large = []
    for judged in context.calls:
        stats = judged.call.stats
        if stats is None:
            continue
        finite = [(value, head) for head, value in enumerate(stats.max_logit) if math.isfinite(value)]
        if not finite:
            continue
        value, head = max(finite)
        level = next((level for level in LEVELS if value > level[1]), None)
        if level is not None:
            too_large.append((judged, level, value, head))
    for judged, (severity, threshold, source), value, head in sorted(too_large, key=lambda entry: -entry[2]):
        yield Finding(
            rule="max_logit",
            severity=severity,
            site=judged.call.site,
            value=value,
            threshold=threshold,
            message=f"head {head} has a logit of {value:.4g}",
            fix="normalise q and k, lower the learning rate of their projections, or clip them (QK-clip)",
            source=source,
        )
