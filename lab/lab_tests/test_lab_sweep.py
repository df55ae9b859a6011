"""Sweeps: one table whatever computes it, gone on with after anything, and never over something else."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from lab_tests.small_sweep import SMALL, edit, interrupted, names
from sqrtdk._progress import pass_progress_to
from sqrtdk.errors import InvalidTypeError, InvalidValueError, LabError, MissingExtraError, OutputError
from sqrtdk_lab.sweep import Grid, _store, _sweep, measure, summary, sweep
from sqrtdk_lab.sweep._store import SWEEP_COLUMNS
from tests.engines.processes import python, until


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The table of SMALL, from an uninterrupted run in this process."""
    done = sweep(SMALL, tmp_path_factory.mktemp("whole"))
    assert (done.computed, done.reused, done.damaged) == (16, 0, ())
    return done.results.read_bytes()


def test_the_table(tmp_path: Path, whole: bytes) -> None:
    done = sweep(SMALL, tmp_path / "new" / "folder", command="the command")
    assert names(done.results.parent) == ["manifest.json", "results.parquet"]
    assert done.results.read_bytes() == whole
    rows = pq.read_table(done.results).to_pylist()
    cells = [(row["d_k"], row["scale"], row["distribution"], row["seed"]) for row in rows]
    assert cells == sorted(cells)
    assert len(set(cells)) == 16
    assert rows[3] == measure(SMALL.cell(3))
    assert tuple(rows[0]) == SWEEP_COLUMNS
    manifest = json.loads((done.results.parent / "manifest.json").read_text())
    assert manifest["schema_version"] == 1
    assert manifest["grid"] == SMALL.content()
    assert manifest["command"] == "the command"
    assert manifest["versions"] == _store.versions()
    assert {"sqrtdk", "torch", "pyarrow", "python"} <= set(manifest["versions"])


@pytest.mark.full
def test_the_pool_gives_the_same_table(tmp_path: Path, whole: bytes) -> None:
    assert sweep(SMALL, tmp_path, engine="pool", workers=2).results.read_bytes() == whole


def test_a_second_run_computes_nothing(tmp_path: Path, whole: bytes) -> None:
    told: list[tuple[int, int]] = []
    sweep(SMALL, tmp_path)
    again = sweep(SMALL, tmp_path, engine="pool", progress=lambda *at: told.append(at))
    assert (again.computed, again.reused) == (0, 16)
    assert told == [(16, 16)]
    assert again.results.read_bytes() == whole


def test_the_order_of_the_axes_does_not_matter(tmp_path: Path) -> None:
    sweep(SMALL, tmp_path)
    other = Grid([4, 16, 4], [8], ["sqrt_dk", "none"], ["uniform", "normal"], [0, 1], 8)
    assert sweep(other, tmp_path).computed == 0


@pytest.mark.parametrize("count", [0, 1, 7, 16])
def test_an_interrupted_sweep_goes_on(
    count: int, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path, count, monkeypatch)
    assert len(list(tmp_path.glob("part-*.parquet"))) == count
    done = sweep(SMALL, tmp_path)
    assert (done.computed, done.reused) == (16 - count, count)
    assert done.results.read_bytes() == whole
    assert names(tmp_path) == ["manifest.json", "results.parquet"]


