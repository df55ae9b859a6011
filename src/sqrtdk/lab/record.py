"""The record of one run of one claim, as a JSON document: figures, verdict, control, environment, plots as data."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

from sqrtdk import _json
from sqrtdk._shown import Saved, Shown
from sqrtdk.errors import InvalidValueError, kind_and_text
from sqrtdk.lab.figures import LEVEL, Axis, Figure, Method, Place, Plot, Series, Style
from sqrtdk.lab.judge import Answer, Check, PartAnswer, Verdict
from sqrtdk.messages import Text

SCHEMA_VERSION = 2
Doubt = Literal["same", "undecided"]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run of the experiment.

    Attributes:
        parameters: of the run.
        figures: the measured figures.
        verdict: the answer that follows.
    """

    parameters: Mapping[str, Any]
    figures: tuple[Figure, ...]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Record(Saved, Shown):
    """One claim, measured.

    Attributes:
        id: of the claim.
        group: of the register.
        sources: explanations and papers that make the claim.
        statement: the claim.
        formula: LaTeX.
        method: how it was measured.
        control_method: the premise that the control reverses.
        why: the reason for the verdict.
        condition: what the verdict depends on, in one sentence; None for a verdict other than `depends`.
        quick: whether it is the quick run.
        seed: of all randomness.
        outcome: of the experiment.
        control: of the experiment with its premise reversed.
        plots: as data.
        environment: versions and machine.
        command: the command that made the record; empty from Python.
        started: UTC, ISO 8601.
        duration_s: seconds that this run took, including the control; reused training runs count as none.
        level: confidence of its intervals, 0 to 1.
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
    condition: Text | None = None
    plots: tuple[Plot, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    started: str = ""
    duration_s: float = math.nan
    level: float = LEVEL

    def __repr__(self) -> str:
        size = "quick" if self.quick else "full"
        return f"Record({self.id!r}, {self.outcome.verdict.answer}; {size}, seed {self.seed}; {self.statement.en!r})"

    @property
    def doubt(self) -> Doubt | None:
        """The flaw of the control: its verdict equals the claim's, or is undecided. None if it is a different one."""
        answer = self.control.verdict.answer
        if answer == "undecided":
            return "undecided"
        return "same" if answer == self.outcome.verdict.answer else None

    @property
    def sound(self) -> bool:
        """Whether the control, with its premise reversed, gave another answer; a judge that can't say no is
        worthless."""
        return self.doubt is None

    @property
    def decided(self) -> bool:
        """Whether every part of experiment and control has an answer, and there is at least one part."""
        parts = [one.verdict.findings for one in (self.outcome, self.control)]
        return all(parts) and all(part.met is not None for findings in parts for part in findings)


def to_json(record: Record) -> str:
    """Return the record as one JSON document."""
    derived = {"schema_version": SCHEMA_VERSION, "sound": record.sound, "decided": record.decided}
    return _json.document(derived | dataclasses.asdict(record))


