"""The product q . k, where a run stores it before the softmax, leaves the range of float16 or comes near to it.

Bars on the largest |q . k| as it is stored, hidden keys and what q and k were multiplied by before it included: 65504,
the largest finite float16 (fail where the logits are stored in float16, a warning elsewhere, where it would be
infinite). Stored in float16 also a warning from 32768 on, the last binade before infinity, or where its growth (see
`trend`) passes 65504 within the horizon, from four binades below on. A fused kernel stores no product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sqrtdk.audit.rules.numbers import FP16_MAX, FP16_SOURCE
from sqrtdk.monitor.alarms.history import same_place
from sqrtdk.monitor.alarms.trend import WINDOW, passing
from sqrtdk.monitor.samples import Alarm, CallSample, StepSample

NAME = "fp16_range"
LAST_BINADE = 32768.0
NEAR = FP16_MAX / 16


def judge(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """At most one alarm for each attention."""
    for call in now.calls:
        value, half = _product(call), call.logits_dtype == "float16"
        if not value > (NEAR if half else FP16_MAX):
            continue
        severity, bar = "warn", FP16_MAX
        if value > FP16_MAX:
            severity = "fail" if half else "warn"
            what = f"q . k reaches {value:.4g}: infinite in float16"
        elif value >= LAST_BINADE:
            bar = LAST_BINADE
            what = f"q . k reaches {value:.4g}, in the last binade of float16"
        else:
            points = [(step, _product(one)) for step, one in same_place(before[1 - WINDOW :], call)]
            points = [(step, size) for step, size in (*points, (now.step, value)) if 0 < size < math.inf]
            found = passing([step for step, _ in points], [math.log(size) for _, size in points], math.log(FP16_MAX))
            if found is None:
                continue
            what = f"q . k grows, {value:.4g} now; it passes 65504, the end of float16, at {found}"
        text = f"{call.name}: {what} (step {now.step})"
        yield Alarm(NAME, severity, now.step, text, FP16_SOURCE, call.site, call.index, None, value, bar)


def _product(call: CallSample) -> float:
    """The largest stored |q . k|; infinite where one of them is."""
    return max((value for value in call.columns.get("stored_product", ()) if not math.isnan(value)), default=-math.inf)
