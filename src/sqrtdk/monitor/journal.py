"""What a watch writes down: rows of its records, several samples at a time, and the losses of all steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sqrtdk.errors import OutputError
from sqrtdk.monitor.columns import HEADS
from sqrtdk.monitor.folder import RunWriter
from sqrtdk.monitor.samples import Alarm, StepSample, not_measured

SAMPLES = 32  # of one part: a part costs a flush of the disk
SECONDS = 30.0  # after which what there is becomes a part
TEXT = 2000  # characters of a text that is kept
_STATISTICS = [column.name for column in HEADS if column.type == "float64" or column.name.endswith("rows")]
_COUNTS = ("rows", "blind_rows", "nan_rows", "inf_rows")
Loss = Tensor | float | None


class Journal:
    """Buffers what was sampled, and writes it in parts; see `columns` for what a row holds.

    Attributes:
        writer: of the folder.
    """

    def __init__(self, folder: str | Path, *, model: Any, settings: Any, first_step: int | None) -> None:
        self.writer = RunWriter(folder, model=model, settings=settings, first_step=first_step)
        self._samples: dict[int, StepSample] = {}
        self._steps: list[tuple[int, Loss, float]] = []
        self._alarms: list[Alarm] = []
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
            try:
                self.flush()
            except OutputError as error:  # a full disk is no reason to end a training run
                if not self._failing:
                    self._alarms.append(alarm := unwritten(error, step))
                    self._untold.append(alarm)
                self._failing = True
        self._steps.append((step, loss, time.time()))

    def sample(self, sample: StepSample, alarms: list[Alarm]) -> list[Alarm]:
        """Note what was sampled.

        Returns:
            The alarm of a part that could not be written, once until one can be; it is tried again after later samples.
        """
        self._samples[sample.step] = sample
        self._alarms += alarms
        self._due = len(self._samples) >= SAMPLES or time.monotonic() - self._flushed >= SECONDS
        untold, self._untold = self._untold, []
        return untold

    def flush(self) -> None:
        """Write what there is."""
        if not self._steps:
            return
        self._flushed = time.monotonic()
        losses = numbers([loss for _, loss, _ in self._steps])
        steps = [self._row(step, loss, at) for (step, _, at), loss in zip(self._steps, losses, strict=True)]
        heads = [row for sample in self._samples.values() for row in head_rows(sample)]
        self.writer.write(heads, steps, [alarm_row(alarm) for alarm in self._alarms])
        self._steps, self._samples, self._alarms, self._failing = [], {}, [], False

    def close(self, alarms: Sequence[Alarm] = ()) -> None:
        """Write what is left, and let go of the folder.

        Args:
            alarms: that came as the watch ended, of its last step; or of the one under way, where no step ended, which
                is recorded with the first of them as what was not measured.

        Raises:
            OutputError: it could not be written.
        """
        try:
            if alarms and not self._steps:
                step = alarms[0].step
                self.step(step, None)
                self.sample(StepSample(step, (), not_measured(alarms[0].text)), [])
            self._alarms += alarms
            self.flush()
        finally:
            self.writer.close()

    def _row(self, step: int, loss: float | None, at: float) -> dict[str, Any]:
        sample = self._samples.get(step)
        row = {"step": step, "sampled": sample is not None, "loss": loss, "time": at}
        if sample is None:
            return row | {"how": None, "calls": 0, "unmeasured": 0}
        return row | {"how": sample.how[:TEXT], "calls": len(sample.measured), "unmeasured": sample.unmeasured}


def head_rows(sample: StepSample) -> list[dict[str, Any]]:
    """The rows of `columns.HEADS` of a sample: one a head of every call that has statistics."""
    rows = []
    for call in sample.calls:
        for head in range(call.heads if call.columns else 0):
            row: dict[str, Any] = {"step": sample.step, "site": call.site, "index": call.index, "head": head}
            for name in _STATISTICS:
                if name in call.columns:
                    value = call.columns[name][head]
                    row[name] = int(value) if name in _COUNTS else None if math.isnan(value) else value
            rows.append(row | {"scale_ratio": call.scale_ratio})
    return rows


def numbers(losses: list[Loss]) -> list[float | None]:
    """Losses as numbers; those on one device leave it in one transfer."""
    tensors = [loss.reshape(()).double() for loss in losses if isinstance(loss, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(values) if isinstance(loss, Tensor) else None if loss is None else float(loss) for loss in losses]


def unwritten(error: OutputError, step: int) -> Alarm:
    """The alarm of a part that could not be written."""
    return Alarm("records", "warn", step, str(error)[:TEXT], "the operating system")


def alarm_row(alarm: Alarm) -> dict[str, Any]:
    """The row of `columns.ALARMS` of an alarm."""
    names = ("step", "site", "index", "head", "name", "severity", "value", "bar", "source", "text")
    return {name: value[:TEXT] if isinstance(value := getattr(alarm, name), str) else value for name in names}