def read(path: Path) -> Record:
    """Read a record that `to_json` wrote.

    Args:
        path: the file.

    Raises:
        InvalidValueError: It is no record, has another schema version, or holds a value that no record has.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data["schema_version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _no_record(path, error) from error
    if version != SCHEMA_VERSION:
        raise InvalidValueError(
            f"{path} is a record of schema version {version}; this version of sqrtdk reads {SCHEMA_VERSION}",
            hint="Run the claim again into another directory, or use the version of sqrtdk that wrote it.",
        )
    try:
        return _record(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _no_record(path, error) from error


def _no_record(path: Path, error: Exception) -> InvalidValueError:
    return InvalidValueError(
        f"{path} is not a record of a claim: {kind_and_text(error)}",
        hint="Delete the file and run the claim again.",
    )


def _record(data: Mapping[str, Any]) -> Record:
    words = ("id", "group", "formula", "command", "started")
    texts = ("statement", "method", "control_method", "why")
    named: dict[str, Any] = {name: _word(data[name]) for name in words} | {name: _text(data[name]) for name in texts}
    level = _number(data["level"])
    if not 0 < level < 1:
        raise ValueError(f"level is between 0 and 1; got {level}")
    return Record(
        **named,
        sources=_all(_word, data["sources"]),
        quick=_one_of((True, False), data["quick"]),
        seed=_whole(data["seed"], 0),
        outcome=_outcome(data["outcome"]),
        control=_outcome(data["control"]),
        condition=None if data["condition"] is None else _text(data["condition"]),
        plots=_all(_plot, data["plots"]),
        environment={str(key): _word(value) for key, value in data["environment"].items()},
        duration_s=_number(data["duration_s"]),
        level=level,
    )


def _outcome(data: Mapping[str, Any]) -> Outcome:
    verdict = data["verdict"]
    answer, findings = _one_of(get_args(Answer), verdict["answer"]), _all(_finding, verdict["findings"])
    if answer != "undecided" and not (findings and all(finding.checks for finding in findings)):
        raise ValueError(f"the verdict {answer!r} rests on no figure")
    return Outcome(
        parameters=dict(data["parameters"].items()),
        figures=_all(figure_of, data["figures"]),
        verdict=Verdict(answer, findings),
    )


def _finding(data: Mapping[str, Any]) -> PartAnswer:
    return PartAnswer(_text(data["text"]), _all(_check, data["checks"]), _one_of((True, False, None), data["met"]))


def _check(data: Mapping[str, Any]) -> Check:
    ends = _number(data["low"]), _number(data["high"])
    return Check(figure_of(data["figure"]), *ends, _one_of((True, False, None), data["met"]))


def figure_of(data: Mapping[str, Any]) -> Figure:
    """Decode a figure from a record's JSON."""
    return Figure(
        _word(data["name"]),
        **{name: _number(data[name]) for name in ("value", "low", "high")},
        method=_one_of(get_args(Method), data["method"]),
        samples=_whole(data["samples"], 1),
        at={name: _place(value) for name, value in data["at"].items()},
    )


def _plot(data: Mapping[str, Any]) -> Plot:
    axes: dict[str, Any] = {name: _one_of(get_args(Axis), data[name]) for name in ("x_axis", "y_axis")}
    return Plot(
        **{name: _word(data[name]) for name in ("name", "x_label", "y_label")} | axes,
        caption=_text(data["caption"]),
        series=_all(_series, data["series"]),
        lines=tuple((_word(label), _number(y)) for label, y in data["lines"]),
    )


def _series(data: Mapping[str, Any]) -> Series:
    style: Style = _one_of(get_args(Style), data["style"])
    x: tuple[Any, ...] = _all(_word if style == "bars" else _number, data["x"])
    y, low, high = (_all(_number, data[name]) for name in ("y", "low", "high"))
    if len(y) != len(x) or {len(low), len(high)} not in ({0}, {len(x)}):
        sizes = f"{len(x)} x, {len(y)} y, {len(low)} low and {len(high)} high"
        raise ValueError(f"a series has a y for each x, and all ends of intervals or none; got {sizes}")
    return Series(_word(data["label"]), x, y, low, high, style)


def _text(data: Mapping[str, Any]) -> Text:
    return Text(_word(data["en"]), _word(data["zh"]))


def _all(convert: Callable[[Any], Item], data: Any) -> tuple[Item, ...]:
    if not isinstance(data, list):
        raise TypeError(f"a list was expected; got {data!r}")
    return tuple(map(convert, data))


def _one_of(allowed: tuple[Any, ...], value: Any) -> Any:
    if not any(value is one or (isinstance(value, str) and value == one) for one in allowed):
        raise ValueError(f"one of {', '.join(map(str, allowed))} was expected; got {value!r}")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text was expected; got {value!r}")
    return value


def _whole(value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"a whole number of {least} or more was expected; got {value!r}")
    return value


def _place(value: Any) -> Place:
    if type(value) not in (str, int, float):
        raise TypeError(f"a text or a number was expected; got {value!r}")
    return cast(Place, value)


def _number(value: Any) -> float:
    """Decode a number as `_json` writes it: null is NaN, and infinities are words."""
    if value is None:
        return math.nan
    if value in ("Infinity", "-Infinity") or type(value) in (int, float):
        return float(value)
    raise TypeError(f"a number was expected; got {value!r}")
