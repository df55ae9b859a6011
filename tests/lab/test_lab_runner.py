"""Runs: records are whole, reused where they fit, refused where they do not, and survive a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sqrtdk.errors import InvalidValueError, OutputError
from sqrtdk.lab.record import read
from sqrtdk.lab.register import CLAIMS, find
from sqrtdk.lab.runner import records, run

IDS = ["onehot-64", "var-linear"]


def _run(folder: Path | None, ids: list[str] = IDS, **options: object) -> dict[str, bool]:
    """Which claims were reused."""
    done = run(ids, **{"quick": True, "output": folder, "engine": "local", **options})  # type: ignore[arg-type]
    return {one.record.id: one.reused for one in done}


def test_a_run_leaves_records_and_a_second_reuses_them(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "lab"
    assert _run(folder) == dict.fromkeys(IDS, False)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*.json")}
    assert {path.stem for path in before} == set(IDS)
    assert _run(folder) == dict.fromkeys(IDS, True)
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*.json")}
    assert [record.id for record in records(folder)] == [name for name in CLAIMS if name in IDS]


def test_nothing_is_written_without_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run(None) == dict.fromkeys(IDS, False)
    assert not list(tmp_path.iterdir())


def test_equal_settings_give_equal_figures(tmp_path: Path) -> None:
    _run(tmp_path / "a")
    _run(tmp_path / "b")
    _run(tmp_path / "c", seed=1)
    a, b, c = (read(tmp_path / name / "var-linear.json").outcome.figures for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.parametrize("options", [{"seed": 3}, {"quick": False}])
def test_records_of_another_run_are_not_replaced_without_force(tmp_path: Path, options: dict[str, object]) -> None:
    _run(tmp_path, ["onehot-64"])
    before = (tmp_path / "onehot-64.json").read_bytes()
    with pytest.raises(OutputError, match="a record of another run: " + next(iter(options))) as raised:
        _run(tmp_path, ["var-linear", "onehot-64"], **options)
    assert "--force" in raised.value.hint
    assert (tmp_path / "onehot-64.json").read_bytes() == before
    assert not (tmp_path / "var-linear.json").exists()  # refused before anything ran
    assert _run(tmp_path, ["onehot-64"], force=True, **options) == {"onehot-64": False}
    assert (tmp_path / "onehot-64.json").read_bytes() != before


def test_a_record_of_another_schema_version_is_named(tmp_path: Path) -> None:
    _run(tmp_path, ["onehot-64"])
    path = tmp_path / "onehot-64.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 7}))
    with pytest.raises(InvalidValueError, match="schema version 7"):
        _run(tmp_path, ["onehot-64"])
    with pytest.raises(InvalidValueError, match="schema version 7"):
        records(tmp_path)


def test_a_claim_that_is_not_there_gets_the_nearest_names() -> None:
    with pytest.raises(InvalidValueError, match="no claim 'entropy-tabel' among the 43") as raised:
        find(["var-linear", "entropy-tabel"])
    assert "entropy-table" in raised.value.hint
    with pytest.raises(InvalidValueError, match="no claim") as raised:
        find(["xyzzy"])
    assert "lab list" in raised.value.hint
    assert [claim.id for claim in find(["normal", "all", "normal"])][:2] == ["normal", "var-linear"]
    assert len(find(["normal", "all"])) == len(CLAIMS)


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("here")
    for folder in (file, file / "below"):
        with pytest.raises(OutputError, match="cannot write into"):
            _run(folder)
    assert file.read_text() == "here"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"engine": "poll"}, "an engine is one of"), ({"ray_address": "auto"}, "an address is for the engine 'ray'")],
)
def test_an_engine_that_is_not_there_is_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        _run(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_directory_without_permission(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir(mode=0o500)
    with pytest.raises(OutputError, match="cannot write"):
        _run(tmp_path / "lab")


def test_a_directory_without_records(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InvalidValueError, match="holds no records"):
            records(folder)


def test_a_killed_run_leaves_whole_records_that_the_next_one_reuses(tmp_path: Path) -> None:
    """SIGKILL after the second record; every file is whole, and the rest is made by the next run."""
    ids = ["onehot-64", "softmax-example", "var-linear", "derivative-floor", "v-scaling"]
    code = f"from sqrtdk.lab.runner import run\nfor _ in run({ids!r}, output={str(tmp_path)!r}, engine='local'): pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = {path.stem for path in tmp_path.glob("*.json")}
    assert 2 <= len(there) < len(ids)
    assert all(read(tmp_path / f"{name}.json").id == name for name in there)
    assert _run(tmp_path, ids, quick=False) == {name: name in there for name in ids}
