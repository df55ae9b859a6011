"""trackio: a local database, in its own directory or in `TRACKIO_DIR`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqrtdk._extras import load_extra
from sqrtdk.monitor.samples import Alarm

_TRACKIO_LEVELS = {"note": "INFO", "warn": "WARN", "fail": "ERROR", "critical": "ERROR"}


class Trackio:
    """Logs to a run. An existing run of the same name is continued; steps that it already has are not logged again.

    Args:
        target: a project, or a run of `trackio.init`, which stays open when the watch ends. trackio keeps one current
            run per process: if the loop has one, pass it.
        run: name of the run; None: a new one.
        arguments: for `trackio.init`; they override all others.

    Raises:
        MissingExtraError: trackio is not installed.
    """

    def __init__(self, target: str | Any = "sqrtdk", *, run: str | None = None, **arguments: Any) -> None:
        own = isinstance(target, str)
        if own:
            load_extra("trackio", "trackio")
        named = {} if run is None else {"name": run, "resume": "allow"}
        plain = {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False}
        self._arguments: dict[str, Any] | None = {"project": target, **plain, **named, **arguments} if own else None
        self._run: Any = None if own else target
        self._last: int | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step; a step that is logged already, as after a restart, is skipped.

        Args:
            step: Number of the step, from 1.
            metrics: Values by name.
        """
        run = self._open()
        if self._last is None or step > self._last:
            run.log(dict(metrics), step=step)

    def alarm(self, alarm: Alarm) -> None:
        """Send an alert, with the level that fits the alarm's severity."""
        level = load_extra("trackio", "trackio").AlertLevel[_TRACKIO_LEVELS[alarm.severity]]
        self._open().alert(title=f"attention: {alarm.name}", text=alarm.text, level=level)

    def close(self) -> None:
        """Finish the run, unless the user's own run is used."""
        if self._arguments is not None and self._run is not None:
            self._run.finish()
            self._run = None

    def _open(self) -> Any:
        if self._run is None:
            self._run = load_extra("trackio", "trackio").init(**self._arguments or {})
            storage = load_extra("trackio.sqlite_storage", "trackio").SQLiteStorage
            self._last = storage.get_max_step_for_run(self._run.project, self._run.name)
        return self._run
