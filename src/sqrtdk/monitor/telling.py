"""What a watch does with an alarm: a warning, an error, or a call of a function."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

from sqrtdk.errors import SqrtdkError
from sqrtdk.monitor.samples import Alarm
from sqrtdk.monitor.schedule import OnAlarm

LOUD = ("warn", "fail", "critical")
FRAMEWORKS = frozenset({"sqrtdk", "transformers", "trl", "accelerate", "lightning", "pytorch_lightning", "torch"})


class AttentionWarning(UserWarning):
    """The category of the warnings by which a watch reports alarms."""


class AttentionAlarm(SqrtdkError, RuntimeError):
    """Raised for an alarm by a watch with `on_alarm="raise"`; the attribute `alarm` is the record of the alarm."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(alarm.text, hint=f"source of the bar: {alarm.source}")
        self.alarm = alarm


def tell(alarms: Iterable[Alarm], on_alarm: OnAlarm, *, warns: bool = True) -> None:
    """Tell the alarms of a step as the option of the watch says.

    Args:
        alarms: of the step. A function receives all of them; a warning or an error is made of `LOUD` ones alone.
        on_alarm: see `watch`.
        warns: whether this process warns; with several ranks, one does.

    Raises:
        AttentionAlarm: An alarm is loud, with `on_alarm="raise"`.
    """
    for alarm in alarms:
        if callable(on_alarm):
            on_alarm(alarm)
        elif alarm.severity in LOUD and on_alarm == "raise":
            raise AttentionAlarm(alarm)
        elif alarm.severity in LOUD and warns:
            warnings.warn(AttentionWarning(alarm.text), stacklevel=_level_of_program())


def _level_of_program() -> int:
    """Return the stacklevel, for a warning of the caller, of the line of the program outside `FRAMEWORKS`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in FRAMEWORKS:
        frame, level = frame.f_back, level + 1
    return level
