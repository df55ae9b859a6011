"""What a watch writes down: rows of its records, several samples at a time, and the losses of all steps.

Nothing that fails here ends a training run: it becomes an alarm. What can't be written waits, in pieces as they will be
written, and is tried again with later samples; beyond `WAITING_BYTES` the oldest is dropped, counted and named.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk.errors import OutputError, kind_and_text
from sqrtdk.monitor.columns import HEADS
from sqrtdk.monitor.folder import RunWriter
from sqrtdk.monitor.samples import Alarm, StepSample, not_measured
from sqrtdk.monitor.tables import PART_BYTES, Numbers, Table, Tables, from_columns, from_rows, stacked

SAMPLES = 32  # of one part: a part costs a flush of the disk
STEPS = 2**13  # likewise, where few of them are sampled
SECONDS = 30.0  # after which what there is becomes a part
WAITING_BYTES = 2**26  # of rows that wait for the disk, unpacked: those of some 200,000 heads
TEXT = 2000  # characters of a text that is kept
_STATISTICS = [column.name for column in HEADS if column.type == "float64" or column.name.endswith("rows")]
_COUNTS = ("rows", "blind_rows", "nan_rows", "inf_rows")
_PASSING = (OutputError, OSError, MemoryError)  # a disk that is full may be free later; other errors stay
_NONE = {"how": None, "calls": 0, "unmeasured": 0}
Loss = Tensor | float | None


@dataclass(frozen=True, slots=True)
class _Dropped:
    """Steps that will never be written, how many of them were sampled, and why."""

    first: int
    last: int
    samples: int
    reason: str

    def __str__(self) -> str:
        return f"steps {self.first} to {self.last}, {self.samples} of them sampled, are not recorded: {self.reason}"


class Journal:
    """Buffers what was sampled, and writes it in parts; see `columns` for what a row holds.

    Attributes:
        writer: of the folder.
    """

    def __init__(self, folder: str | Path, *, model: Any, settings: Any, first_step: int | None) -> None:
        self.writer = RunWriter(folder, model=model, settings=settings, first_step=first_step)
        self._steps: list[tuple[int, Loss, float]] = []
        self._samples: dict[int, dict[str, Any]] = {}  # what a row of `columns.STEPS` has of a sampled step
        self._heads: list[Table] = []
        self._bytes = 0  # of those
        self._alarms: list[Alarm] = []
        self._waiting: deque[Tables] = deque()
        self._dropped: _Dropped | None = None
        self._newest: int | None = None  # step that was noted
        self._failing = self._due = False
        self._untold: list[Alarm] = []
        self._flushed = time.monotonic()

    @property
    def next_step(self) -> int:
        """The step that is recorded next; the first one is 1."""
        return max(1, self.writer.first_step)

    def step(self, step: int, loss: Loss) -> None:
        """Note a step, and write a part of those before where it is time; a loss that is a tensor is waited for then.

        The newest step is not among them: an alarm that comes as the watch ends stands in a part with its step.
        """
        if self._due:
            self._due = False
            self._write(step)
        self._steps.append((step, loss, time.time()))
        self._newest = step
        self._due = len(self._steps) >= STEPS

    def sample(self, sample: StepSample, alarms: Sequence[Alarm]) -> list[Alarm]:
        """Note what was sampled.

        Returns:
            The alarm of a part that could not be written, once until one can be; it is tried again after later samples.
        """
        try:
            self._heads.append(table := head_table(sample))
            self._bytes += table.nbytes
        except Exception as error:  # an observer never stops the run
            self._warn(sample.step, f"the heads of step {sample.step} are not recorded: {kind_and_text(error)}")
        measured, how = len(sample.measured), kept_text(sample.how)
        self._samples[sample.step] = {"how": how, "calls": measured, "unmeasured": sample.unmeasured}
        self._alarms += alarms
        due = len(self._samples) >= SAMPLES or self._bytes >= PART_BYTES // 2
        self._due = self._due or due or time.monotonic() - self._flushed >= SECONDS
        return self.untold()

    def note(self, alarms: Sequence[Alarm]) -> None:
        """Record alarms that came after the sample of their step."""
        self._alarms += alarms

    def untold(self) -> list[Alarm]:
        """What failed since this was asked last, as alarms."""
        untold, self._untold = self._untold, []
        return untold

    def flush(self) -> bool:
        """Write what there is, the newest step included; what fails is an alarm.

        Returns:
            Whether all of it is on the disk.
        """
        return self._newest is None or (self._write(self._newest) is None and not self._untold)

    def close(self, alarms: Sequence[Alarm] = ()) -> list[Alarm]:
        """Write what is left, and let go of the folder.

        Args:
            alarms: that came as the watch ended, of its last step; or of the one under way, where no step ended, which
                is recorded with the first of them as what was not measured.

        Returns:
            The alarms of what could not be written.
        """
        try:
            if alarms and self._newest is None:
                step = alarms[0].step
                self.step(step, None)
                self.sample(StepSample(step, (), not_measured(alarms[0].text)), [])
            self._alarms += alarms
            if self._newest is not None:
                self._failing = True  # the error below covers all that is left
                error = self._write(self._newest)
                if error is None and self._alarms:  # of what was dropped before
                    error = self._write(self._newest)
                while error is not None and self._waiting:
                    self._drop(self._waiting.popleft(), _text_of(error))
                self._tell_dropped(self._newest)
        except Exception as error:  # the run is over, and what it made is not to be lost for its records
            self._warn(self._newest or 1, f"the last steps are not recorded: {kind_and_text(error)}")
        finally:
            self.writer.close()
        return self.untold()

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self, step: int) -> Exception | None:
        """Write what there is; what fails becomes an alarm of a step.

        Returns:
            The error after which something still waits.
        """
        self._flushed = time.monotonic()
        try:
            self._gather()
            while self._waiting:
                self._write_first()
        except Exception as error:
            if not self._failing:
                self._warn(step, str(error) if isinstance(error, OutputError) else kind_and_text(error))
            self._failing = True
            self._bound(step)
            return error
        self._failing = False
        self._tell_dropped(step)
        return None

    def _write_first(self) -> None:
        """Write what waits longest, once: it is gone from the queue where the writer has it."""
        tables, before = self._waiting[0], self.writer.parts
        try:
            self.writer.write(tables.heads, tables.steps, tables.alarms)
        except BaseException as error:
            if self.writer.parts > before:
                self._waiting.popleft()
            elif isinstance(error, Exception) and not isinstance(error, _PASSING):
                self._drop(self._waiting.popleft(), _text_of(error))
                return
            raise
        self._waiting.popleft()

    def _gather(self) -> None:
        """Put what was noted into the queue, in pieces of a size to write."""
        written = {self.writer.last_step, self._waiting[-1].last_step if self._waiting else None}
        if self._newest is None or not (self._steps or (self._alarms and self._newest in written)):
            return
        steps, self._steps = self._steps, []
        samples, self._samples = self._samples, {}
        heads, self._heads, self._bytes = self._heads, [], 0
        alarms, self._alarms = self._alarms, []
        first, last = (steps[0][0], steps[-1][0]) if steps else (self._newest, self._newest)
        known = {number for number, _, _ in steps}
        try:
            rows = [
                {"step": number, "sampled": number in samples, "loss": loss, "time": at} | samples.get(number, _NONE)
                for (number, _, at), loss in zip(steps, self._losses(steps), strict=True)
            ]
            # an alarm of a step that was written already stands at the next one
            alarms = [alarm if alarm.step in known else replace(alarm, step=first) for alarm in alarms]
            tables = from_rows(stacked("heads", heads), rows, [alarm_row(alarm) for alarm in alarms])
            self._waiting += tables.pieces()
        except Exception as error:
            self._lose(_Dropped(first, last, len(samples), kind_and_text(error)))

    def _losses(self, steps: list[tuple[int, Loss, float]]) -> list[float | None]:
        try:
            return numbers([loss for _, loss, _ in steps])
        except Exception as error:
            last = steps[-1][0]
            self._warn(last, f"the losses of steps {steps[0][0]} to {last} are not recorded: {kind_and_text(error)}")
            return [None] * len(steps)

    def _bound(self, step: int) -> None:
        """Drop what waits longest where more waits than is kept."""
        waiting = sum(tables.nbytes for tables in self._waiting)
        while waiting > WAITING_BYTES:
            tables = self._waiting.popleft()
            waiting -= tables.nbytes
            limit = f"at most {WAITING_BYTES / 2**20:.3g} MiB wait for the disk"
            if self._dropped is None:
                self._warn(step, f"records are dropped from step {tables.first_step} on: {limit}")
            self._drop(tables, limit)
        # a step that is larger than a part waits in several pieces: without the first the others are dropped as well,
        # the one with its row included, or the step would read as whole
        while self._waiting and self._dropped and self._waiting[0].first_step <= self._dropped.last:
            self._drop(self._waiting.popleft(), self._dropped.reason)

    def _drop(self, tables: Tables, reason: str) -> None:
        samples = sum(tables.steps.column("sampled").to_pylist())
        self._lose(_Dropped(tables.first_step, tables.last_step, samples, reason))

    def _lose(self, lost: _Dropped) -> None:
        before = self._dropped
        if before is not None:
            first, last = min(before.first, lost.first), max(before.last, lost.last)
            lost = _Dropped(first, last, before.samples + lost.samples, lost.reason)
        self._dropped = lost

    def _tell_dropped(self, step: int) -> None:
        """Say what was dropped, when it is known how much."""
        dropped, self._dropped = self._dropped, None
        if dropped is not None:
            self._warn(step, str(dropped))

    def _warn(self, step: int, text: str) -> None:
        alarm = Alarm("records", "warn", step, text[:TEXT], source="the operating system")
        self._alarms.append(alarm)
        self._untold.append(alarm)


def head_table(sample: StepSample) -> Table:
    """The rows of `columns.HEADS` of a sample: one a head of every call that has statistics."""
    calls = [call for call in sample.calls if call.columns]
    if not calls:
        return stacked("heads", [])

    def column(name: str) -> Numbers:
        missing = ([math.nan] * call.heads for call in calls)
        of_calls = [call.columns.get(name, none) for call, none in zip(calls, missing, strict=True)]
        return np.concatenate([np.asarray(values, dtype=np.float64) for values in of_calls])

    columns: dict[str, Any] = {name: column(name) for name in _STATISTICS if name != "scale_ratio"}
    for name in _COUNTS:
        columns[name] = [None if math.isnan(value) else int(value) for value in columns[name].tolist()]
    ratios = [math.nan if call.scale_ratio is None else call.scale_ratio for call in calls]
    heads = [call.heads for call in calls]
    columns["scale_ratio"] = np.repeat(ratios, heads)
    columns["step"] = np.full(sum(heads), sample.step)
    columns["site"] = [name for call in calls for name in [kept_text(call.site)] * call.heads]
    columns["index"] = np.repeat([call.index for call in calls], heads)
    columns["head"] = np.concatenate([np.arange(count) for count in heads])
    return from_columns("heads", columns)


def kept_text(text: str) -> str:
    """A text as a column takes it: cut, and of characters that UTF-8 has."""
    return text[:TEXT].encode("utf-8", "replace").decode()


def alarm_row(alarm: Alarm) -> dict[str, Any]:
    """The row of `columns.ALARMS` of an alarm."""
    names = ("step", "site", "index", "head", "name", "severity", "value", "bar", "source", "text")
    return {name: kept_text(value) if isinstance(value := getattr(alarm, name), str) else value for name in names}


def numbers(losses: Sequence[Loss]) -> list[float | None]:
    """Losses as numbers; those on one device leave it in one transfer."""
    tensors = [loss.reshape(()).double() for loss in losses if isinstance(loss, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(values) if isinstance(loss, Tensor) else None if loss is None else float(loss) for loss in losses]


def _text_of(error: Exception) -> str:
    """Why something could not be written; an error of the writer names the steps, which its cause does not."""
    cause = error.__cause__ if isinstance(error.__cause__, OutputError) else error
    return str(cause) if isinstance(cause, OutputError) else kind_and_text(cause)
