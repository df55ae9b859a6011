"""The loggers that a watch reports to beside its folder: one per file, each imported on first use.

A sink is any object with three methods, `write`, `alarm` and `close`; `SINKS` names the built-in ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, runtime_checkable
from zlib import crc32

from torch import distributed

from sqrtdk.errors import InvalidTypeError, InvalidValueError, kind_and_text
from sqrtdk.messages import Message
from sqrtdk.monitor.metrics import metrics_of
from sqrtdk.monitor.samples import Alarm, StepSample

ERROR_CHARACTERS = 400  # shown characters of a logger's error


@runtime_checkable
class Sink(Protocol):
    """A logger that a watch reports to.

    If a method raises, the watch reports the error as one alarm, and the training goes on.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a sampled step.

        Args:
            step: Number of the step, from 1.
            metrics: Values by name, as "attention/calls"; `sqrtdk.monitor.metrics` lists the names.
        """

    def alarm(self, alarm: Alarm) -> None:
        """Log an alarm; the metrics of its step were logged before.

        Args:
            alarm: The alarm, with its step, severity, place and text.
        """

    def close(self) -> None:
        """End the run of the logger; nothing is logged afterwards."""


AnySink = str | Sink | Callable[[int, Mapping[str, float]], object]
# name -> (module, class, what follows the colon)
SINKS: Mapping[str, tuple[str, str, str]] = {
    "jsonl": ("jsonl", "JsonLines", "a file"),
    "mlflow": ("mlflow", "MLflow", "a database, as sqlite:///runs/mlflow.db"),
    "swanlab": ("swanlab", "SwanLab", "a directory"),
    "tensorboard": ("tensorboard", "TensorBoard", "a directory"),
    "trackio": ("trackio", "Trackio", "a project"),
    "wandb": ("wandb", "WeightsAndBiases", "a project"),
}
# loggers that keep runs of their own: they resume the run of the same name
NAMED_RUNS = ("mlflow", "swanlab", "trackio", "wandb")


def sink_of(sink: AnySink, run: str | None = None) -> Sink:
    """Return the sink for a name or a function.

    Args:
        sink: "tensorboard:runs/tb", "jsonl:attention.jsonl", "wandb:project", ...; a sink; or a function of the step
            and its metrics.
        run: name of the run, for loggers that keep runs of their own.

    Raises:
        InvalidValueError: The name is not in `SINKS`, or lacks its argument.
        InvalidTypeError: It is not a sink at all.
        MissingExtraError: The logger is not installed.

    Example:
        >>> written = []
        >>> sink_of(lambda step, metrics: written.append((step, len(metrics)))).write(3, {"attention/calls": 2.0})
        >>> written
        [(3, 1)]
    """
    if isinstance(sink, str):
        name, _, argument = sink.partition(":")
        if name not in SINKS or not argument:
            wants = SINKS[name][2] if name in SINKS else None
            raise InvalidValueError(
                f"{sink!r} is no sink: {f'after {name}: comes {wants}' if wants else 'its name is not known'}",
                hint="Names: " + ", ".join(f"{known}:{entry[2]}" for known, entry in SINKS.items()) + ".",
            )
        module, kind, _ = SINKS[name]
        made = getattr(import_module(f"{__name__}.{module}"), kind)
        return made(argument, **({"run": run} if name in NAMED_RUNS else {}))  # type: ignore[no-any-return]
    if isinstance(sink, Sink):
        return sink
    if callable(sink):
        return FunctionSink(sink)
    raise InvalidTypeError(
        f"a sink is a name, a function, or an object with write, alarm and close; got {type(sink).__name__}",
        hint='Pass sinks=["tensorboard:runs/tb"].',
    )


def run_name(folder: str | Path | None) -> str | None:
    """Return the name of a folder's run, for loggers that keep runs of their own: the same for the same folder.

    Example:
        >>> run_name("/runs/exp1")
        'exp1-5a6cf39b'
    """
    if folder is None:
        return None
    path = Path(folder).resolve()
    return f"{path.name}-{crc32(str(path).encode()):08x}"


class Sinks:
    """Several sinks. The first error of each becomes an alarm, and the others go on.

    In a group of processes, only rank 0 reports.
    """

    def __init__(self, sinks: Sequence[AnySink], run: str | None = None) -> None:
        if isinstance(sinks, str) or not isinstance(sinks, Sequence):
            raise InvalidTypeError(
                f"sinks is a list of sinks, got {sinks!r}", hint='Pass sinks=["tensorboard:runs/tb"].'
            )
        self._sinks = [sink_of(sink, run) for sink in sinks]
        self._failed: set[int] = set()

    def sample(self, sample: StepSample, alarms: Sequence[Alarm]) -> list[Alarm]:
        """Report a sampled step and its alarms.

        Returns:
            One alarm for each sink that failed for the first time.
        """
        if not self._sinks or _rank():
            return []
        metrics: dict[str, float] = {}

        def report(sink: Sink) -> None:
            if not metrics:
                metrics.update(metrics_of(sample))
            sink.write(sample.step, metrics)
            for alarm in alarms:
                sink.alarm(alarm)

        return self._each(report, sample.step)

    def alarm(self, alarm: Alarm) -> list[Alarm]:
        """Report to all loggers an alarm that came after the sample of its step.

        Returns:
            An alarm for each logger that failed for the first time.
        """
        return [] if _rank() else self._each(lambda sink: sink.alarm(alarm), alarm.step)

    def close(self, step: int) -> list[Alarm]:
        """Close all loggers after a step.

        Returns:
            An alarm for each logger that failed for the first time.
        """
        return self._each(lambda sink: sink.close(), step)

    def _each(self, act: Callable[[Sink], None], step: int) -> list[Alarm]:
        failed = []
        for number, sink in enumerate(self._sinks):
            try:
                act(sink)
            except Exception as error:  # a logger is no reason to end a training run
                if number not in self._failed:
                    self._failed.add(number)
                    name, why = type(sink).__name__, kind_and_text(error, ERROR_CHARACTERS)
                    text = Message("alarms.failed.sink", sink=name, step=step, error=why)
                    failed.append(Alarm("sink", "warn", step, text, Message("alarms.source.logger")))
        return failed


def _rank() -> int:
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


class FunctionSink:
    """Calls `function(step, metrics)` at each sampled step; for alarms, use the watch's `on_alarm`.

    Args:
        function: its return value is ignored.
    """

    def __init__(self, function: Callable[[int, Mapping[str, float]], object]) -> None:
        self._function = function

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call the function with the step and a copy of the metrics.

        Args:
            step: Number of the step, from 1.
            metrics: Values by name.
        """
        self._function(step, dict(metrics))

    def alarm(self, alarm: Alarm) -> None:
        """Do nothing: the function receives metrics alone."""

    def close(self) -> None:
        """Do nothing: a function has nothing to close."""
