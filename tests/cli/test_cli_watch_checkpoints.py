"""`sqrtdk watch checkpoints`: what is printed and written, exit codes, errors, Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from sqrtdk.errors import InvalidValueError
from sqrtdk.monitor.reading import read_run
from sqrtdk.report.watch.html import to_html
from sqrtdk.report.watch.summary import summarise
from tests.cli.errors import check_error
from tests.engines.processes import python, until
from tests.monitor.saved_runs import DAMAGES, rows, save
from tests.support.optional import jsonschema
from tests.support.program import called


def _watch(*arguments: object) -> subprocess.CompletedProcess[str]:
    return called("watch", *arguments, COLUMNS="110")


def _checkpoints(*arguments: object) -> subprocess.CompletedProcess[str]:
    return _watch("checkpoints", "--seq-len", 12, *arguments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three checkpoints, and one of a single damaged one."""
    folder = tmp_path_factory.mktemp("runs")
    save(folder / "good", (5, 10, 15))
    shutil.copytree(folder / "good" / "checkpoint-5", folder / "bad" / "checkpoint-5")
    DAMAGES["no config"][0](folder / "bad" / "checkpoint-5")
    return folder


def test_it_prints_what_show_prints_and_the_readers_go_on(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = _checkpoints(saved / "good" / "*", "--output", run, "--statistic", "peak")
    assert done.returncode == 0
    assert done.stdout == _watch("show", run, "--statistic", "peak").stdout
    assert "steps 5 to 15, 3 samples (3 as is), 1 attempt" in done.stdout
    assert done.stderr.splitlines() == [
        "Note: the ids are random, with seed 0: there is no tokenizer",
        "3 checkpoints: 3 measured, 0 reused",
        f"The page: sqrtdk watch show {run} --html FILE",
    ]
    assert _watch("show", run, "--html", tmp_path / "run.html").returncode == 0
    assert _watch("compare", run, run).returncode == 0
    again = _checkpoints(saved / "good" / "*", "--output", run)
    assert "3 checkpoints: 0 measured, 3 reused\n" in again.stderr
    assert "0 reused" in _checkpoints(saved / "good" / "*", "--output", run, "--anew").stderr


@pytest.mark.full
def test_several_runs_on_one_page_and_in_one_document(saved: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = (saved / "*" / "checkpoint-*", "--output", tmp_path / "run")
    done = _checkpoints(*arguments, "--html", page)
    assert done.returncode == 1, "a checkpoint that could not be measured"
    assert "4 checkpoints: 4 measured, 0 reused, 1 could not be measured" in done.stderr
    text = page.read_text(encoding="utf-8")
    for name in ("bad", "good"):
        assert f"{tmp_path / 'run' / name}</span>" in text
    kept = _checkpoints(*arguments, "--html", page)
    assert kept.returncode == 2
    assert "exists and is not overwritten" in kept.stderr
    third = saved / "good" / "checkpoint-10"
    shutil.copytree(third, tmp_path / "third" / "checkpoint-10")
    more = _checkpoints(*arguments, tmp_path / "third" / "*", "--html", page, "--force", "--json", "--fail-on", "never")
    assert more.returncode == 0
    document = json.loads(more.stdout)
    schema = Path(__file__).parents[2] / "docs" / "watch.schema.json"
    jsonschema.Draft202012Validator(json.loads(schema.read_text())).validate(document)
    assert (document["computed"], document["reused"]) == (2, 3)
    check_error(_watch("show", tmp_path / "run"), "holds no run itself, but 3", str(tmp_path / "run" / "bad"))
    (failed,) = document["failed"]
    assert failed["checkpoint"] == str(saved / "bad" / "checkpoint-5")
    assert "no readable config.json" in failed["reason"]
    assert [(Path(run["run"]).name, run["samples"]) for run in document["runs"]] == [
        ("bad", [5]),
        ("good", [5, 10, 15]),
        ("third", [10]),
    ]
    assert document["runs"][1] == json.loads(_watch("show", tmp_path / "run" / "good", "--json").stdout)
    assert page.read_text(encoding="utf-8").count('class="panel card"') == 3
    good = summarise(read_run(tmp_path / "run" / "good"))
    assert "statistic" not in {entry.kind for entry in good.missing}  # a forward pass has no gradients to miss
    with pytest.raises(InvalidValueError, match="at most 26 runs; got 27"):
        to_html([good] * 27)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("bar", "code"), [("critical", 0), ("fail", 1), ("unmeasured", 1), ("never", 0)])
def test_exit_codes(bar: str, code: int, saved: Path, tmp_path: Path) -> None:
    assert _checkpoints(saved / "bad" / "*", "--output", tmp_path / "run", "--fail-on", bar).returncode == code


@pytest.mark.slow
def test_ctrl_c_keeps_what_ended(tmp_path: Path) -> None:
    """In a program of its own, as a terminal sends it."""
    save(tmp_path / "a", range(1, 13))
    arguments = ["-m", "sqrtdk", "watch", "checkpoints", "a/checkpoint-*", "--output", "run", "--seq-len", "12"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with python(*arguments, cwd=tmp_path, **streams) as process:
        until(lambda: list(tmp_path.glob("run/checkpoints/*.json")))
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stdout) == (130, "")
    assert stderr == "What ended is kept in run; the same command goes on with the rest.\nInterrupted.\n"
    done = json.loads(_checkpoints(tmp_path / "a" / "*", "--output", tmp_path / "run", "--json").stdout)
    assert 0 < done["reused"] < 12
    assert done["reused"] + done["computed"] == 12
    assert [row["step"] for row in rows(tmp_path / "run")["steps"]] == list(range(1, 13))
