"""The largest logit of an attention is above a bar: 50 note, 100 warn, 1e3 fail, 1e4 critical."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqrtdk.audit.rules.statistics import LEVELS
from sqrtdk.monitor.alarms.history import largest
from sqrtdk.monitor.samples import Alarm, StepSample

NAME = "max_logit"


def judge(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """One alarm for each attention above a bar, at its worst head."""
    for call in now.calls:
        value, head = largest(call, NAME)
        level = next((level for level in LEVELS if value > level[1]), None)
        if level is None:
            continue
        severity, bar, source = level
        text = f"{call.name}: head {head} has a logit of {value:.4g} at step {now.step}, above {bar:g}"
        yield Alarm(NAME, severity, now.step, text, source, call.site, call.index, head, value, bar)
