"""The record of one run of one claim, as a JSON document: figures, verdict, control, environment, plots as data."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqrtdk import _json
from sqrtdk.errors import InvalidValueError
from sqrtdk.lab.figures import Figure
from sqrtdk.lab.judge import Check, Finding, Verdict
from sqrtdk.lab.plots import Plot, Series
from sqrtdk.lab.text import Text

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of the experiment gave.

    Attributes:
        parameters: with which it ran.
        figures: what was measured.
        verdict: what follows.
    """

    parameters: Mapping[str, Any]
    figures: tuple[Figure, ...]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Record:
    """One claim, measured.

    Attributes:
        id: of the claim.
        group: of the register.
        sources: who makes the claim.
        statement: the claim.
        formula: LaTeX.
        method: how it was measured.
        control_method: what the control turns round.
        why: why the verdict is what it is.
        quick: whether it is the quick run.
        seed: of everything random.
        outcome: of the experiment.
        control: of the experiment with its premise turned round.
        plots: what to draw.
        environment: versions and machine.
        command: that gave the record; empty from Python.
        started: UTC, ISO 8601.
        duration_s: seconds, the control included.
    """

    id: str
    group: str
    sources: tuple[str, ...]
    statement: Text
    formula: str
    method: Text
    control_method: Text
    why: Text
    quick: bool
    seed: int
    outcome: Outcome
    control: Outcome
    plots: tuple[Plot, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    started: str = ""
    duration_s: float = math.nan

    @property
    def sound(self) -> bool:
        """Whether the control, its premise turned round, gave another answer: a judge that cannot say no is none."""
        answer = self.control.verdict.answer
        return answer not in ("undecided", self.outcome.verdict.answer)


def to_json(record: Record) -> str:
    """The record as one JSON document."""
    return _json.document({"schema_version": SCHEMA_VERSION, "sound": record.sound, **dataclasses.asdict(record)})


def read(path: Path) -> Record:
    """Read a record that `to_json` wrote.

    Args:
        path: the file.

    Raises:
        InvalidValueError: it is no record, or one of another schema version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _no_record(path, error) from error
    if version != SCHEMA_VERSION:
        raise InvalidValueError(
            f"{path} is a record of schema version {version}; this version of sqrtdk reads {SCHEMA_VERSION}",
            hint="Run the claim again into another directory, or use the version of sqrtdk that wrote it.",
        )
    try:
        return _record(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_record(path, error) from error


def _no_record(path: Path, error: Exception) -> InvalidValueError:
    return InvalidValueError(
        f"{path} is not a record of a claim: {type(error).__name__}: {error}",
        hint="Delete the file and run the claim again.",
    )


def _record(data: Mapping[str, Any]) -> Record:
    words = ("id", "group", "formula", "command", "started")
    texts = ("statement", "method", "control_method", "why")
    named: dict[str, Any] = {name: str(data[name]) for name in words} | {name: _text(data[name]) for name in texts}
    return Record(
        **named,
        sources=tuple(map(str, data["sources"])),
        quick=bool(data["quick"]),
        seed=int(data["seed"]),
        outcome=_outcome(data["outcome"]),
        control=_outcome(data["control"]),
        plots=tuple(map(_plot, data["plots"])),
        environment={str(key): str(value) for key, value in data["environment"].items()},
        duration_s=_number(data["duration_s"]),
    )


def _outcome(data: Mapping[str, Any]) -> Outcome:
    verdict = data["verdict"]
    return Outcome(
        parameters=dict(data["parameters"]),
        figures=tuple(map(_figure, data["figures"])),
        verdict=Verdict(verdict["answer"], tuple(map(_finding, verdict["findings"]))),
    )


def _finding(data: Mapping[str, Any]) -> Finding:
    checks = tuple(
        Check(_figure(check["figure"]), _number(check["low"]), _number(check["high"]), check["met"])
        for check in data["checks"]
    )
    return Finding(_text(data["text"]), checks, data["met"])


def _figure(data: Mapping[str, Any]) -> Figure:
    numbers = {name: _number(data[name]) for name in ("value", "low", "high")}
    return Figure(
        str(data["name"]), **numbers, method=data["method"], samples=int(data["samples"]), at=dict(data["at"])
    )


def _plot(data: Mapping[str, Any]) -> Plot:
    words = ("name", "x_label", "y_label", "x_axis", "y_axis")
    return Plot(
        **{name: data[name] for name in words},
        caption=_text(data["caption"]),
        series=tuple(map(_series, data["series"])),
        lines=tuple((str(label), _number(y)) for label, y in data["lines"]),
    )


def _series(data: Mapping[str, Any]) -> Series:
    named = data["style"] == "bars"
    return Series(
        label=str(data["label"]),
        x=tuple(map(str, data["x"])) if named else tuple(map(_number, data["x"])),
        y=tuple(map(_number, data["y"])),
        low=tuple(map(_number, data["low"])),
        high=tuple(map(_number, data["high"])),
        style=data["style"],
    )


def _text(data: Mapping[str, str]) -> Text:
    return Text(str(data["en"]), str(data["zh"]))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
