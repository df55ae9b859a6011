"""The alarms of a run: one table of rules, each a pure function of the samples so far and the newest one.

A judge yields every alarm that holds for the newest sample. `fresh` keeps those that are new, so that an alarm is shown
once, and again only when it has grown more severe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sqrtdk.audit.records import SEVERITIES
from sqrtdk.errors import kind_and_text
from sqrtdk.messages import Message
from sqrtdk.monitor.alarms.gradient import gradient_alarm
from sqrtdk.monitor.alarms.logits import bf16_offset, fp16_range, growth, max_logit_alarms
from sqrtdk.monitor.alarms.lost import ledger_alarms, lost, unmeasured_alarms
from sqrtdk.monitor.alarms.nonfinite import nonfinite_alarm
from sqrtdk.monitor.alarms.roots import layer_logits_alarm, update_alarm
from sqrtdk.monitor.alarms.scale import declared_alarm, scale_ledger_alarm
from sqrtdk.monitor.alarms.weights import collapsed, entropy_alarm, entropy_trend, equal_logits, saturation_alarm
from sqrtdk.monitor.samples import Alarm, StepSample

Judge = Callable[[Sequence[StepSample], StepSample], Iterable[Alarm]]
Key = tuple[object, ...]
_NUMBER_IN_ALARM = re.compile(
    r"(?<![\w.])\d+(?![\w.:])"
)  # in a reason, not in a site or a rank: "0: 3 passes were left out"
_ANY_NUMBER = re.compile(r"\d[\d.,e+-]*")


@dataclass(frozen=True, slots=True)
class Rule:
    """One alarm.

    Attributes:
        judge: yields the alarms that hold for the newest sample, given the samples before it.
        once: scope in which an alarm is shown once per level: "model", "attention", "head", "reason" (attention and
            text) or "mistake" (attention and what is wrong, whatever its size and rows).
    """

    judge: Judge
    once: str


ALARM_RULES: Mapping[str, Rule] = {
    "nonfinite": Rule(nonfinite_alarm, "model"),
    "gradient": Rule(gradient_alarm, "mistake"),
    "lost": Rule(lost, "attention"),
    "scale_ledger": Rule(scale_ledger_alarm, "mistake"),
    "declared_vs_actual": Rule(declared_alarm, "mistake"),
    "update": Rule(update_alarm, "model"),
    "layer_logits": Rule(layer_logits_alarm, "attention"),
    "fp16_range": Rule(fp16_range, "attention"),
    "max_logit": Rule(max_logit_alarms, "attention"),
    "growth": Rule(growth, "attention"),
    "equal_logits": Rule(equal_logits, "attention"),
    "ledger": Rule(ledger_alarms, "attention"),
    "entropy": Rule(entropy_alarm, "model"),
    "entropy_trend": Rule(entropy_trend, "model"),
    "saturation": Rule(saturation_alarm, "model"),
    "collapsed": Rule(collapsed, "head"),
    "bf16_offset": Rule(bf16_offset, "attention"),
    "unmeasured": Rule(unmeasured_alarms, "reason"),
}


def holding(before: Sequence[StepSample], now: StepSample) -> list[Alarm]:
    """Return the alarms that hold for a sample, new or not, in the order of the table (worst kind first).

    Args:
        before: earlier samples of the run, oldest first.
        now: the newest sample.
    """
    return [alarm for name in ALARM_RULES for alarm in _judged(name, before, now)]


def _judged(name: str, before: Sequence[StepSample], now: StepSample) -> list[Alarm]:
    """Return the alarms of one rule. A rule that raises becomes an alarm itself, and the other rules go on."""
    try:
        return list(ALARM_RULES[name].judge(before, now))
    except Exception as error:  # an observer never stops the run
        text = Message("alarms.failed.alarm", name=name, step=now.step, error=kind_and_text(error))
        return [Alarm(name, "warn", now.step, text, Message("alarms.source.watch"))]


def idle(steps: int, forwards: int, step: int) -> Iterator[Alarm]:
    """Yield at most one alarm when the block of a watch ends: `step()` was never called.

    Args:
        steps: number of calls of `step()`.
        forwards: number of forward passes since the last call of `step()`.
        step: number of the current step.

    Example:
        >>> [alarm.severity for alarm in idle(0, 3, 1)], list(idle(1, 0, 2))
        (['warn'], [])
    """
    if steps == 0 and forwards:
        text = Message("alarms.idle.never_stepped", forwards=forwards)
        yield Alarm("idle", "warn", step, text, Message("alarms.source.step"), value=float(forwards), bar=0.0)


def fresh(alarms: Iterable[Alarm], reported: Iterable[Alarm]) -> list[Alarm]:
    """Return the alarms that are new, or more severe than an equal one of the run.

    Args:
        alarms: all that hold for a sample.
        reported: alarms of the run so far.

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
    for alarm in reported:
        key = _key(alarm)
        levels[key] = max(levels.get(key, -1), _level(alarm))
    new = []
    for alarm in alarms:
        key = _key(alarm)
        # "5 of 8 heads went one-hot" stands for each of them
        whole = key if alarm.head is None else _key(replace(alarm, site=None, index=None, head=None))
        if _level(alarm) > max(levels.get(key, -1), levels.get(whole, -1)):
            levels[key] = _level(alarm)
            new.append(alarm)
    return new


def _level(alarm: Alarm) -> int:
    return SEVERITIES.index(alarm.severity)


def _key(alarm: Alarm) -> Key:
    rule = ALARM_RULES.get(alarm.name)
    once = "head" if rule is None else rule.once
    if once == "model":
        return (alarm.name,)
    last = {
        "head": (alarm.head,),
        "reason": (_NUMBER_IN_ALARM.sub("#", alarm.text),),
        "mistake": (_mistake(alarm.text),),
    }
    return (alarm.name, alarm.site, alarm.index, *last.get(once, ()))


def _mistake(text: str) -> str:
    """Return what is wrong, without numbers, and without where and how often."""
    while isinstance(text, Message) and isinstance(what := text.values.get("what"), str):
        text = what
    return _ANY_NUMBER.sub("#", text)
