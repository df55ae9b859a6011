"""`scale_ledger` and `declared_vs_actual`: a scale that is wrong from the first sample on, as `sqrtdk.check` finds it.

The severity is that of the audit's rule of the same name. Attentions that say the same are one alarm, at the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqrtdk.messages import Message
from sqrtdk.monitor.samples import Alarm, CallSample, ScaleFault, StepSample


def scale_ledger_alarm(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm for each mistake in scales that nothing declares.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.

    Example:
        >>> fault = ScaleFault("scale_ledger", "fail", "scale 1 instead of 0.125, 8 times too large", "", "port.py:14")
        >>> calls = [CallSample(f"h.{i}", 0, 1, {}, 8.0, "", scale_faults=(fault,)) for i in range(2)]
        >>> print(*(alarm.text for alarm in scale_ledger_alarm((), StepSample(1, tuple(calls)))))
        h.0: scale 1 instead of 0.125, 8 times too large; in 2 attentions (step 1; port.py:14)
    """
    return _alarms("scale_ledger", now)


def declared_alarm(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm for each scale that is not the declared one.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    return _alarms("declared_vs_actual", now)


def _alarms(rule: str, now: StepSample) -> Iterator[Alarm]:
    groups: dict[ScaleFault, list[CallSample]] = {}
    for call in now.calls:
        for fault in call.scale_faults:
            if fault.rule == rule:
                groups.setdefault(fault, []).append(call)
    for fault, calls in groups.items():
        first, what = calls[0], fault.text
        if len(calls) > 1:
            what = Message("laws.gradient.several", what=what, count=len(calls))
        if fault.at:
            text = Message("alarms.gradient.wrong_in", call=first.name, what=what, by=fault.at, step=now.step)
        else:
            text = Message("alarms.gradient.wrong", call=first.name, what=what, step=now.step)
        place = first.site, first.index, None
        yield Alarm(rule, fault.severity, now.step, text, fault.source, *place, first.scale_ratio, 1.0)
