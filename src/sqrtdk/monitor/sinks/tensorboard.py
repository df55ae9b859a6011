"""TensorBoard: a scalar for each metric, a text for each alarm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqrtdk._extras import load_extra
from sqrtdk.monitor.samples import Alarm


class TensorBoard:
    """Writes event files. A directory can be continued: TensorBoard then hides the steps of earlier attempts from the
    first step written now.

    Args:
        target: a directory, or a `SummaryWriter`, which stays open when the watch ends.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, target: str | Path | Any) -> None:
        own = isinstance(target, str | Path)
        if own:
            load_extra("tensorboard", "tensorboard")
        self._folder = str(target) if own else None
        self._writer: Any = None if own else target

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a scalar for each metric of a step.

        Args:
            step: Number of the step, from 1.
            metrics: Values by name.
        """
        writer = self._open(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def alarm(self, alarm: Alarm) -> None:
        """Add the alarm as a text, under `attention/alarms`."""
        self._open(alarm.step).add_text("attention/alarms", f"{alarm.severity}: {alarm.text}", alarm.step)

    def close(self) -> None:
        """Flush the event file, and close it unless the writer is the user's own."""
        if self._writer is None:
            return
        self._writer.flush()
        if self._folder is not None:
            self._writer.close()
            self._writer = None

    def _open(self, step: int) -> Any:
        if self._writer is None:
            writer = load_extra("torch.utils.tensorboard", "tensorboard").SummaryWriter
            self._writer = writer(self._folder, purge_step=step)
        return self._writer
