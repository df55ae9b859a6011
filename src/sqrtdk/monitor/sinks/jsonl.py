"""JSON lines: a line for each sampled step, and one for each alarm.

    {"step": 100, "metrics": {"attention/worst/max_attention_logit": 12.5, ...}}
    {"step": 100, "alarm": {"name": "max_logit", "severity": "warn", ...}}

An infinite number is written as the text "Infinity" or "-Infinity". An existing file is continued. If it reaches beyond
the first step written now, as after a return to a checkpoint, it is cut there, so that no step is in it twice.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from sqrtdk import _json
from sqrtdk.errors import OutputError
from sqrtdk.messages import fields
from sqrtdk.monitor.samples import Alarm

_STEP_LINE_START = b'{"step": '


class JsonLines:
    """Writes to a file; each line is one write to the system, so that concurrent readers see whole lines.

    Args:
        path: of the file; its directory is made if missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: BinaryIO | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a line with the step and its metrics.

        Args:
            step: Number of the step, from 1.
            metrics: Values by name.

        Raises:
            OutputError: The existing file was not written by this logger, or it can't be written.
        """
        self._add(step, "metrics", dict(metrics))

    def alarm(self, alarm: Alarm) -> None:
        """Add a line with the alarm's fields, and the `message_id` and `values` of its sentence."""
        content = {name: value for name, value in asdict(alarm).items() if name != "step"}
        self._add(alarm.step, "alarm", content | fields(alarm.text))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _add(self, step: int, kind: str, content: dict[str, Any]) -> None:
        line = json.dumps(_json.plain_data({"step": step, kind: content}), allow_nan=False) + "\n"
        try:
            if self._file is None:
                self._file = self._opened(step)
            if self._file.write(line.encode()) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.close()  # when it is opened again, an incomplete line is cut off
            if isinstance(error, OutputError):
                raise
            raise OutputError(f"cannot write {self.path}: {error.strerror}", hint="Choose another file.") from error

    def _opened(self, step: int) -> BinaryIO:
        """Open the file, cut before the first line of `step` or later, and before an incomplete last line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+b", buffering=0)
        try:
            file.seek(0)
            size, cut = 0, False
            for line in file.readlines():
                if not line.startswith(_STEP_LINE_START[: len(line)]):
                    raise OutputError(
                        f"{self.path} holds something else, from byte {size} on", hint="Choose another file."
                    )
                whole = line.endswith(b"\n")
                if cut or not whole or int(line[len(_STEP_LINE_START) :].partition(b",")[0]) >= step:
                    cut = True
                size += 0 if cut else len(line)
            file.truncate(size)
        except BaseException:
            file.close()
            raise
        return file
