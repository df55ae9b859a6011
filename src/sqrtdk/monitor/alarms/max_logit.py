"""The largest logit of a head passes a bar: 50 note, 100 warn, 1e3 fail, 1e4 critical; told once each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sqrtdk.audit.rules.max_logit import LEVELS
from sqrtdk.monitor.samples import Alarm, CallSample, StepSample

NAME = "max_logit"


def judge(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """One alarm for each attention whose largest logit stands above a higher bar than at any sample before."""
    for call in now.calls:
        values = [value for value in call.columns.get(NAME, ()) if math.isfinite(value)]
        if not values:
            continue
        value = max(values)
        level = next((level for level in LEVELS if value > level[1]), None)
        if level is None or _highest(before, call) > level[1]:
            continue
        severity, bar, source = level
        head = list(call.columns[NAME]).index(value)
        text = f"{call.site or 'the model'}: head {head} has a logit of {value:.4g} at step {now.step}, above {bar:g}"
        yield Alarm(NAME, severity, now.step, text, source, call.site, call.index, head, value, bar)


def _highest(before: Sequence[StepSample], call: CallSample) -> float:
    old = (one for sample in before for one in sample.calls if one.place == call.place)
    return max((value for one in old for value in one.columns.get(NAME, ()) if math.isfinite(value)), default=-math.inf)
