"""`watch(model)`: the health of every attention over a training run, sampled now and then.

One step lies between two calls of `step()`. `step()` decides whether the next one is sampled, so that an unsampled step
costs one comparison. A sampled step uses torch's global hooks for its duration only: the model is not changed, and a
copy of it is not watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from sqrtdk._guesses import with_leads
from sqrtdk._wrappers import innermost
from sqrtdk.errors import InvalidValueError, kind_and_text
from sqrtdk.messages import Message
from sqrtdk.monitor.alarms import fresh, holding, idle
from sqrtdk.monitor.alarms.nonfinite import unsampled_loss
from sqrtdk.monitor.forwards import Place, StepTracer
from sqrtdk.monitor.journal import Journal, model_facts, numbers
from sqrtdk.monitor.ranks import Ranks, Shards, ranks_of
from sqrtdk.monitor.samples import Alarm, StepSample, not_measured
from sqrtdk.monitor.schedule import LossScaler, OnAlarm, Schedule, check_options, copied_loss, schedule_of
from sqrtdk.monitor.sinks import AnySink, Sinks, run_name
from sqrtdk.monitor.sums import WatchedStep
from sqrtdk.monitor.telling import LOUD, tell
from sqrtdk.monitor.updates import optimizers_of
from sqrtdk.tracing import CallTensors

HISTORY = 4096  # remembered samples, for trends
NUMBERS_IN_MEMORY = 2**23  # statistics in them, about 32 bytes each: 50 samples of 4,000 heads
LOOP = "with watch(model) as health: ... health.step(loss)"
_watched: WeakSet[nn.Module] = WeakSet()


class Watch:
    """A watched run; see `watch`.

    Attributes:
        samples: the newest, oldest first: at most `HISTORY`, and `NUMBERS_IN_MEMORY` statistics of heads.
        alarms: all alarms so far.
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
        scaler: LossScaler | None = None,
        group: Any = None,
        shards: Shards | None = None,
        sinks: Sequence[AnySink] = (),
        optimizer: Any = None,
        gradient: bool | int = False,
    ) -> None:
        check_options(model, on_alarm, rows, first_step, scaler, gradient)
        self.samples: list[StepSample] = []
        self.alarms: list[Alarm] = []
        self._model = innermost(model)  # calling the wrapper calls this module too
        self._schedule, self._gradient_every, self._sampled = schedule_of(every), int(gradient or 0), 0
        self._forwards = StepTracer(self._model, rows, optimizers_of(optimizer))
        self._on_alarm = on_alarm
        self._to = to
        self._first_step = first_step
        self._group, self._shards = group, shards
        self._ranks: Ranks | None = None
        self._sketches: dict[Place, CallTensors] = {}
        self._unreported: list[Alarm] = []  # of this rank alone, until the next sample
        self._sinks = Sinks(sinks, run_name(to))
        self._journal: Journal | None = None
        self._scaler = scaler if getattr(scaler, "is_enabled", lambda: True)() else None  # it may be disabled
        self._step = self._steps = self._numbers = 0
        self._worsening = False  # whether the newest sample is worth a warning
        self._armed = ExitStack()
        self._sampling = False
        self._pauses = 0
        self._open = False

    def __enter__(self) -> Watch:
        """Open the folder of records, on the first rank, and decide whether the first step is sampled."""
        if self._model in _watched:
            raise InvalidValueError(
                "one watch at a time; this model has one already", hint="Leave the block of the first."
            )
        if self._steps:
            raise InvalidValueError("a watch is for one block; this one has been left", hint="Make another one.")
        self._step = (1 if self._first_step is None else self._first_step) - 1
        self._ranks = ranks_of(self._group, self._shards)
        self._forwards.whole_rows = self._shards is not None or getattr(self._group, "mesh_dim_names", None) is not None
        self._forwards.keeps_rows = self._ranks is not None and any(axis.shards == "keys" for axis in self._ranks.axes)
        if self._to is not None:
            next_step = self._opened if self._ranks is None else partial(self._ranks.first_says, self._opened)
            self._step = next_step() - 1
        _watched.add(self._model)
        self._open = True
        self._plan([])
        return self

    # -- what a repair asks for ------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The module whose forward passes are traced: that inside a compiled model or a wrapper, if there is one."""
        return self._model

    @property
    def rows(self) -> int | None:
        """Largest number of rows of a sequence that are measured; None if all are."""
        return self._forwards.most

    @property
    def shards(self) -> tuple[str, ...]:
        """How the ranks that watch together split the work, as `sqrtdk.monitor.ranks` names it; empty for a single
        process.
        """
        return () if self._ranks is None else tuple(axis.shards for axis in self._ranks.axes)

    def last_sample(self) -> StepSample | None:
        """Return the sample of the last step; None if it was not sampled.

        Raises:
            InvalidValueError: It is called outside the block.
        """
        if not self._open:
            raise InvalidValueError("the last sample is asked for inside the block of the watch", hint=LOOP)
        last = self.samples[-1] if self.samples else None
        return last if last is not None and last.step == self._step else None

    def sketches(self) -> dict[Place, CallTensors]:
        """Return where q and k come from, by site and index, for each attention examined in the last sampled step.

        A step examines the attentions that it has not seen before, and after `look_again` all of them.
        """
        return dict(self._sketches)

    def look_again(self) -> None:
        """Ask the next sampled step to examine every attention anew, for example after the model was changed."""
        self._forwards.look()

    def gather(self, own: Any) -> list[Any]:
        """Return the picklable values of all ranks that watch, in the order of the ranks; every rank must call this."""
        return [own] if self._ranks is None else self._ranks.gather(own)

    # -- the run ---------------------------------------------------------------------------------------------------

    def _opened(self) -> int:
        """Open the folder of the records, and return the number of its next step."""
        assert self._to is not None
        settings = {"every": str(self._schedule), "rows": self._forwards.most}
        self._journal = Journal(
            self._to, model=model_facts(self._model), settings=settings, first_step=self._first_step
        )
        return self._journal.next_step

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close loggers and records; report what is known only at the end, such as steps that were never measured."""
        self._armed.close()
        self._sampling = self._open = False
        self._sketches = {}
        _watched.discard(self._model)
        found: list[Alarm] = []
        if error is None:
            found += idle(self._steps, self._forwards.passes, self._step + 1)
        self._forwards.begin()  # drops what is left of a step that did not end
        found += (closing := self._sinks.close(self._step if self._steps else self._step + 1))
        journal, self._journal = self._journal, None
        if journal is not None:
            found += journal.close(found)
        self.alarms += found
        tell(closing, "warn")  # a warning even with "raise": the run is over
        if error is None:
            self._tell([alarm for alarm in found if alarm not in closing])

    def step(self, loss: Tensor | float | None = None) -> None:
        """End one step: after `optimizer.step()`, on every rank.

        Args:
            loss: of the step, one number; a tensor is not transferred before the next sample.

        Raises:
            InvalidValueError: It is called outside the block, or the loss has several numbers.
            InvalidTypeError: The loss is not a number.
            AttentionAlarm: An alarm is a warning or worse, with `on_alarm="raise"`.
        """
        if not self._open:
            raise InvalidValueError("step() is called inside the block of the watch", hint=LOOP)
        loss = copied_loss(loss)
        self._step += 1
        self._steps += 1
        if self._journal is not None:
            self._journal.step(self._step, loss)
        found = self._finish(loss) if self._sampling else self._loss_alone(loss)
        self._plan(found)
        self.alarms += found
        self._tell(found)

    def flush(self) -> bool:
        """Write the records of all finished steps, for example when a checkpoint is saved; any rank may call it.

        Returns:
            Whether they are on disk, or this process has none. Otherwise there is an alarm, and a later write retries.

        Raises:
            InvalidValueError: It is called outside the block.
            AttentionAlarm: They could not be written, with `on_alarm="raise"`.
        """
        if not self._open:
            raise InvalidValueError("flush() is called inside the block of the watch", hint=LOOP)
        if self._journal is None:
            return True
        written, found = self._journal.flush(), self._journal.unreported()
        self.alarms += found
        self._tell(found)
        return written

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose forward passes are neither traced nor counted, such as those of an evaluation."""
        self._pauses += 1
        self._armed.close()
        try:
            yield
        finally:
            self._pauses -= 1
            try:
                self._arm()
            except Exception as error:
                self._sampling = False
                self._failed(self._unreported, "alarms.not_sampled.paused", error)

    def _plan(self, found: list[Alarm]) -> None:
        """Decide whether the next step is sampled, and prepare it."""
        failed = "alarms.not_sampled.schedule"
        try:
            self._sampling = self._schedule.due(self._step + 1, self._worsening)
            failed = "alarms.not_sampled.loss_scale"
            scale = float(self._scaler.get_scale()) if self._scaler is not None and self._sampling else 1.0
            failed = "alarms.not_sampled.not_begun"
            if self._sampling:
                judges = self._gradient_every > 0 and self._sampled % self._gradient_every == 0
                self._forwards.begin(scale, gradient=judges)
                self._sampled += 1
            self._arm()
        except Exception as error:  # schedule and scaler are the caller's, and must not end the training
            self._sampling = False
            self._failed(found, failed, error)

    def _failed(self, found: list[Alarm], id: str, error: Exception) -> None:
        """Report once why the next step is not sampled."""
        if not any(alarm.name == "schedule" for alarm in (*self.alarms, *found, *self._unreported)):
            text = Message(id, step=self._step + 1, error=kind_and_text(error))
            alarm = Alarm("schedule", "warn", self._step, text, Message("alarms.source.watch"))
            found.append(alarm)
            if self._journal is not None and self._steps:
                self._journal.note([alarm])

    def _arm(self) -> None:
        if self._sampling and self._open and not self._pauses:
            self._armed.enter_context(self._forwards)

    def _loss_alone(self, loss: Tensor | float | None) -> list[Alarm]:
        """Judge the loss of a step that is not sampled. Ranks would have to agree, which takes a collective."""
        found = fresh(unsampled_loss(self._step, loss), self.alarms) if self._ranks is None else []
        if self._journal is not None:
            self._journal.note(found)
        for alarm in found:
            self._unreported += self._sinks.alarm(alarm)
        return found

    def _finish(self, loss: Tensor | float | None) -> list[Alarm]:
        """End a sampled step: join the ranks, judge, record and log; return the alarms to tell the user of."""
        try:
            self._armed.close()
            watched = self._forwards.watched_step()
        except Exception as error:  # an observer never stops the run
            watched = WatchedStep((), not_measured(kind_and_text(error)))
        self._sketches = self._forwards.sketches
        try:
            number = numbers([loss])[0]
        except Exception as error:
            number, lost = None, Message("alarms.unmeasured.loss", error=kind_and_text(error))
            watched = replace(watched, missed=(*watched.missed, lost))
        watched = replace(watched, loss=number, alarms=tuple(self._unreported))
        self._unreported = []
        if self._ranks is not None:
            watched = self._ranks.joined(watched, self._step)
        try:
            calls, how = watched.samples(), watched.how
        except Exception as error:
            calls, how = (), not_measured(kind_and_text(error))
        known = watched.missed, watched.loss, self._scaler is not None, watched.first, watched.modules
        moved = watched.relative_step, watched.learning_rate
        sample = StepSample(self._step, calls, how, *known, *moved, watched.faults, watched.drift)
        holds = holding(tuple(self.samples), sample)
        self._worsening = any(alarm.severity in LOUD for alarm in holds)
        found = [*watched.alarms, *fresh(holds, self.alarms)]
        own = found if self._ranks is None else self._unreported  # alarms that only this rank knows of
        own += self._sinks.sample(sample, found)
        self.samples.append(sample)
        self._numbers += sample.count
        while len(self.samples) > HISTORY or (self._numbers > NUMBERS_IN_MEMORY and len(self.samples) > 2):
            self._numbers -= self.samples.pop(0).count
        if self._journal is not None:
            unwritten = self._journal.sample(sample, found)
            own += [*unwritten, *(alarm for one in unwritten for alarm in self._sinks.alarm(one))]
        return found

    def _tell(self, found: list[Alarm]) -> None:
        tell(found, self._on_alarm, warns=self._ranks is None or self._ranks.first)


