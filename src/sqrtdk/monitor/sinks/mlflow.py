"""MLflow, into a database: it no longer writes its plain files, so a directory is refused."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from sqrtdk._extras import load_extra
from sqrtdk.errors import InvalidValueError
from sqrtdk.monitor.samples import Alarm

TAG = "sqrtdk.run"  # by which an existing run is found again
MARKER_METRIC = "attention/calls"  # the metric that every sample has
_METRICS_A_CALL = 1000  # metrics that MLflow takes at once
_TAG_CHARACTERS = 5000  # characters that MLflow takes in a tag


class MLflow:
    """Logs to a run of its own, and leaves MLflow's active run as it is.

    An existing run of the same name is continued. Steps that it already has are not logged again, as MLflow would keep
    both. An infinite value becomes the largest number of the database.

    Args:
        uri: "sqlite:///runs/mlflow.db", or a server, "http://...".
        run: name of the run; None: a new one.
        experiment: its name.

    Raises:
        MissingExtraError: mlflow is not installed.
        InvalidValueError: `uri` is a directory.
    """

    def __init__(self, uri: str, *, run: str | None = None, experiment: str = "attention") -> None:
        if "://" not in uri or uri.startswith("file:"):
            raise InvalidValueError(
                f"MLflow writes to a database or a server; {uri!r} is a directory",
                hint=f"Pass mlflow:sqlite:///{uri.removeprefix('file:').strip('/') or 'runs'}/mlflow.db",
            )
        load_extra("mlflow", "mlflow")
        self._uri, self._name, self._experiment = uri, run, experiment
        self._client: Any = None
        self._run = ""
        self._last = -math.inf

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step; a step that is logged already, as after a restart, is skipped.

        Args:
            step: Number of the step, from 1.
            metrics: Values by name.
        """
        client = self._open()
        if step <= self._last:
            return
        entities, now = load_extra("mlflow.entities", "mlflow"), int(time.time() * 1000)
        rows = [entities.Metric(name, value, now, step) for name, value in metrics.items()]
        rows.sort(key=lambda row: row.key == MARKER_METRIC)  # last, so that a step with this metric is complete
        for at in range(0, len(rows), _METRICS_A_CALL):
            client.log_batch(self._run, metrics=rows[at : at + _METRICS_A_CALL])

    def alarm(self, alarm: Alarm) -> None:
        """Set the tag `attention.alarm.<step>.<name>` of the run; MLflow has no alerts."""
        self._open().set_tag(
            self._run, f"attention.alarm.{alarm.step}.{alarm.name}", f"{alarm.severity}: {alarm.text}"[:_TAG_CHARACTERS]
        )

    def close(self) -> None:
        """Mark the run as terminated; a second call does nothing."""
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._run)

    def _open(self) -> Any:
        """Return the client; the first call finds the run of this name, or creates it."""
        if self._client is None:
            client = load_extra("mlflow", "mlflow").MlflowClient(tracking_uri=self._uri)
            there = client.get_experiment_by_name(self._experiment)
            experiment = client.create_experiment(self._experiment) if there is None else there.experiment_id
            runs = []
            if self._name is not None:
                quoted = self._name.replace("'", "")
                runs = client.search_runs([experiment], f"tags.`{TAG}` = '{quoted}'", max_results=1)
            if runs:
                self._run = runs[0].info.run_id
                client.update_run(self._run, status="RUNNING")
                steps = [metric.step for metric in client.get_metric_history(self._run, MARKER_METRIC)]
                self._last = max(steps, default=-math.inf)
            else:
                tags = {} if self._name is None else {TAG: self._name.replace("'", "")}
                self._run = client.create_run(experiment, run_name=self._name, tags=tags).info.run_id
            self._client = client
        return self._client
