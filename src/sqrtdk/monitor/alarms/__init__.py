"""What a run is warned of: one alarm a file, each a pure function of the samples so far and the newest one.

A judge says what holds of the newest sample; that it is told once, and again only when it grew worse, is seen to here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqrtdk.audit.records import SEVERITIES
from sqrtdk.errors import kind_and_text
from sqrtdk.monitor.alarms import (
    bf16_offset,
    collapsed,
    entropy,
    fp16_range,
    growth,
    ledger,
    lost,
    max_logit,
    nonfinite,
    saturation,
    unmeasured,
)
from sqrtdk.monitor.samples import Alarm, StepSample

Judge = Callable[[Sequence[StepSample], StepSample], Iterable[Alarm]]
Key = tuple[object, ...]
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.:])")  # of a reason, not of a site or a rank: "0: 3 passes were left out"


@dataclass(frozen=True, slots=True)
class Rule:
    """One alarm.

    Attributes:
        judge: what holds of the newest sample, given those before.
        once: told once a level for each of these: "model", "attention", "head" or "reason" (attention and text).
    """

    judge: Judge
    once: str


ALARMS: Mapping[str, Rule] = {
    nonfinite.NAME: Rule(nonfinite.judge, "model"),
    lost.NAME: Rule(lost.judge, "attention"),
    fp16_range.NAME: Rule(fp16_range.judge, "attention"),
    max_logit.NAME: Rule(max_logit.judge, "attention"),
    growth.NAME: Rule(growth.judge, "attention"),
    ledger.NAME: Rule(ledger.judge, "attention"),
    entropy.NAME: Rule(entropy.judge, "model"),
    entropy.TREND: Rule(entropy.judge_trend, "model"),
    saturation.NAME: Rule(saturation.judge, "model"),
    collapsed.NAME: Rule(collapsed.judge, "head"),
    bf16_offset.NAME: Rule(bf16_offset.judge, "attention"),
    unmeasured.NAME: Rule(unmeasured.judge, "reason"),
}


def holding(before: Sequence[StepSample], now: StepSample) -> list[Alarm]:
    """What holds of a sample, told before or not, the worst kind first as the table has them.

    Args:
        before: earlier samples of the run, oldest first.
        now: the newest.
    """
    return [alarm for name in ALARMS for alarm in _judged(name, before, now)]


def _judged(name: str, before: Sequence[StepSample], now: StepSample) -> list[Alarm]:
    """What one rule says; a rule that fails is told like one, and the others go on."""
    try:
        return list(ALARMS[name].judge(before, now))
    except Exception as error:  # an observer never stops the run
        text = f"the alarm {name} could not be judged at step {now.step}: {kind_and_text(error)}"
        return [Alarm(name, "warn", now.step, text, source="the watch itself")]


def fresh(alarms: Iterable[Alarm], told: Iterable[Alarm]) -> list[Alarm]:
    """Those that were not told yet.

    Args:
        alarms: that hold of a sample.
        told: alarms of the run so far; one like them is left out unless it is more severe.

    Example:
        >>> from sqrtdk.monitor.samples import CallSample
        >>> call = CallSample("attn", 0, 2, {"max_logit": [3.0, 70.0]}, 1.0, "softmax(0.125 * q.k)")
        >>> first = fresh(holding((), StepSample(1, (call,))), ())
        >>> [(alarm.name, alarm.severity, alarm.head) for alarm in first]
        [('max_logit', 'note', 1)]
        >>> fresh(holding((StepSample(1, (call,)),), StepSample(2, (call,))), first)
        []
    """
    levels: dict[Key, int] = {}
    for alarm in told:
        key = _key(alarm)
        levels[key] = max(levels.get(key, -1), _level(alarm))
    new = []
    for alarm in alarms:
        key = _key(alarm)
        if _level(alarm) > levels.get(key, -1):
            levels[key] = _level(alarm)
            new.append(alarm)
    return new


def _level(alarm: Alarm) -> int:
    return SEVERITIES.index(alarm.severity)


def _key(alarm: Alarm) -> Key:
    rule = ALARMS.get(alarm.name)
    once = "head" if rule is None else rule.once
    if once == "model":
        return (alarm.name,)
    last = {"head": (alarm.head,), "reason": (_NUMBER.sub("#", alarm.text),)}
    return (alarm.name, alarm.site, alarm.index, *last.get(once, ()))
