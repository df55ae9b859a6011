"""The largest logit of an attention is about to pass the next bar of 50, 100, 1e3 and 1e4, going by its growth.

Formula: the logarithm of the largest logit against the step, drawn on; see `trend` for the line and its interval. It is
told where the largest logit has passed the bar before (for the first, half of it: in a warm-up every logit grows fast)
and the whole interval ends within the span that was sampled. A forecast has the severity of its bar.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sqrtdk.audit.rules.statistics import LEVELS
from sqrtdk.monitor.alarms.history import largest, same_place
from sqrtdk.monitor.alarms.trend import WINDOW, passing
from sqrtdk.monitor.samples import Alarm, StepSample

NAME = "growth"
BARS = LEVELS[::-1]  # ascending


def judge(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """One alarm for each attention whose next bar lies ahead."""
    for call in now.calls:
        value, head = largest(call, "max_logit")
        place = next((i for i, (_, bar, _) in enumerate(BARS) if value < bar), None)
        if place is None or value <= (BARS[place - 1][1] if place else BARS[0][1] / 2):
            continue
        severity, bar, source = BARS[place]
        points = [(step, largest(one, "max_logit")[0]) for step, one in same_place(before[1 - WINDOW :], call)]
        points = [(step, size) for step, size in (*points, (now.step, value)) if 0 < size < math.inf]
        found = passing([step for step, _ in points], [math.log(size) for _, size in points], math.log(bar))
        if found is not None:
            text = f"{call.name}: logits grow, {value:.4g} at step {now.step}; they pass {bar:g} at {found}"
            yield Alarm(NAME, severity, now.step, text, source, call.site, call.index, head, value, bar)
