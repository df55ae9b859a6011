"""Records: what is written is what is read, and what is no record is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Text
from sqrtdk_lab.claims.var_linear import CLAIM
from sqrtdk_lab.figures import Plot, Series
from sqrtdk_lab.judge import ClaimVerdict
from sqrtdk_lab.record import SCHEMA_VERSION, Record, read_record, to_json
from sqrtdk_lab.runner import run_claim


@pytest.fixture(scope="module")
def record() -> Record:
    return run_claim(CLAIM, quick=True, command="sqrtdk lab run var-linear --quick")


def _plain(record: Record) -> object:
    """Without the difference of tuples and lists in parameters."""
    return json.loads(to_json(record))


def test_a_record_is_read_as_it_was_written(record: Record, tmp_path: Path) -> None:
    odd = Plot(
        "odd",
        Text("Odd.", "奇"),
        "x",
        "y",
        (
            Series("diverged", (0.0, 1.0), (math.inf, math.nan), (), (), "line"),
            Series("bars", ("a", "b"), (1.0, -math.inf), (0.0, 0.0), (2.0, 2.0), "bars"),
        ),
        y_axis="log",
        lines=(("bar", 0.5),),
    )
    record = dataclasses.replace(record, plots=(*record.plots, odd), level=0.95, condition=Text("On d.", "取决于 d。"))
    path = tmp_path / "record.json"
    path.write_text(to_json(record))
    again = read_record(path)
    assert _plain(again) == _plain(record)
    assert again.condition == record.condition
    assert again.outcome.figures == record.outcome.figures
    assert again.outcome.verdict == record.outcome.verdict
    assert math.isnan(again.plots[-1].series[0].y[1])
    assert again.plots[-1].series[1] == odd.series[1]


def test_a_record_says_how_it_came_about(record: Record) -> None:
    data = json.loads(to_json(record))
    assert data["schema_version"] == SCHEMA_VERSION
    assert data["command"] == "sqrtdk lab run var-linear --quick"
    versions = {"sqrtdk", "code", "kernel", "python", "torch", "numpy", "scipy", "scikit-learn"}
    assert versions | {"system", "cpu", "cpus", "threads"} == set(data["environment"])
    assert all(data["environment"].values())
    assert data["level"] == 0.99
    assert data["seed"] == 0
    assert data["duration_s"] > 0
    assert data["sound"] is True
    assert data["outcome"]["parameters"]["power"] == 0.0
    assert data["control"]["parameters"]["power"] == 0.5
    assert all({"value", "low", "high", "method", "samples", "at"} <= set(f) for f in data["outcome"]["figures"])


def test_a_control_that_agrees_or_cannot_tell_is_unsound(record: Record) -> None:
    undecided = dataclasses.replace(record.control, verdict=ClaimVerdict("undecided", record.control.verdict.findings))
    for control, outcome, doubt in (
        (record.control, record.outcome, None),
        (record.outcome, record.outcome, "same"),
        (undecided, record.outcome, "undecided"),
        (undecided, undecided, "undecided"),
        (record.control, undecided, None),
    ):
        found = dataclasses.replace(record, control=control, outcome=outcome)
        assert found.doubt == doubt
        assert found.sound is (doubt is None)


@pytest.mark.parametrize("place", ["outcome", "control"])
def test_a_part_without_an_answer_is_told_whatever_the_verdict(record: Record, place: str) -> None:
    one = getattr(record, place)
    open_part = dataclasses.replace(one.verdict.findings[0], met=None)
    verdict = dataclasses.replace(one.verdict, findings=(*one.verdict.findings, open_part))
    assert record.decided
    assert not dataclasses.replace(record, **{place: dataclasses.replace(one, verdict=verdict)}).decided


def test_another_schema_version_is_named(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(json.loads(to_json(record)) | {"schema_version": 99}))
    with pytest.raises(InvalidValueError, match=f"schema version 99; .* reads {SCHEMA_VERSION}"):
        read_record(path)


def test_a_record_needs_every_entry(record: Record, tmp_path: Path) -> None:
    path, derived = tmp_path / "record.json", {"sound", "decided"}
    for name in json.loads(to_json(record)).keys() - derived:
        data = json.loads(to_json(record))
        del data[name]
        path.write_text(json.dumps(data))
        with pytest.raises(InvalidValueError, match="not a record of a claim"):
            read_record(path)


def _set(value: object, *place: str | int) -> Callable[[Any], None]:
    """What writes a value at a place of a record."""

    def write(data: Any) -> None:
        for step in place[:-1]:
            data = data[step]
        data[place[-1]] = value

    return write


def _map_of(x: list[float], y: list[float], values: list[list[float]]) -> Callable[[Any], None]:
    drawn = {"label": "ratio", "x": x, "y": y, "values": values, "colours": "log", "centre": 1.0}
    return _set(drawn, "plots", 0, "map")


SERIES = ("plots", 0, "series", 0)
CHECK = ("outcome", "verdict", "findings", 0, "checks", 0)
WRONG = [
    _set("perhaps", "outcome", "verdict", "answer"),
    _set("yes", "outcome", "verdict", "findings", 0, "met"),
    _set([], "outcome", "verdict", "findings"),
    _set([], "outcome", "verdict", "findings", 0, "checks"),
    _set(1, *CHECK, "met"),
    _set("guess", *CHECK, "figure", "method"),
    _set(1.5, *CHECK, "figure", "samples"),
    _set(True, "outcome", "figures", 0, "value"),
    _set(10**400, "outcome", "figures", 0, "value"),
    _set({"d_k": [64]}, "outcome", "figures", 0, "at"),
    _set(math.inf, "seed"),
    _set(-1, "seed"),
    _set(True, "seed"),
    _set(1.0, "level"),
    _set("cubic", "plots", 0, "x_axis"),
    _set([["bar"]], "plots", 0, "lines"),
    _set("dots", *SERIES, "style"),
    _set([1.0], *SERIES, "y"),
    _set([1.0], *SERIES, "low"),
    _set([], *SERIES, "high"),
    _set("bars", *SERIES, "style"),
    _map_of([1.0, 2.0], [1.0], [[1.0]]),  # a row too short
    _map_of([1.0], [1.0, 2.0], [[1.0]]),  # a row too few
    _map_of([], [], []),
    _map_of([2.0, 1.0], [1.0], [[1.0, 2.0]]),
    _map_of([0.0, 1.0], [1.0], [[1.0, 2.0]]),  # on a log axis
    _map_of([1.0, 1e300], [1.0], [[1.0, 2.0]]),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_value_that_no_record_has_is_refused(record: Record, tmp_path: Path, wrong: Callable[[Any], None]) -> None:
    data = json.loads(to_json(record))
    path = tmp_path / "record.json"
    path.write_text(json.dumps(data))
    read_record(path)
    wrong(data)
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidValueError, match="is not a record of a claim: ") as raised:
        read_record(path)
    assert len(str(raised.value)) < 600


def test_a_document_that_is_too_deep_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidValueError, match="not a record of a claim"):
        read_record(path)


def test_a_record_without_a_part_is_not_decided(record: Record) -> None:
    empty = dataclasses.replace(record.outcome, verdict=ClaimVerdict("undecided", ()))
    assert not dataclasses.replace(record, outcome=empty, control=empty).decided
