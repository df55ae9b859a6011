"""Runs: records are whole, reused where they fit, refused where they do not, and survive a kill."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sqrtdk.errors import InvalidValueError, MissingExtraError, OutputError
from sqrtdk.store.lock import locked
from sqrtdk_lab import runner
from sqrtdk_lab.claim import ExperimentResult, ExperimentRun
from sqrtdk_lab.record import Record, read_record
from sqrtdk_lab.register import CLAIMS, find_claims
from sqrtdk_lab.runner import claims_without_record, records, run
from tests.engines.cells_to_compute import square

IDS = ["params-single", "jacobian-vanishes"]


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
    a, b, c = (read_record(tmp_path / name / "jacobian-vanishes.json").outcome.figures for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.parametrize("options", [{"seed": 3}, {"quick": False}])
def test_records_of_another_run_are_not_replaced_without_force(tmp_path: Path, options: dict[str, object]) -> None:
    _run(tmp_path, ["params-single"])
    before = (tmp_path / "params-single.json").read_bytes()
    with pytest.raises(OutputError, match="a record of another run: " + next(iter(options))) as raised:
        _run(tmp_path, ["jacobian-vanishes", "params-single"], **options)
    assert "--force" in raised.value.hint
    assert (tmp_path / "params-single.json").read_bytes() == before
    assert not (tmp_path / "jacobian-vanishes.json").exists()  # refused before anything ran
    assert _run(tmp_path, ["params-single"], force=True, **options) == {"params-single": False}
    assert (tmp_path / "params-single.json").read_bytes() != before


@pytest.mark.parametrize("name", ["sqrtdk", "code", "python", "torch", "numpy", "scipy", "scikit-learn"])
def test_records_of_other_code_or_versions_are_not_reused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path, ["params-single"])
    here = {**runner.numbers_from("sqrtdk_lab"), name: "other"}
    monkeypatch.setattr(runner, "numbers_from", lambda *packages: here)
    with pytest.raises(OutputError, match=f"(?m)a record of another run: {name} .* instead of other$"):
        _run(tmp_path, ["params-single"])


def test_a_forced_run_computes_its_cells_anew_and_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "5.log"

    def measure(run: ExperimentRun) -> ExperimentResult:
        run.map(square, [{"x": 5, "folder": str(tmp_path)}])
        return CLAIMS["jacobian-vanishes"].measure(run)

    claims = [dataclasses.replace(CLAIMS["jacobian-vanishes"], id=name, measure=measure) for name in IDS]
    monkeypatch.setattr(runner, "find_claims", lambda ids: claims)
    counts = []
    for force in (False, False, True, False):
        _run(tmp_path / "lab", force=force)
        counts.append(len(log.read_text().splitlines()))
    assert counts == [1, 1, 2, 2]


def test_plots_are_there_before_the_record_and_old_ones_go(tmp_path: Path) -> None:
    calls: list[bool] = []

    def draw(record: Record, folder: Path, reused: bool) -> None:
        assert (folder / f"{record.id}.json").exists() is reused
        assert (folder / f"{record.id}-old.svg").exists() is reused
        (folder / f"{record.id}-old.svg").write_text("new")
        calls.append(reused)

    others = [tmp_path / "lab" / name for name in ("range-64-old.svg", "jacobian-vanishes-old.txt")]
    for force in (False, False, True):
        _run(tmp_path / "lab", ["jacobian-vanishes"], force=force, draw=draw)
        for path in others:
            path.touch()
    assert calls == [False, True, False]
    assert all(path.exists() for path in others)
    _run(tmp_path / "lab", ["jacobian-vanishes"], force=True)
    assert not (tmp_path / "lab" / "jacobian-vanishes-old.svg").exists()


def test_a_kill_among_the_plots_leaves_no_record(tmp_path: Path) -> None:
    def draw(record: Record, folder: Path, reused: bool) -> None:
        raise KeyboardInterrupt

    _run(tmp_path, ["jacobian-vanishes"])
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, ["jacobian-vanishes"], force=True, draw=draw)
    assert not (tmp_path / "jacobian-vanishes.json").exists()


def test_no_id_begins_with_another_and_a_hyphen() -> None:
    """The plots of a claim are known by their names."""
    assert not [(a, b) for a in CLAIMS for b in CLAIMS if b.startswith(f"{a}-")]


def test_a_record_under_the_name_of_another_claim_is_refused(tmp_path: Path) -> None:
    _run(tmp_path, ["params-single"])
    (tmp_path / "params-single.json").rename(tmp_path / "jacobian-vanishes.json")
    for read_it in (lambda: records(tmp_path), lambda: _run(tmp_path, ["jacobian-vanishes"])):
        with pytest.raises(
            InvalidValueError, match="is a record of the claim 'params-single', not of 'jacobian-vanishes'"
        ):
            read_it()


def test_a_negative_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="a seed is 0 or more; got -1"):
        _run(tmp_path / "new", seed=-1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("module", ["scipy.stats", "sklearn.datasets"])
def test_a_missing_library_is_missed_before_the_first_claim(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=module.split(".")[0]) as raised:
        run(IDS, output=tmp_path / "new")
    assert "pip install 'sqrtdk[lab]'" in raised.value.hint
    assert not (tmp_path / "new").exists()


def test_one_process_at_a_time_writes_a_directory(tmp_path: Path) -> None:
    running = run(IDS, quick=True, output=tmp_path, engine="local")
    next(running)
    with pytest.raises(OutputError, match="another writer has"):
        _run(tmp_path)
    assert next(running).record.id == IDS[1]
    assert list(running) == []
    assert _run(tmp_path) == dict.fromkeys(IDS, True)
    with locked(tmp_path), pytest.raises(OutputError, match="another writer has"):
        _run(tmp_path)


def test_what_killed_runs_left_half_written_goes(tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    left = [
        ".jacobian-vanishes.json.0a.tmp",
        ".jacobian-vanishes-x.svg.0a.tmp",
        ".jacobian-vanishes-x.png.0a.tmp",
        "cells/.ab.json.0a.tmp",
    ]
    mine = [".notes.txt.0a.tmp", "x.json.0a.tmp", ".report.html.0a.tmp"]
    for name in (*left, *mine):
        (tmp_path / name).touch()
    _run(tmp_path)
    assert [name for name in (*left, *mine) if (tmp_path / name).exists()] == mine


def test_claims_without_a_record_are_named(tmp_path: Path) -> None:
    _run(tmp_path)
    assert claims_without_record(records(tmp_path)) == [name for name in CLAIMS if name not in IDS]


def test_a_record_of_another_schema_version_is_named(tmp_path: Path) -> None:
    _run(tmp_path, ["params-single"])
    path = tmp_path / "params-single.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 7}))
    with pytest.raises(InvalidValueError, match="schema version 7"):
        _run(tmp_path, ["params-single"])
    with pytest.raises(InvalidValueError, match="schema version 7"):
        records(tmp_path)


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("entropy-tabel", "Did you mean entropy-table? "),
        ("range", "Did you mean range-64 or range-512 or mean-range? "),
        ("nope", ""),
        ("xyzzy", ""),
    ],
)
def test_a_claim_that_is_not_there_gets_near_names_and_where_all_stand(name: str, guess: str) -> None:
    with pytest.raises(InvalidValueError, match=f"no claim '{name}' among the {len(CLAIMS)}") as raised:
        find_claims(["var-linear", name])
    assert raised.value.hint == f"{guess}See them all: sqrtdk lab list"


def test_all_stands_for_the_whole_register() -> None:
    assert [claim.id for claim in find_claims(["normal", "all", "normal"])][:2] == ["normal", "var-linear"]
    assert len(find_claims(["normal", "all"])) == len(CLAIMS)


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("here")
    for folder in (file, file / "below"):
        with pytest.raises(OutputError, match="cannot make the directory"):
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


KILLED = """
import os, signal, sys
from sqrtdk_lab.runner import run
named = []
def die(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith(".json"):
        named.append(arguments[1])
        if len(named) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die)
for _ in run(sys.argv[2:], output=sys.argv[1], engine="local"): pass
"""


@pytest.mark.full
def test_a_killed_run_leaves_whole_records_that_the_next_one_reuses(tmp_path: Path) -> None:
    """SIGKILL when the third record is written and has no name yet: two are whole, and the next run makes the rest."""
    ids = ["onehot-64", "softmax-example", "var-linear", "derivative-floor", "v-scaling"]
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), *ids], check=False)
    assert done.returncode == -signal.SIGKILL
    there = {path.stem for path in tmp_path.glob("[!.]*.json")}
    assert len(there) == 2
    assert len(list(tmp_path.glob(".*.tmp"))) == 1
    assert all(read_record(tmp_path / f"{name}.json").id == name for name in there)
    assert _run(tmp_path, ids, quick=False) == {name: name in there for name in ids}