def test_what_had_ended_before_a_failure_is_kept(tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(_sweep, "measure", lambda cell: measure(cell) if cell["d_k"] == 4 else 1 / 0)
        with pytest.raises(LabError, match=r"\(d_k=16, keys=8, scale=none, distribution=normal, seed=0, rows=8\)"):
            sweep(SMALL, tmp_path)
    done = sweep(SMALL, tmp_path)
    assert (done.computed, done.reused) == (8, 8)
    assert done.results.read_bytes() == whole


def test_a_kill_between_the_table_and_the_end_of_the_parts(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells are there twice, and half a file under another name."""
    interrupted(tmp_path / "a", 6, monkeypatch)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    done = sweep(SMALL, tmp_path / "a")
    for part in (tmp_path / "b").glob("part-*.parquet"):
        shutil.copy(part, tmp_path / "a")
    (tmp_path / "a" / ".part-00006.parquet.abc.tmp").write_bytes(b"PAR1 half")
    again = sweep(SMALL, tmp_path / "a")
    assert (again.computed, again.reused) == (0, 16)
    assert done.results.read_bytes() == whole
    assert names(tmp_path / "a") == ["manifest.json", "results.parquet"]


GRID = ("--d-k", "32,64", "--keys", "64,256", "--scale", "sqrt_dk,none", "--seeds", "6", "--rows", "256")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "pool"])
def test_a_real_kill_loses_nothing_and_doubles_nothing(engine: str, tmp_path: Path) -> None:
    with python(
        "-m", "sqrtdk", "lab", "sweep", *GRID, "--engine", engine, "--output", str(tmp_path / "killed")
    ) as process:
        until(lambda: list((tmp_path / "killed").glob("part-*.parquet")))
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert psutil.wait_procs(workers, timeout=120)[1] == []
    assert not (tmp_path / "killed" / "results.parquet").exists()
    grid = Grid([32, 64], [64, 256], ["sqrt_dk", "none"], ["normal"], range(6), 256)
    done = sweep(grid, tmp_path / "killed")
    assert done.damaged == ()
    assert 0 < done.reused < 48
    assert done.computed + done.reused == 48
    assert done.results.read_bytes() == sweep(grid, tmp_path / "alone").results.read_bytes()
    assert names(tmp_path / "killed") == ["manifest.json", "results.parquet"]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"rows": 9}, r"rows is 8 there and 9 here$"),
        ({"d_k": (4,), "scale": ("none",)}, r"d_k is \[4, 16\] there and \[4\] here; scale is .* here$"),
    ],
)
def test_another_grid_is_refused(other: dict[str, Any], difference: str, tmp_path: Path, whole: bytes) -> None:
    sweep(SMALL, tmp_path)
    grid = Grid(**(SMALL.content() | other))
    with pytest.raises(OutputError, match=f"(?m){difference}") as raised:
        sweep(grid, tmp_path)
    assert "--output" in raised.value.hint
    assert "--force" in raised.value.hint
    assert (tmp_path / "results.parquet").read_bytes() == whole
    assert sweep(grid, tmp_path, force=True).computed == len(grid)
    assert sweep(SMALL, tmp_path, force=True).results.read_bytes() == whole


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    sweep(SMALL, tmp_path)
    edit(tmp_path, schema_version=7)
    with pytest.raises(InvalidValueError, match="in schema version 7; this version of sqrtdk writes 1"):
        sweep(SMALL, tmp_path)
    assert sweep(SMALL, tmp_path, force=True).computed == 16


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1, "grid": 3}'])
def test_a_manifest_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    sweep(SMALL, tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(OutputError, match=r"manifest\.json is not the manifest of a sweep"):
        sweep(SMALL, tmp_path)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not empty and holds no sweep"):
        sweep(SMALL, tmp_path)
    sweep(SMALL, tmp_path, force=True)
    assert names(tmp_path) == ["manifest.json", "notes.txt", "results.parquet"]


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match="cannot make the directory"):
            sweep(SMALL, folder)


@pytest.mark.skipif(sys.platform == "win32", reason="directories are not locked there")
def test_two_sweeps_into_one_directory(tmp_path: Path) -> None:
    def second(done: int, total: int) -> None:
        if done == 3:
            with pytest.raises(OutputError, match="another writer has"):
                sweep(SMALL, tmp_path)

    assert sweep(SMALL, tmp_path, progress=second).computed == 16


def test_pyarrow_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="pyarrow can't be imported") as raised:
        sweep(SMALL, tmp_path)
    assert "pip install 'sqrtdk[lab]'" in raised.value.hint
    assert names(tmp_path) == []


def test_an_unknown_engine_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="got 'rey'"):
        sweep(SMALL, tmp_path / "new", engine="rey")
    assert not (tmp_path / "new").exists()


def test_workers_of_the_engine_are_looked_at_though_nothing_is_to_be_computed(tmp_path: Path) -> None:
    sweep(SMALL, tmp_path)
    with pytest.raises(InvalidValueError, match="got 2 workers"):
        sweep(SMALL, tmp_path, engine="local", workers=2)


def test_the_summary_averages_over_seeds(tmp_path: Path) -> None:
    document = summary(sweep(SMALL, tmp_path))
    assert (document["cells"], document["computed"], document["reused"]) == (16, 16, 0)
    assert len(document["combinations"]) == 8
    cells = [measure({**SMALL.cell(2), "seed": seed}) for seed in (0, 1)]
    one = document["combinations"][1]
    assert [one[axis] for axis in ("d_k", "keys", "scale", "distribution")] == [4, 8, "none", "uniform"]
    assert one["entropy_nats"] == pytest.approx((cells[0]["entropy_nats"] + cells[1]["entropy_nats"]) / 2)
    assert one["max_abs_logit"] == max(cell["max_abs_logit"] for cell in cells)
    errors = [cell["entropy_nats_se"] for cell in cells]
    assert one["entropy_nats_se"] == pytest.approx((errors[0] ** 2 + errors[1] ** 2) ** 0.5 / 2)
    assert "seed" not in one


def test_places_and_cells_are_inverse() -> None:
    cells = [SMALL.cell(place) for place in range(len(SMALL))]
    axes = [tuple(cell[axis] for axis in ("d_k", "keys", "scale", "distribution", "seed")) for cell in cells]
    assert list(SMALL.places(axes)) == list(range(16))
    assert all(cell["rows"] == 8 for cell in cells)


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"d_k": [0]}, "d_k are at least 1 and below 2\\^63; got 0", ""),
        ({"keys": [1]}, "keys are at least 2", ""),
        ({"rows": 1}, "rows are at least 2", ""),
        ({"seeds": [-1]}, "seeds are at least 0", ""),
        ({"seeds": [2**63]}, "seeds are at least 0 and below 2", ""),
        ({"d_k": []}, "d_k has at least one value", ""),
        ({"scale": []}, "scale has at least one value", ""),
        ({"scale": ["sqrtdk"]}, "a scale is one of sqrt_dk, none,.* got 'sqrtdk'", "Did you mean sqrt_dk"),
        ({"scale": ["learned"]}, "a scale is one of", ""),
        ({"scale": ["fixed"]}, "the scale fixed needs its value", "fixed=NUMBER"),
        ({"scale": ["fixed=x"]}, "the scale fixed takes a number; got 'x'", "fixed=0.5"),
        ({"scale": ["fixed="]}, "the scale fixed takes a number; got ''", ""),
        ({"scale": ["fixed=nan"]}, "a fixed scale is a finite number", ""),
        ({"scale": ["sqrt_dk=2"]}, "the scale sqrt_dk takes no number", "sqrt_dk alone"),
        ({"scale": ["temperature=0"]}, "a temperature is above 0", ""),
        ({"distribution": ["gaussian"]}, "a distribution is one of normal,", ""),
        ({"distribution": ["norml"]}, "a distribution is one of normal,", "Did you mean normal"),
        ({"keys": [2**20], "d_k": [64]}, "keys \\* d_k of a cell is at most 33,554,432", "fewer keys"),
        ({"keys": [2**17], "rows": 512}, "rows \\* keys of a cell is at most", "fewer rows"),
        ({"d_k": [2**23], "rows": 2**20}, "rows \\* d_k of a cell is at most .*; got 1,048,576 \\* 8", "fewer rows"),
        ({"seeds": range(10**7 + 1)}, "at most 10,000,000 cells; got 10,000,001 seeds", "parts of it"),
        ({"seeds": range(10**10)}, "at most 10,000,000 cells; got 10,000,000,000 seeds", "parts of it"),
        ({"seeds": range(10**30)}, "at most 10,000,000 cells; got 1,000,0", "parts of it"),
        ({"seeds": range(10**6), "d_k": range(1, 12)}, "at most 10,000,000 cells; got 11,000,000 cells", "parts of it"),
    ],
)
def test_bad_grids(changes: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(InvalidValueError, match=message) as raised:
        Grid(**({"d_k": [4], "keys": [4]} | changes))
    assert hint in raised.value.hint


@pytest.mark.parametrize("changes", [{"d_k": [True]}, {"keys": [4.0]}, {"rows": "8"}])
def test_grids_of_the_wrong_type(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidTypeError, match="whole numbers"):
        Grid(**({"d_k": [4], "keys": [4]} | changes))


def test_one_text_a_rule() -> None:
    scales = ["fixed=0.10", "fixed=1e-1", "layer_index=1", "disentangled=3.0", "log_n", "log_n=0.5"]
    grid = Grid(d_k=[4], keys=[4], scale=scales)
    assert grid.scale == ("disentangled=3", "fixed=0.1", "layer_index=1", "log_n", "log_n=0.5")


def test_counts_go_to_the_function_that_was_given(tmp_path: Path) -> None:
    counts: list[tuple[int, int]] = []
    with pass_progress_to(lambda *words: pytest.fail(str(words))):
        sweep(Grid(d_k=[16, 32], keys=[8], rows=16), tmp_path, progress=lambda *count: counts.append(count))
    assert counts == [(0, 2), (1, 2), (2, 2)]
