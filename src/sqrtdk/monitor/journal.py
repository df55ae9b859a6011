"""The journal of a watch: rows of its records, several samples at a time, and the losses of all steps.

A failure here never ends a training run: it becomes an alarm. Rows that can't be written wait, in pieces of the size of
a part, and are tried again with later samples. Beyond `WAITING_BYTES` the oldest piece is dropped, counted and named.
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
from torch import Tensor, nn

from sqrtdk.errors import OutputError, kind_and_text
from sqrtdk.messages import Message
from sqrtdk.monitor.columns import HEAD_COLUMNS
from sqrtdk.monitor.folder import RunWriter
from sqrtdk.monitor.rows import RECORDED_CHARACTERS, alarm_row, how_row, stored_text
from sqrtdk.monitor.samples import Alarm, StepSample, not_measured
from sqrtdk.monitor.tables import PART_BYTES, Numbers, Table, Tables, from_columns, stacked, tables_from_rows

SAMPLES_A_PART = 32  # samples of one part, because each part costs a disk flush
STEPS_A_PART = 2**13  # the same for steps, if few of them are sampled
SECONDS = 30.0  # age of the oldest unwritten row that makes a part due
WAITING_BYTES = 2**26  # unpacked rows that wait for the disk, of about 200,000 heads
_STATISTICS = [column.name for column in HEAD_COLUMNS if column.type == "float64" or column.name.endswith("rows")]
_COUNTS = ("rows", "blind_rows", "nan_rows", "inf_rows")
# these may pass, as a full disk may be free later; other errors would recur
_PASSING_ERRORS = (OutputError, OSError, MemoryError)
_BLANK_STEP = {"how": None, "message_id": None, "values": None, "calls": 0, "unmeasured": 0}
Loss = Tensor | float | None


@dataclass(frozen=True, slots=True)
class _Dropped:
    """Steps that will never be written, the number of sampled ones among them, and the reason."""

    first: int
    last: int
    samples: int
    reason: str

    def message(self) -> str:
        """Say so."""
        first, last = self.first, self.last
        return Message("alarms.records.dropped", first=first, last=last, samples=self.samples, reason=self.reason)


class Journal:
    """Buffers samples, and writes them in parts; see `columns` for the contents of a row.

    Attributes:
        writer: writer of the folder.
    """

    def __init__(self, folder: str | Path, *, model: Any, settings: Any, first_step: int | None) -> None:
        self.writer = RunWriter(folder, model=model, settings=settings, first_step=first_step)
        self._steps: list[tuple[int, Loss, float]] = []
        self._samples: dict[int, dict[str, Any]] = {}  # what only a sampled step has of `STEP_COLUMNS`
        self._heads: list[Table] = []
        self._bytes = 0  # size of `_heads`
        self._alarms: list[Alarm] = []
        self._waiting: deque[Tables] = deque()
        self._dropped: _Dropped | None = None
        self._newest: int | None = None  # newest step that was noted
        self._failing = self._due = False
        self._unreported: list[Alarm] = []
        self._flushed = time.monotonic()

    @property
    def next_step(self) -> int:
        """Number of the step that is recorded next; the first step is 1."""
        return max(1, self.writer.first_step)

    def step(self, step: int, loss: Loss) -> None:
        """Record a step and its loss; write the steps before it if enough of them wait.

        The newest step is held back, so that an alarm raised when the watch ends is in the same part as its step.

        Args:
            step: Number of the step.
            loss: Its loss; a tensor is transferred only when it is written. None if there is none.
        """
        if self._due:
            self._due = False
            self._write(step)
        self._steps.append((step, loss, time.time()))
        self._newest = step
        self._due = len(self._steps) >= STEPS_A_PART

    def sample(self, sample: StepSample, alarms: Sequence[Alarm]) -> list[Alarm]:
        """Record the statistics of a sampled step, and its alarms.

        Returns:
            An alarm if a part could not be written; the next one comes only after a write that succeeded. The part is
            tried again with later samples.
        """
        try:
            self._heads.append(table := head_table(sample))
            self._bytes += table.nbytes
        except Exception as error:  # an observer never stops the run
            text = Message("alarms.records.heads", step=sample.step, error=kind_and_text(error))
            self._warn(sample.step, text)
        counts = {"calls": len(sample.measured), "unmeasured": sample.unmeasured}
        update = {"learning_rate": sample.learning_rate, "relative_step": sample.relative_step}
        self._samples[sample.step] = how_row(sample.how) | counts | update
        self._alarms += alarms
        full = len(self._samples) >= SAMPLES_A_PART or self._bytes >= PART_BYTES // 2
        # the first sample shows that the run is watched; an alarm may be the last thing before the run is killed
        self._due = self._due or full or not (self.writer.parts or self._failing) or bool(alarms)
        self._due = self._due or time.monotonic() - self._flushed >= SECONDS
        return self.unreported()

    def note(self, alarms: Sequence[Alarm]) -> None:
        """Record alarms that came after the sample of their step, or at a step without a sample."""
        self._alarms += alarms
        self._due = self._due or bool(alarms)

    def unreported(self) -> list[Alarm]:
        """Return the failures since the last call, as alarms."""
        unreported, self._unreported = self._unreported, []
        return unreported

    def flush(self) -> bool:
        """Write all rows, including the newest step; a failure becomes an alarm.

        Returns:
            Whether everything is on disk.
        """
        return self._newest is None or (self._write(self._newest) is None and not self._unreported)

    def close(self, alarms: Sequence[Alarm] = ()) -> list[Alarm]:
        """Write the remaining rows, and release the folder.

        Args:
            alarms: alarms raised when the watch ended, of its last step. If no step ended, they belong to the current
                one, which is recorded as not measured with the first alarm as its reason.

        Returns:
            Alarms for what could not be written.
        """
        try:
            if alarms and self._newest is None:
                step = alarms[0].step
                self.step(step, None)
                self.sample(StepSample(step, (), not_measured(alarms[0].text)), [])
            self._alarms += alarms
            if self._newest is not None:
                self._failing = True  # the error below covers everything that is left
                error = self._write(self._newest)
                if error is None and self._alarms:  # alarms about rows that were dropped before
                    error = self._write(self._newest)
                while error is not None and self._waiting:
                    self._drop(self._waiting.popleft(), _text_of(error))
                self._tell_dropped(self._newest)
        except Exception as error:  # training is over, and its result must not be lost because of records
            self._warn(self._newest or 1, Message("alarms.records.last_steps", error=kind_and_text(error)))
        finally:
            self.writer.close()
        return self.unreported()

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self, step: int) -> Exception | None:
        """Write all buffered rows to disk. If that fails, keep them, and record an alarm at `step`.

        Returns:
            The error that left rows waiting; None if nothing waits.
        """
        self._flushed = time.monotonic()
        try:
            self._gather()
            while self._waiting:
                self._write_first()
        except Exception as error:
            if not self._failing:
                self._warn(step, error.message if isinstance(error, OutputError) else kind_and_text(error))
            self._failing = True
            self._bound(step)
            return error
        self._failing = False
        self._tell_dropped(step)
        return None

    def _write_first(self) -> None:
        """Write the oldest piece once; it leaves the queue as soon as the writer has it."""
        tables, before = self._waiting[0], self.writer.parts
        try:
            self.writer.write(tables.heads, tables.steps, tables.alarms)
        except BaseException as error:
            if self.writer.parts > before:
                self._waiting.popleft()
            elif isinstance(error, Exception) and not isinstance(error, _PASSING_ERRORS):
                self._drop(self._waiting.popleft(), _text_of(error))
                return
            raise
        self._waiting.popleft()

    def _gather(self) -> None:
        """Move the noted rows into the queue, in pieces of the size of a part."""
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
                {"step": number, "sampled": number in samples, "loss": loss, "time": at}
                | samples.get(number, _BLANK_STEP)
                for (number, _, at), loss in zip(steps, self._losses(steps), strict=True)
            ]
            # an alarm of a step that was written already is recorded at the next step
            alarms = [alarm if alarm.step in known else replace(alarm, step=first) for alarm in alarms]
            tables = tables_from_rows(stacked("heads", heads), rows, [alarm_row(alarm) for alarm in alarms])
            self._waiting += tables.pieces()
        except Exception as error:
            self._lose(_Dropped(first, last, len(samples), kind_and_text(error)))

    def _losses(self, steps: list[tuple[int, Loss, float]]) -> list[float | None]:
        try:
            return numbers([loss for _, loss, _ in steps])
        except Exception as error:
            first, last = steps[0][0], steps[-1][0]
            text = Message("alarms.records.losses", first=first, last=last, error=kind_and_text(error))
            self._warn(last, text)
            return [None] * len(steps)

    def _bound(self, step: int) -> None:
        """Drop the oldest pieces if more than `WAITING_BYTES` wait."""
        waiting = sum(tables.nbytes for tables in self._waiting)
        while waiting > WAITING_BYTES:
            tables = self._waiting.popleft()
            waiting -= tables.nbytes
            limit = Message("alarms.records.most_waiting", size=f"{WAITING_BYTES / 2**20:.3g}")
            if self._dropped is None:
                self._warn(step, Message("alarms.records.dropping", first=tables.first_step, reason=limit))
            self._drop(tables, limit)
        # a step larger than a part waits in several pieces: if the first was dropped, drop the others and the one with
        # the step's row too, or the step would look complete
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
        """Report the dropped rows, once their number is known."""
        dropped, self._dropped = self._dropped, None
        if dropped is not None:
            self._warn(step, dropped.message())

    def _warn(self, step: int, text: str) -> None:
        text = text if len(text) <= RECORDED_CHARACTERS else text[:RECORDED_CHARACTERS]  # a cut message is a plain text
        alarm = Alarm("records", "warn", step, text, source=Message("alarms.source.system"))
        self._alarms.append(alarm)
        self._unreported.append(alarm)


def head_table(sample: StepSample) -> Table:
    """Return the statistics of a sample as a table with the columns `HEAD_COLUMNS`, one row for each head of each call.

    Calls without statistics have no rows; a statistic that was not measured is NaN.
    """
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
    columns["site"] = [name for call in calls for name in [stored_text(call.site)] * call.heads]
    columns["index"] = np.repeat([call.index for call in calls], heads)
    columns["head"] = np.concatenate([np.arange(count) for count in heads])
    return from_columns("heads", columns)


def numbers(losses: Sequence[Loss]) -> list[float | None]:
    """Return losses as Python floats; None stays None.

    The tensors are stacked first, so that a GPU is waited for once. They must be on one device.
    """
    tensors = [loss.reshape(()).double() for loss in losses if isinstance(loss, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(values) if isinstance(loss, Tensor) else None if loss is None else float(loss) for loss in losses]


def _text_of(error: Exception) -> str:
    """Return why something could not be written. An error of the writer names the steps, its cause does not."""
    cause = error.__cause__ if isinstance(error.__cause__, OutputError) else error
    return cause.message if isinstance(cause, OutputError) else kind_and_text(cause)


def model_facts(model: nn.Module) -> dict[str, object]:
    """Return the class and the size of a model: a folder's records can't be continued with another model's."""
    return {"class": type(model).__name__, "parameters": sum(parameter.numel() for parameter in model.parameters())}
