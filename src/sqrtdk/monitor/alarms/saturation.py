"""Heads that put more than .99 of the weight on one key in most of their rows: a note, a warning when most heads do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqrtdk.audit.rules.statistics import PEAK_SOURCE, SATURATED_HEADS, SATURATED_ROWS
from sqrtdk.monitor.alarms.history import largest
from sqrtdk.monitor.samples import Alarm, StepSample

NAME = "saturation"
COLUMN = "saturated"


def judge(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """At most one alarm for the model, at the worst head."""
    fractions = [value for call in now.calls for value in call.columns.get(COLUMN, ()) if value >= 0]  # NaN: no choice
    many = sum(value > SATURATED_ROWS for value in fractions)
    if not many:
        return
    call = max(now.calls, key=lambda call: largest(call, COLUMN))
    value, head = largest(call, COLUMN)
    text = (
        f"{many} of {len(fractions)} heads put over 0.99 on one key in most rows at step {now.step}; "
        f"worst: {call.name} head {head}, {100 * value:.0f}% of rows"
    )
    severity = "warn" if many > SATURATED_HEADS * len(fractions) else "note"
    yield Alarm(NAME, severity, now.step, text, PEAK_SOURCE, call.site, call.index, head, value, SATURATED_ROWS)
