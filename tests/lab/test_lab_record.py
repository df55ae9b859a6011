"""Records: what is written is what is read, and what is no record is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from sqrtdk.errors import InvalidValueError
from sqrtdk.lab.claims.var_linear import CLAIM
from sqrtdk.lab.experiment import run_claim
from sqrtdk.lab.plots import Plot, Series
from sqrtdk.lab.record import SCHEMA_VERSION, Record, read, to_json
from sqrtdk.lab.text import Text


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
    record = dataclasses.replace(record, plots=(*record.plots, odd))
    path = tmp_path / "record.json"
    path.write_text(to_json(record))
    again = read(path)
    assert _plain(again) == _plain(record)
    assert again.outcome.figures == record.outcome.figures
    assert again.outcome.verdict == record.outcome.verdict
    assert math.isnan(again.plots[-1].series[0].y[1])
    assert again.plots[-1].series[1] == odd.series[1]


def test_a_record_says_how_it_came_about(record: Record) -> None:
    data = json.loads(to_json(record))
    assert data["schema_version"] == SCHEMA_VERSION
    assert data["command"] == "sqrtdk lab run var-linear --quick"
    assert {"torch", "python", "sqrtdk", "cpus", "threads"} <= set(data["environment"])
    assert data["seed"] == 0
    assert data["duration_s"] > 0
    assert data["sound"] is True
    assert data["outcome"]["parameters"]["power"] == 0.0
    assert data["control"]["parameters"]["power"] == 0.5
    assert all({"value", "low", "high", "method", "samples", "at"} <= set(f) for f in data["outcome"]["figures"])


def test_a_control_that_agrees_or_cannot_tell_is_unsound(record: Record) -> None:
    assert record.sound
    assert not dataclasses.replace(record, control=record.outcome).sound
    verdict = dataclasses.replace(record.control.verdict, answer="undecided")
    assert not dataclasses.replace(record, control=dataclasses.replace(record.control, verdict=verdict)).sound


def test_another_schema_version_is_named(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(json.loads(to_json(record)) | {"schema_version": 99}))
    with pytest.raises(InvalidValueError, match=f"schema version 99; .* reads {SCHEMA_VERSION}"):
        read(path)


@pytest.mark.parametrize("cut", [0, 1, 200, -2])
def test_half_a_record_is_no_record(record: Record, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "record.json"
    path.write_text(to_json(record)[:cut])
    with pytest.raises(InvalidValueError, match="not a record of a claim"):
        read(path)


@pytest.mark.parametrize("name", ["statement", "outcome", "plots", "seed", "environment"])
def test_a_record_needs_every_entry(record: Record, tmp_path: Path, name: str) -> None:
    path = tmp_path / "record.json"
    for broken in ({}, {name: 3.5 if name != "seed" else "x"}):
        data = json.loads(to_json(record))
        del data[name]
        path.write_text(json.dumps(data | broken))
        with pytest.raises(InvalidValueError, match="not a record of a claim"):
            read(path)


def test_a_list_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("[1, 2]")
    with pytest.raises(InvalidValueError, match="not a record of a claim"):
        read(path)