@with_leads
def watch(
    model: nn.Module,
    *,
    every: int | Schedule | Callable[[int], bool] = 100,
    to: str | Path | None = None,
    rows: int | None = None,
    on_alarm: OnAlarm = "warn",
    first_step: int | None = None,
    scaler: LossScaler | None = None,
    group: Any = None,
    shards: Shards | None = None,
    sinks: Sequence[AnySink] = (),
    optimizer: Any = None,
    gradient: bool | int = False,
) -> Watch:
    """Watch every attention of a model while it trains.

    Args:
        model: as the loop calls it: compiled, wrapped or plain. It is not changed.
        every: a number of steps, a schedule (`monitor.schedule`), or a function of the step; step 1 is always sampled.
        to: folder of the records, Parquet parts; a folder of the same run is continued. None: nothing is written.
        rows: measure at most this many rows of a sequence, evenly spread; None: all.
        on_alarm: "warn" (a Python warning), "raise" (an error at `step()`), or a function of the `Alarm`. The first two
            act on warnings and worse; a function also receives notes.
        first_step: number of the first step, if a run continues from a checkpoint; None: after the last one in `to`.
        scaler: the GradScaler of the loop; gradients are then measured without its loss scale. None: as they come.
        group: with torch.distributed, the processes whose statistics are joined: a process group, a DeviceMesh over all
            of them, or None: all. Each process watches its model with the same options, and calls `step()` equally
            often. The first one writes `to` and warns; an error, or a function of `on_alarm`, reaches all of them.
            Gradients are those of the mean loss over ranks with rows of their own, as in DDP and FSDP ("summed": of the
            sum), and the loss of a sample is the mean over ranks.
        shards: how the ranks of the group, or along each axis of the mesh, split the work: "rows" (data parallel, FSDP;
            None), "summed" (the same with summed gradients), "heads", "keys", "stages", "same", or "alone": nothing is
            joined. See `monitor.ranks`.
        sinks: loggers that receive the metrics of each sample (`monitor.metrics`) and the alarms, on rank 0: names such
            as "tensorboard:runs/tb" (`monitor.sinks.SINKS`), objects with write, alarm and close, or functions of the
            step and its metrics. The first failure of a sink is an alarm, and the others go on.
        optimizer: of the loop, or a list of them, whose learning rate is recorded; None: it is not.
        gradient: hold the gradients that the loop's own backward pass delivers at each attention against those of its
            formula, in float64: True at every sampled step, n at every n-th of them from the first on.

    Returns:
        The context manager; call its `step(loss)` after each optimizer step.

    Raises:
        InvalidTypeError: `model` is not a module.
        InvalidValueError: An option is out of its range, or the model is already watched.
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
    return Watch(
        model, every=every, to=to, rows=rows, on_alarm=on_alarm, first_step=first_step, scaler=scaler, group=group,
        shards=shards, sinks=sinks, optimizer=optimizer, gradient=gradient,
    )  # fmt: skip
