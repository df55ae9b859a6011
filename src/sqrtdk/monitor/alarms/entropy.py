"""Heads that spread their weight over too few keys, and an entropy that falls towards that.

Level: the mean entropy of a head against the finite-n table, as the rule `entropy` of the audit; a note where a quarter
of the model's heads lie below their bar, a warning where three quarters do. Trend (`entropy_trend`, a note): the median
over heads of log(bar / entropy), drawn on to 0, where half of the heads lie below; told within a factor of two of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from sqrtdk.audit.rules.statistics import ENTROPY_SOURCE, LEAST_KEYS, NOTE_FRACTION, WARN_FRACTION, bar_nats
from sqrtdk.monitor.alarms.trend import WINDOW, passing
from sqrtdk.monitor.samples import Alarm, CallSample, StepSample

NAME = "entropy"
TREND = "entropy_trend"


def judge(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """At most one alarm for the model, at the head that is lowest."""
    heads = [(entropy / bar, entropy, bar, call, head) for call, head, entropy, bar in _heads(now)]
    low = [one for one in heads if one[0] < 1.0]
    if not low or len(low) < NOTE_FRACTION * len(heads):
        return
    _, entropy, bar, call, head = min(low, key=lambda one: one[0])
    severity = "warn" if len(low) >= WARN_FRACTION * len(heads) else "note"
    text = (
        f"{len(low)} of {len(heads)} heads spread their weight over too few keys at step {now.step} (low entropy); "
        f"lowest: {call.name} head {head} with {entropy:.3g} nats, where at least {bar:.3g} is healthy"
    )
    yield Alarm(NAME, severity, now.step, text, ENTROPY_SOURCE, call.site, call.index, head, entropy, bar)


def judge_trend(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """At most one note for the model."""
    newest = _depth(now)
    if newest is None or not -math.log(2.0) < newest < 0.0:
        return
    points = [(sample.step, depth) for sample in before[1 - WINDOW :] if (depth := _depth(sample)) is not None]
    points.append((now.step, newest))
    found = passing([step for step, _ in points], [depth for _, depth in points], 0.0)
    if found is not None:
        text = f"entropy falls: at {found} half of the heads spread their weight over too few keys"
        yield Alarm(TREND, "note", now.step, text, ENTROPY_SOURCE, value=newest, bar=0.0)


def _depth(sample: StepSample) -> float | None:
    """Median over heads of log(bar / entropy): above 0 where half of them lie below their bar."""
    ratios = [math.log(bar / max(entropy, 1e-9)) for _, _, entropy, bar in _heads(sample)]
    return median(ratios) if ratios else None


def _heads(sample: StepSample) -> Iterator[tuple[CallSample, int, float, float]]:
    """Attention, head, its entropy and its bar (nats), of every head that can be judged."""
    for call in sample.calls:
        pairs = zip(call.columns.get("keys", ()), call.columns.get("entropy_nats", ()), strict=True)
        for head, (keys, entropy) in enumerate(pairs):
            if math.isfinite(entropy) and keys >= LEAST_KEYS:
                yield call, head, entropy, bar_nats(round(keys), call.norm_sigma)
