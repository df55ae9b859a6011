"""Cells: in order, once each, kept on disk, whatever the engine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from sqrtdk import _environment
from sqrtdk_lab import cells as module
from sqrtdk_lab.cells import Cells, cell_key
from tests.engines.cells_to_compute import fail_at_three, square


def _runs(folder: Path) -> dict[int, int]:
    return {int(path.stem): len(path.read_text().splitlines()) for path in folder.glob("*.log")}


@pytest.mark.parametrize(("engine", "workers"), [("local", None), pytest.param("pool", 2, marks=pytest.mark.full)])
def test_results_come_in_order_and_each_cell_is_computed_once(engine: str, workers: int | None, tmp_path: Path) -> None:
    wanted = [{"x": x, "folder": str(tmp_path)} for x in (5, 1, 3, 5, 2)]
    with Cells(engine, workers) as cells:
        assert [result["square"] for result in cells(square, wanted)] == [25, 1, 9, 25, 4]
        again = cells(square, wanted[::-1])
    assert [result["square"] for result in again] == [4, 25, 9, 1, 25]
    assert _runs(tmp_path) == {5: 1, 1: 1, 3: 1, 2: 1}


def test_results_are_kept_and_read_back_alike(tmp_path: Path) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"
    log.mkdir()
    kept.mkdir()
    wanted = [{"x": 2, "folder": str(log)}]
    with Cells(folder=kept) as cells:
        (computed,) = cells(square, wanted)
    with Cells(folder=kept) as cells:
        (found,) = cells(square, wanted)
    assert _runs(log) == {2: 1}
    assert computed["pair"] == found["pair"] == [1, 2]
    assert math.isnan(computed["lost"])
    assert math.isnan(found["lost"])


def test_what_was_done_before_an_error_is_kept(tmp_path: Path) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"
    log.mkdir()
    kept.mkdir()
    wanted = [{"x": x, "folder": str(log)} for x in (1, 2, 3, 4)]
    with Cells(folder=kept) as cells, pytest.raises(Exception, match="three is not to be had"):
        cells(fail_at_three, wanted)
    with Cells(folder=kept) as cells:
        cells(fail_at_three, [cell for cell in wanted if cell["x"] != 3])
    assert _runs(log) == {1: 1, 2: 1, 4: 1}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"cell": {}}'])
def test_a_damaged_result_is_computed_again(tmp_path: Path, damage: str) -> None:
    cell = {"x": 7}
    (tmp_path / f"{cell_key(square, cell)}.json").write_text(damage)
    with Cells(folder=tmp_path) as cells:
        assert cells(square, [cell])[0]["square"] == 49
    assert json.loads((tmp_path / f"{cell_key(square, cell)}.json").read_text())["result"]["square"] == 49


def test_a_key_is_of_the_cell_and_the_function() -> None:
    keys = {cell_key(f, cell) for f in (square, fail_at_three) for cell in ({"x": 1}, {"x": 2}, {"x": 1, "y": 0})}
    assert len(keys) == 6
    assert cell_key(square, {"x": 1, "y": 0}) == cell_key(square, {"y": 0, "x": 1})


@pytest.mark.parametrize("name", ["python", "torch"])
def test_a_key_is_of_the_versions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, here = cell_key(square, {"x": 1}), {**_environment.numbers_from(), name: "other"}
    monkeypatch.setattr(module, "numbers_from", lambda *packages: here)
    assert cell_key(square, {"x": 1}) != before


def test_a_key_is_of_the_code_without_bars_and_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "code_hash", _environment.code_hash.__wrapped__)
    monkeypatch.setattr(_environment, "_home", lambda package: tmp_path / package)
    monkeypatch.setattr(module, "numbers_from", lambda *packages: {"code": "any"})
    keys = [cell_key(square, {"x": 1})]
    for name in (
        "sqrtdk_lab/claims/a.toml",
        "sqrtdk/messages/words/a.toml",
        "sqrtdk_lab/training/a.py",
        "sqrtdk/nn/a.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1")
        keys.append(cell_key(square, {"x": 1}))
    assert keys[0] == keys[1] == keys[2] != keys[3] != keys[4]


def test_the_code_is_every_file_that_may_decide_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_environment, "_home", lambda package: tmp_path)
    counted = ["__init__.py", "nn/a.py", "training/a.py", "claim.py", "theory/table.json", "scales/cli/a.py"]
    others = ["cli/a.py", "cli.py", "report/a.py", "report/templates/a.html", "nn/__pycache__/a.pyc"]
    found = [_environment.code_hash.__wrapped__()]
    for name in (*counted, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
        found.append(_environment.code_hash.__wrapped__())
        (tmp_path / name).write_text("2")
        found.append(_environment.code_hash.__wrapped__())
    assert len(set(found)) == 1 + 2 * len(counted)
    assert len(set(found[2 * len(counted) :])) == 1


def test_anew_computes_what_is_kept_again_and_once(tmp_path: Path) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"
    log.mkdir()
    kept.mkdir()
    wanted = [{"x": 2, "folder": str(log)}]
    with Cells(folder=kept) as cells:
        cells(square, wanted)
    (path,) = kept.iterdir()
    whole = path.read_bytes()
    path.write_text(json.dumps({"result": {"square": 5}}))
    with Cells(folder=kept, anew=True) as cells:
        assert [cells(square, wanted)[0]["square"] for _ in range(2)] == [4, 4]
    assert _runs(log) == {2: 2}
    assert path.read_bytes() == whole


def test_progress_counts_what_has_to_be_computed() -> None:
    told: list[tuple[int, int]] = []
    with Cells(progress=lambda done, total: told.append((done, total))) as cells:
        cells(square, [{"x": 1}, {"x": 2}])
        cells(square, [{"x": 2}, {"x": 3}])
    assert told == [(1, 2), (2, 2), (1, 1)]
