"""What is written comes back, and a run that is begun again goes on without a double or missing step."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqrtdk.errors import InvalidValueError, MissingExtraError
from sqrtdk.monitor.columns import ALARM_COLUMNS, COLUMNS_BY_TABLE, HEAD_COLUMNS, STEP_COLUMNS, TYPES
from sqrtdk.monitor.folder import SMALL_PARTS_BEFORE_MERGE
from sqrtdk.monitor.names import UnrecordedSteps
from sqrtdk.monitor.reading import read_run
from sqrtdk.store.disk import digest
from tests.monitor.run_records import MODEL, SETTINGS, alarm, head, parts, rows, steps, told, whole, writer, written


def test_all_that_is_written_comes_back(tmp_path: Path) -> None:
    before = time.time()
    written(tmp_path / "run", 23)
    run = read_run(tmp_path / "run")
    assert whole(run, 23)
    assert (run.model, run.settings, run.damaged, run.gaps, run.last_step) == (MODEL, SETTINGS, (), (), 23)
    (attempt,) = run.attempts
    assert (attempt.number, attempt.first_step) == (1, 0)
    assert before <= attempt.started <= time.time()
    assert len(parts(tmp_path / "run")) == 5


def test_the_tables_have_the_columns_that_are_listed(tmp_path: Path) -> None:
    written(tmp_path, 4)
    run = read_run(tmp_path)
    aliases = {"float64": "double"}
    for table, columns in ((run.heads, HEAD_COLUMNS), (run.steps, STEP_COLUMNS), (run.alarms, ALARM_COLUMNS)):
        wanted = [(column.name, aliases.get(column.type, column.type), column.nullable) for column in columns]
        assert [(field.name, str(field.type), field.nullable) for field in table.schema] == wanted


def test_a_column_has_one_type_and_says_what_it_is() -> None:
    types: dict[str, str] = {}
    for columns in COLUMNS_BY_TABLE.values():
        for column in columns:
            assert column.type in TYPES
            assert types.setdefault(column.name, column.type) == column.type
            assert column.meaning
            assert column.unit or column.type in ("string", "bool")


def test_a_part_is_a_plain_parquet_file(tmp_path: Path) -> None:
    """For those who read it with anything else."""
    written(tmp_path, 4)
    table = pq.read_table(tmp_path / "parts")
    assert table["table"].to_pylist() == ["heads"] * 18 + ["steps"] * 5 + ["alarms"]
    assert table.filter(pa.compute.equal(table["table"], "steps"))["loss"].to_pylist() == [
        1 / (n + 1) for n in range(5)
    ]


def test_infinite_and_missing_numbers_stay_what_they_are(tmp_path: Path) -> None:
    given = [math.nan, math.inf, -math.inf, None, np.float32(0.5)]
    with writer(tmp_path) as run:
        run.write([{**head(0, "a", at), "max_logit": value} for at, value in enumerate(given)], [told(0)], [])
    nan, *rest = read_run(tmp_path).heads["max_logit"].to_pylist()
    assert math.isnan(nan)
    assert rest == [math.inf, -math.inf, None, 0.5]


def test_rows_may_come_in_any_order_of_step(tmp_path: Path) -> None:
    with writer(tmp_path) as run:
        run.write(*(list(reversed(some)) for some in rows(range(12))))
    run = read_run(tmp_path)
    assert steps(run) == list(range(12))
    assert run.heads["step"].to_pylist() == sorted(run.heads["step"].to_pylist())


def test_going_on_after_the_last_step(tmp_path: Path) -> None:
    written(tmp_path, 23)
    with writer(tmp_path, settings={"every": 7}) as run:
        assert (run.attempt, run.first_step, run.last_step, run.notes) == (2, 24, 23, ())
        run.write(*rows(range(24, 31)))
        assert run.last_step == 30
    assert whole(read_run(tmp_path), 30)
    assert [attempt.settings for attempt in read_run(tmp_path).attempts] == [SETTINGS, {"every": 7}]


def test_going_back_to_a_checkpoint(tmp_path: Path) -> None:
    written(tmp_path, 23)
    names = parts(tmp_path)
    with writer(tmp_path, first_step=12) as run:
        assert (run.first_step, run.last_step) == (12, 11)
        assert run.notes == ("steps 12 to 23 are there from before: what is recorded from now on replaces them",)
        assert whole(read_run(tmp_path), 23), "an attempt that recorded nothing replaces nothing"
        run.write(*rows(range(12, 15), attempt=2))
    run = read_run(tmp_path)
    assert whole(run, 14)
    assert run.steps["time"].to_pylist() == [1.0] * 12 + [2.0] * 3
    assert (run.gaps, run.damaged) == ((), ())
    assert set(names) < set(parts(tmp_path)), "nothing is deleted"
    written(tmp_path, 40)
    written(tmp_path, 8, first_step=5)
    run = read_run(tmp_path)
    assert whole(run, 8)
    assert run.steps["time"].to_pylist() == [1.0] * 5 + [4.0] * 4


def test_a_gap_is_said(tmp_path: Path) -> None:
    written(tmp_path, 9)
    with writer(tmp_path, first_step=20) as run:
        assert run.notes == ("steps 10 to 19 were never recorded",)
        assert run.last_step == 9
        run.write(*rows(range(20, 25)))
    run = read_run(tmp_path)
    assert run.gaps == (UnrecordedSteps(10, 19, 2),)
    assert steps(run) == [*range(10), *range(20, 25)]
    written(tmp_path, 16, first_step=14)
    assert read_run(tmp_path).gaps == (UnrecordedSteps(10, 13, 3),), "an attempt that begins within the gap"
    written(tmp_path, 15, first_step=8)
    assert read_run(tmp_path).gaps == (), "the attempt after it begins before the gap"


def test_a_span_of_steps(tmp_path: Path) -> None:
    written(tmp_path, 23)
    written(tmp_path, 30, first_step=18)
    assert whole(read_run(tmp_path, first_step=7, last_step=21), 21, first=7)
    assert steps(read_run(tmp_path, first_step=31)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": [{**head(0, "a", 0), "max_lgit": 1.0}]}, "heads have no column 'max_lgit'"),
        ({"heads": [{**head(0, "a", 0), "rows": None}]}, "heads lack 'rows' in a row"),
        ({"heads": [head(3, "a", 0)]}, "the heads have step 3, which `steps` does not have"),
        ({"alarms": [alarm(3)]}, "the alarms have step 3, which `steps` does not have"),
        ({"alarms": [{**alarm(0), "text": "ä" * 6000}]}, "a text in 'text' of alarms has more than 10000 bytes"),
        ({"alarms": [{**alarm(0), "text": "\ud800"}]}, "a value does not fit its column of alarms"),
        ({"steps": [{**told(0), "loss": "low"}]}, "a value does not fit its column of steps"),
        ({"steps": [{**told(0), "calls": 2**31}]}, "a value does not fit its column of steps"),
        ({"steps": [told(0), told(0)]}, "a step is below 0, or there twice"),
        ({"steps": [told(-1)]}, "a step is below 0, or there twice"),
        ({"steps": [told(10**18)]}, "1000000000000000000 is no number of a step"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_leave_no_trace(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with writer(tmp_path) as run:
        with pytest.raises(InvalidValueError, match=message):
            run.write(**{"heads": [], "steps": [told(0)], "alarms": [], **change})
        assert (parts(tmp_path), run.last_step) == ([], None)
        run.write(*rows(range(3)))
        with pytest.raises(InvalidValueError, match=r"step 2 is recorded already, .*: 3 is the least"):
            run.write(*rows(range(2, 4)))
    assert whole(read_run(tmp_path), 2)


def test_nothing_to_write_is_no_part(tmp_path: Path) -> None:
    with writer(tmp_path) as run:
        run.write([], [], [])
    assert parts(tmp_path) == []
    assert (read_run(tmp_path).last_step, read_run(tmp_path).heads.num_rows) == (None, 0)


def test_many_small_parts_become_one(tmp_path: Path) -> None:
    written(tmp_path, 2 * SMALL_PARTS_BEFORE_MERGE, every=1)
    names = parts(tmp_path)
    begin = (
        f"attempt-1.part-000000-{2 * SMALL_PARTS_BEFORE_MERGE - 2:06}.steps-0-{2 * SMALL_PARTS_BEFORE_MERGE - 2}.sum-"
    )
    assert names[0] == f"{begin}{digest((tmp_path / 'parts' / names[0]).read_bytes())}.parquet"
    assert len(names) == 3
    assert whole(read_run(tmp_path), 2 * SMALL_PARTS_BEFORE_MERGE)


def test_large_parts_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqrtdk.monitor.folder.SMALL_BYTES", 1000)
    written(tmp_path, SMALL_PARTS_BEFORE_MERGE, every=1)
    assert len(parts(tmp_path)) == SMALL_PARTS_BEFORE_MERGE + 1


def test_a_damaged_part_is_not_merged(tmp_path: Path) -> None:
    with writer(tmp_path) as run:
        for step in range(2 * SMALL_PARTS_BEFORE_MERGE + 3):
            run.write(*rows([step]))
            if step == 4:
                spoilt = tmp_path / "parts" / parts(tmp_path)[4]
                spoilt.write_bytes(spoilt.read_bytes()[:-9])
    run = read_run(tmp_path)
    assert [damage.name for damage in run.damaged] == [spoilt.name]
    assert steps(run) == [step for step in range(2 * SMALL_PARTS_BEFORE_MERGE + 3) if step != 4]
    assert len(parts(tmp_path)) == SMALL_PARTS_BEFORE_MERGE + 1 + 3


def test_an_interrupt_while_a_part_is_written_acts_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    with writer(tmp_path) as run:
        run.write(*rows(range(5)))

        def interrupted(descriptor: int) -> None:
            signal.raise_signal(signal.SIGINT)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", interrupted)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
        try:
            with pytest.raises(KeyboardInterrupt):
                run.write(*rows(range(5, 10)))
        finally:
            signal.signal(signal.SIGINT, before)
        monkeypatch.undo()
        assert run.last_step == 9
        run.write(*rows(range(10, 12)))
    assert whole(read_run(tmp_path), 11)


def test_run_json_is_what_the_design_says(tmp_path: Path) -> None:
    with writer(tmp_path, model={"layers": np.int64(2), "eps": math.nan}) as run:
        run.write(*rows(range(3)))
        run.write(*rows(range(3, 5)))
    there = json.loads((tmp_path / "run.json").read_text())
    assert there.keys() == {"schema_version", "attempts", "model", "checksum"}
    assert there["attempts"][0].keys() == {"number", "first_step", "started", "settings", "parts", "last_step"}
    assert [there["attempts"][0][name] for name in ("parts", "last_step")] == [2, 4]
    with writer(tmp_path, model={"layers": np.int64(2), "eps": math.nan}) as run:
        assert run.attempt == 2


@pytest.mark.parametrize("step", [-1, True, 1.5, 10**18])
def test_what_is_no_step_is_refused(step: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="is no number of a step"):
        writer(tmp_path / "run", first_step=step)
    assert not (tmp_path / "run").exists()


def test_pyarrow_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="pyarrow can't be imported") as raised:
        writer(tmp_path / "run")
    assert raised.value.hint == "Install it: pip install 'sqrtdk[watch]'"
    assert not (tmp_path / "run").exists()
