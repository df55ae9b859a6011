"""`gradient`: the backward pass of an attention gives other gradients than its formula has.

The sample holds what the step's own backward pass delivered that the formula does not give, within the rounding of the
dtypes, and the name of the mistake if a changed formula gives it (`sqrtdk.laws.backward`). It is a fail; a warning if
values were only rounded further than the dtypes allow. Attentions that say the same are one alarm, at the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqrtdk._sites import ROOT_NAME
from sqrtdk.messages import Message
from sqrtdk.monitor.samples import Alarm, GradientFault, StepSample


def gradient_alarm(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm for each mistake in the backward pass of an attention.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.

    Example:
        >>> fault = GradientFault("h.0", 0, "the gradient of k is 8 times the formula's", False, "", 7.0, 1e-5)
        >>> [(alarm.severity, str(alarm.text)) for alarm in gradient_alarm((), StepSample(1, (), faults=(fault,)))]
        [('fail', "h.0: the gradient of k is 8 times the formula's (step 1)")]
    """
    groups: dict[tuple[str, str], list[GradientFault]] = {}
    for fault in now.faults:
        groups.setdefault((fault.text, fault.by), []).append(fault)
    for (what, by), faults in groups.items():
        first = faults[0]
        sites = len({(fault.site, fault.index) for fault in faults})
        if sites > 1:
            what = Message("laws.gradient.several", what=what, count=sites)
        place = first.site or ROOT_NAME
        call = Message("alarms.place.call", site=place, number=first.index + 1) if first.index else place
        if by:
            text = Message("alarms.gradient.wrong_in", call=call, what=what, by=by, step=now.step)
        else:
            text = Message("alarms.gradient.wrong", call=call, what=what, step=now.step)
        severity = "warn" if first.rounded else "fail"
        source = Message("laws.gradient.source")
        yield Alarm(
            "gradient", severity, now.step, text, source, first.site, first.index, None, first.off, first.allowed
        )
