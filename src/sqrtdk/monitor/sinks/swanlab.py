"""SwanLab, in a directory, for `swanlab sync`; mode="local", for its own page, needs `swanlab[dashboard]` besides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqrtdk._extras import load_extra
from sqrtdk.monitor.samples import Alarm


class SwanLab:
    """Logs to a run. A continued run is another directory with the same id.

    Args:
        target: a directory, or a run of `swanlab.init`, which stays open when the watch ends. SwanLab has one run per
            process: if the loop has one, pass it.
        run: name and id of the run; None: a new one.
        arguments: for `swanlab.init`; they override all others. The default is mode="offline".

    Raises:
        MissingExtraError: swanlab is not installed.
    """

    def __init__(self, target: str | Path | Any, *, run: str | None = None, **arguments: Any) -> None:
        own = isinstance(target, str | Path)
        if own:
            load_extra("swanlab", "swanlab")
        named = {} if run is None else {"name": run, "id": re.sub(r"\W", "-", run, flags=re.ASCII), "resume": "allow"}
        plain = {"project": "attention", "mode": "offline", "log_dir": str(target)}
        self._arguments: dict[str, Any] | None = {**plain, **named, **arguments} if own else None
        self._run: Any = None if own else target

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step.

        Args:
            step: Number of the step, from 1.
            metrics: Values by name.
        """
        self._open().log(dict(metrics), step=step)

    def alarm(self, alarm: Alarm) -> None:
        """Log the alarm as a text, under `attention/alarms/<name>`."""
        text = load_extra("swanlab", "swanlab").Text(f"{alarm.severity}: {alarm.text}")
        self._open().log({f"attention/alarms/{alarm.name}": text}, step=alarm.step)

    def close(self) -> None:
        """Finish the run, unless the user's own run is used."""
        if self._arguments is not None and self._run is not None:
            self._run.finish()
            self._run = None

    def _open(self) -> Any:
        if self._run is None:
            folder = self._arguments.get("log_dir") if self._arguments else None
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
            self._run = load_extra("swanlab", "swanlab").init(**self._arguments or {})
        return self._run
