"""What a run is warned of: one table of alarms, each a pure function of the samples so far and the newest one.

A judge says what holds of the newest sample. `fresh` sees to it that an alarm is told once, and again only when it has
grown worse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqrtdk.audit.records import SEVERITIES
from sqrtdk.errors import kind_and_text
from sqrtdk.monitor.alarms.logits import bf16_offset, fp16_range, growth, max_logit
from sqrtdk.monitor.alarms.lost import ledger, lost, unmeasured
from sqrtdk.monitor.alarms.nonfinite import nonfinite
from sqrtdk.monitor.alarms.weights import collapsed, entropy, entropy_trend, saturation
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
    "nonfinite": Rule(nonfinite, "model"),
    "lost": Rule(lost, "attention"),
    "fp16_range": Rule(fp16_range, "attention"),
    "max_logit": Rule(max_logit, "attention"),
    "growth": Rule(growth, "attention"),
    "ledger": Rule(ledger, "attention"),
    "entropy": Rule(entropy, "model"),
    "entropy_trend": Rule(entropy_trend, "model"),
    "saturation": Rule(saturation, "model"),
    "collapsed": Rule(collapsed, "head"),
    "bf16_offset": Rule(bf16_offset, "attention"),
    "unmeasured": Rule(unmeasured, "reason"),
}


def holding(before: Sequence[StepSample], now: StepSample) -> list[Alarm]:
    """What holds of a sample, told before or not, the worst kind first as the table has them.

    Args:
        before: earlier samples of the run, oldest first.
        now: the newest.
    """
    return [alarm for name in ALARMS for alarm in _judged(name, before, now)]


def _judged(name: str, before: Sequence[StepSample], now: StepSample) -> list[Alarm]:
    """What one rule says; a rule that raises becomes an alarm itself, and the others go on."""
    try:
        return list(ALARMS[name].judge(before, now))
    except Exception as error:  # an observer never stops the run
        text = f"the alarm {name} could not be judged at step {now.step}: {kind_and_text(error)}"
        return [Alarm(name, "warn", now.step, text, source="the watch itself")]


def idle(steps: int, forwards: int, step: int) -> Iterator[Alarm]:
    """At most one alarm, as the block of a watch ends.

    Args:
        steps: how often `step()` was called.
        forwards: forward passes that were seen since the last.
        step: number of the step that is under way.

    Example:
        >>> [alarm.severity for alarm in idle(0, 3, 1)], list(idle(1, 0, 2))
        (['warn'], [])
    """
    if steps == 0 and forwards:
        text = f"step() was never called, {forwards} forward passes were seen: call it after each optimizer step"
        yield Alarm(
            "idle", "warn", step, text, "a step lies between two calls of step()", value=float(forwards), bar=0.0
        )


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
