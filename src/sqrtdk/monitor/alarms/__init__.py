"""What a run is warned of: one alarm a file, each a pure function of the samples so far and the newest one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from sqrtdk.monitor.alarms import max_logit
from sqrtdk.monitor.samples import Alarm, StepSample

Judge = Callable[[Sequence[StepSample], StepSample], Iterable[Alarm]]
ALARMS: Mapping[str, Judge] = {"max_logit": max_logit.judge}


def judge(before: Sequence[StepSample], now: StepSample) -> list[Alarm]:
    """The alarms of a sample, the worst kind first as the table has them.

    Args:
        before: earlier samples of the run, oldest first.
        now: the newest.
    """
    return [alarm for one in ALARMS.values() for alarm in one(before, now)]
