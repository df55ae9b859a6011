"""How far the largest logit of each head lies above the mean of its row.

Formula: max over rows of the signed logit (scaled, after bias, visible keys only) less the mean of the row, nats: the
softmax does not see what is added to a whole row. A mean of 262 under a largest logit of 287 leaves 25; what the rest
costs in bf16 is `range_forecast`'s. A bias or a mask of finite numbers moves the mean as no logit grows (ALiBi's far
keys): there the smaller of that and of the logit itself counts.
Thresholds, ascending: 50 note (chosen: half of the next), 100 warn (QK-clip acts there: Kimi K2 technical report 2025),
1e3 fail (Wortsman et al. 2023, figure on attention logit growth: the loss degrades), 1e4 critical (there, all runs
diverged).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sqrtdk.audit.context import Context
from sqrtdk.audit.norms import normalised
from sqrtdk.audit.records import Finding
from sqrtdk.tracing.records import AttentionCall

# What a single run shows may be how a released model is; what to do about it is for who trains it.
FIX = "check the scale; where the model is still trained, normalise q and k, or clip them (QK-clip)"
NORMALISED = "q and k are normalised: look at the gains of their norms and at the scale after them"
LEVELS: tuple[tuple[str, float, str], ...] = (  # worst first
    ("critical", 1e4, "Wortsman et al. 2023: all runs with logits beyond 1e4 diverged"),
    ("fail", 1e3, "Wortsman et al. 2023: the loss degrades from about 1e3"),
    ("warn", 100.0, "Kimi K2 technical report 2025: QK-clip acts at 100"),
    ("note", 50.0, "chosen: half of where QK-clip acts (Kimi K2 technical report 2025)"),
)


def seen_by_softmax(call: AttentionCall) -> Sequence[float]:
    """For each head the largest logit as the softmax sees it, nats; none without statistics.

    Args:
        call: the record.
    """
    if call.stats is None:
        return ()
    fill = None if call.mask is None else call.mask.fill
    if call.bias is None and (fill is None or not math.isfinite(fill)):
        return call.stats.max_above_mean
    return [min(pair) for pair in zip(call.stats.max_above_mean, call.stats.max_logit, strict=True)]


def check(context: Context) -> Iterable[Finding]:
    """One finding for each call above a level, with its worst head; the largest logit first."""
    too_large = []
    for judged in context.calls:
        values = seen_by_softmax(judged.call)
        finite = [(value, head) for head, value in enumerate(values) if math.isfinite(value)]
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
            message=f"head {head} has a logit {value:.4g} above the mean of its row{context.which(judged)}",
            fix=NORMALISED if normalised(judged.call) else FIX,
            source=source,
        )
