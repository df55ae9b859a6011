"""Weights & Biases, offline by default: metrics against their own step, `attention/step`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from sqrtdk._extras import load_extra
from sqrtdk.monitor.samples import Alarm

_WANDB_LEVELS = {"note": "INFO", "warn": "WARN", "fail": "ERROR", "critical": "ERROR"}


class WeightsAndBiases:
    """Logs to a run, without its global step, so that the training loop may log to the same run.

    A run of its own begins at the first metrics. Its records stay on disk until `wandb sync`; a continued run is
    another directory with the same id, and the sync joins the two.

    Args:
        target: a project, or a run of `wandb.init`, which stays open when the watch ends.
        run: name and id of the run; None: a new one.
        arguments: for `wandb.init`; they override all others.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, target: str | Any = "sqrtdk", *, run: str | None = None, **arguments: Any) -> None:
        own = isinstance(target, str)
        self._arguments: dict[str, Any] | None = None
        self._run: Any = None if own else target
        if own:
            load_extra("wandb", "wandb")
            named = {} if run is None else {"name": run, "id": re.sub(r"[/\\#?%:]", "-", run), "resume": "allow"}
            mode = os.environ.get("WANDB_MODE", "offline")
            self._arguments = {"project": target, "mode": mode, "reinit": "create_new", **named, **arguments}
        else:
            _define(target)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, with the step itself as `attention/step`.

        Args:
            step: Number of the step, from 1.
            metrics: Values by name.
        """
        self._open().log({"attention/step": step, **metrics})

    def alarm(self, alarm: Alarm) -> None:
        """Send an alert for an alarm that is a warning or worse; notes are not sent."""
        if alarm.severity != "note":
            self._open().alert(title=f"attention: {alarm.name}", text=alarm.text, level=_WANDB_LEVELS[alarm.severity])

    def close(self) -> None:
        """Finish the run, unless the user's own run is used."""
        if self._arguments is not None and self._run is not None:
            self._run.finish()
            self._run = None

    def _open(self) -> Any:
        if self._run is None:
            self._run = load_extra("wandb", "wandb").init(**self._arguments or {})
            _define(self._run)
        return self._run


def _define(run: Any) -> None:
    run.define_metric("attention/step", hidden=True)
    run.define_metric("attention/*", step_metric="attention/step")
