"""`watch(model)`: the health of every attention over a training run, sampled now and then.

Between two calls of `step()` lies one step. Whether the next one is sampled is decided by `step()`, so that a step that
is not costs one comparison. What a sampled step needs is torch's global hooks, for as long as the step lasts: nothing
is put on the model, and a copy of it is no watched one.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from weakref import WeakSet

from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkError
from sqrtdk.monitor.alarms import judge
from sqrtdk.monitor.forwards import Forwards
from sqrtdk.monitor.samples import Alarm, StepSample
from sqrtdk.monitor.schedule import Schedule, schedule_of
from sqrtdk.tracing.watch.programs import hint_for

HISTORY = 4096  # samples that are remembered for trends
LOUD = ("warn", "fail", "critical")
OnAlarm = str | Callable[[Alarm], None]
_watched: WeakSet[nn.Module] = WeakSet()


class AttentionWarning(UserWarning):
    """An alarm of a watch."""


class AttentionAlarm(SqrtdkError, RuntimeError):
    """An alarm of a watch that was told to raise; `alarm` is its record."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(alarm.text, hint=f"source of the bar: {alarm.source}")
        self.alarm = alarm


class Watch:
    """A run that is watched; see `watch`.

    Attributes:
        samples: the latest, oldest first.
        alarms: all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int | Schedule | Callable[[int], bool] = 100,
        rows: int | None = None,
        on_alarm: OnAlarm = "warn",
        first_step: int = 1,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidTypeError(
                f"watch() takes an nn.Module, got {type(model).__name__}",
                hint=hint_for(model, "Pass the model itself."),
            )
        if on_alarm not in ("warn", "raise") and not callable(on_alarm):
            raise InvalidValueError(
                f'on_alarm is "warn", "raise" or a function of the alarm; got {on_alarm!r}', hint='Pass "warn".'
            )
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 2):
            raise InvalidValueError(f"rows is a whole number from 2 on, or None; got {rows!r}", hint="None: all rows.")
        self.samples: deque[StepSample] = deque(maxlen=HISTORY)
        self.alarms: list[Alarm] = []
        self._model = model
        self._schedule = schedule_of(every)
        self._forwards = Forwards(model, rows)
        self._on_alarm = on_alarm
        self._step = first_step - 1
        self._losses: list[tuple[int, Tensor | float | None, float]] = []
        self._armed = ExitStack()
        self._sampling = False
        self._open = False

    def __enter__(self) -> Watch:
        if self._model in _watched:
            raise InvalidValueError(
                "one watch at a time; this model has one already", hint="Leave the block of the first."
            )
        _watched.add(self._model)
        self._open = True
        self._arm_if_due()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._armed.close()
        self._sampling = self._open = False
        _watched.discard(self._model)

    def step(self, loss: Tensor | float | None = None) -> None:
        """End one step: after `optimizer.step()`, on every rank.

        Args:
            loss: of the step; a tensor is not waited for before the next sample.

        Raises:
            InvalidValueError: outside the block.
            AttentionAlarm: with `on_alarm="raise"`, at a warning or worse.
        """
        if not self._open:
            raise InvalidValueError(
                "step() is called inside the block of the watch", hint="with watch(model) as w: ..."
            )
        self._step += 1
        self._losses.append((self._step, loss.detach() if isinstance(loss, Tensor) else loss, time.time()))
        if self._sampling:
            self._finish()
        self._arm_if_due()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block whose forward passes do not count, as those of an evaluation."""
        with self._forwards.ignored():
            yield

    def _arm_if_due(self) -> None:
        worsening = bool(self.alarms) and self.alarms[-1].severity in LOUD
        if self._schedule.due(self._step + 1, worsening):
            self._armed.enter_context(self._forwards)
            self._sampling = True

    def _finish(self) -> None:
        self._sampling = False
        self._armed.close()
        calls, how, missed = self._forwards.summarised()
        loss = self._losses[-1][1]
        self._losses.clear()
        sample = StepSample(self._step, calls, how, missed, None if loss is None else float(loss))
        found = judge(tuple(self.samples), sample)
        self.samples.append(sample)
        self.alarms += found
        for alarm in found:
            self._tell(alarm)

    def _tell(self, alarm: Alarm) -> None:
        if callable(self._on_alarm):
            self._on_alarm(alarm)
        elif alarm.severity in LOUD and self._on_alarm == "raise":
            raise AttentionAlarm(alarm)
        elif alarm.severity in LOUD:
            warnings.warn(AttentionWarning(alarm.text), stacklevel=4)
