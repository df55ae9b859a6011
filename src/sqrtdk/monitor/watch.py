"""`watch(model)`: the health of every attention over a training run, sampled now and then.

Between two calls of `step()` lies one step. Whether the next one is sampled is decided by `step()`, so that a step that
is not costs one comparison. What a sampled step needs is torch's global hooks, for as long as the step lasts: nothing
is put on the model, and a copy of it is no watched one.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from weakref import WeakSet

from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError, OutputError, SqrtdkError
from sqrtdk.monitor.alarms import judge
from sqrtdk.monitor.forwards import Forwards
from sqrtdk.monitor.journal import Journal, numbers, unwritten
from sqrtdk.monitor.samples import Alarm, StepSample
from sqrtdk.monitor.schedule import Schedule, schedule_of
from sqrtdk.monitor.sinks import AnySink, Sinks, run_name
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
        to: str | Path | None = None,
        on_alarm: OnAlarm = "warn",
        first_step: int | None = None,
        sinks: Sequence[AnySink] = (),
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
        self._to = to
        self._first_step = first_step
        self._sinks = Sinks(sinks, run_name(to))
        self._journal: Journal | None = None
        self._step = 0
        self._armed = ExitStack()
        self._sampling = False
        self._open = False

    def __enter__(self) -> Watch:
        if self._model in _watched:
            raise InvalidValueError(
                "one watch at a time; this model has one already", hint="Leave the block of the first."
            )
        self._step = (1 if self._first_step is None else self._first_step) - 1
        if self._to is not None:
            settings = {"every": str(self._schedule), "rows": self._forwards.most}
            self._journal = Journal(
                self._to, model=_described(self._model), settings=settings, first_step=self._first_step
            )
            self._step = self._journal.next_step - 1
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
        for alarm in self._sinks.close(self._step):
            self.alarms.append(alarm)
            warnings.warn(AttentionWarning(alarm.text), stacklevel=2)  # never an error: the run is over
        journal, self._journal = self._journal, None
        if journal is not None:
            with suppress(OutputError) if error is not None else nullcontext():
                journal.close()

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
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        if self._journal is not None:
            self._journal.step(self._step, loss)
        if self._sampling:
            self._finish(loss)
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

    def _finish(self, loss: Tensor | float | None) -> None:
        self._sampling = False
        self._armed.close()
        calls, how, missed = self._forwards.summarised()
        sample = StepSample(self._step, calls, how, missed, numbers([loss])[0])
        found = judge(tuple(self.samples), sample)
        found += self._sinks.sample(sample, found)
        self.samples.append(sample)
        if self._journal is not None:
            try:
                self._journal.sample(sample, found)
            except OutputError as error:  # a full disk is no reason to end a training run
                lost = unwritten(error, self._step)
                found += [lost, *self._sinks.alarm(lost)]
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


def watch(
    model: nn.Module,
    *,
    every: int | Schedule | Callable[[int], bool] = 100,
    to: str | Path | None = None,
    rows: int | None = None,
    on_alarm: OnAlarm = "warn",
    first_step: int | None = None,
    sinks: Sequence[AnySink] = (),
) -> Watch:
    """Watch every attention of a model while it trains.

    Args:
        model: as it is called in the loop: compiled, wrapped or plain. Nothing is put on it.
        every: a number of steps, a schedule (`monitor.schedule`), or a function of the step; the first is always one.
        to: folder of the records, Parquet parts; a folder of the same run goes on. None: nothing is written.
        rows: measure at most so many rows of a sequence, evenly spread; None: all.
        on_alarm: "warn" (a Python warning), "raise" (an error at `step()`), or a function of the `Alarm`; the first two
            act from a warning on, a function gets the notes too.
        first_step: number of the first step, where a run goes on from a checkpoint; None: after the last one in `to`.
        sinks: loggers that get the metrics of each sample (`monitor.metrics`) and the alarms, on rank 0: names as
            "tensorboard:runs/tb" (`monitor.sinks.SINKS`), objects with write, alarm and close, functions of the step
            and its metrics. One that fails is told once, as an alarm, and the others go on.

    Returns:
        The context manager; call its `step(loss)` after each optimizer step.

    Raises:
        InvalidTypeError: `model` is no module.
        InvalidValueError: an option out of its range, or a model that is watched already.
        OutputError: `to` can't be written, or another watch writes there.

    Example:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> with watch(layer, every=2) as health:
        ...     for _ in range(4):
        ...         loss = layer(torch.randn(2, 5, 16)).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         health.step(loss)
        >>> [sample.step for sample in health.samples]
        [1, 2, 4]
        >>> len(health.samples[0].calls[0].columns["max_logit"])
        2
    """
    return Watch(model, every=every, to=to, rows=rows, on_alarm=on_alarm, first_step=first_step, sinks=sinks)


def _described(model: nn.Module) -> dict[str, object]:
    """What a run is of: another model's records do not go on in its folder."""
    plain = getattr(model, "_orig_mod", model)
    return {"class": type(plain).__name__, "parameters": sum(parameter.numel() for parameter in plain.parameters())}
