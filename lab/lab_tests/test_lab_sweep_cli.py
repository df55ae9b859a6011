"""`sqrtdk lab sweep`: streams, files, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from typer.testing import CliRunner

from sqrtdk_lab.cli import lab
from tests.engines.processes import python, until

SMALL = ("--d-k", "16,64", "--keys", "16", "--scale", "sqrt_dk,none", "--seeds", "2", "--rows", "16")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def run(*arguments: str) -> Result:
    """In this process: torch is loaded already."""
    return CliRunner().invoke(lab, ["sweep", *arguments])


def test_the_table_and_then_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sqrtdk", "lab", "sweep", "--output", "out"])
    done = run(*SMALL, "--output", "out")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "8 cells of 16 rows: 8 computed, 0 reused"
    assert lines[3].split() == ["d_k", "keys", "scale", "components", "std", "theory", "entropy", "+-", "theory"]
    row = next(line.split() for line in lines if line.split()[:3] == ["64", "16", "none"])
    assert row[5] == "8"
    assert abs(float(row[4]) - 8.0) < 1.5
    assert max(map(len, lines)) <= 80

    again = run(*SMALL, "--output", "out", "--json")
    assert again.exit_code == 0
    document = json.loads(again.stdout)
    assert (document["cells"], document["computed"], document["reused"]) == (8, 0, 8)
    assert document["grid"]["scale"] == ["none", "sqrt_dk"]
    assert len(document["combinations"]) == 4
    assert pq.read_table(tmp_path / document["results"]).num_rows == 8
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["command"].endswith("--output out")


@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_the_path_of_the_result_stands_on_one_line(tmp_path: Path, language: str) -> None:
    folder = tmp_path / "a-folder-whose-name-is-long-as-names-of-experiments-are" / "and another with a blank"
    folder.parent.mkdir()
    small = ("--d-k", "4", "--keys", "4", "--seeds", "1", "--rows", "4")
    done = run(*small, "--output", str(folder), "--lang", language)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(f"{folder}/results.parquet")


def test_seeds_from_another_first() -> None:
    done = run(*SMALL, "--seed", "5", "--output", "out", "--json")
    assert json.loads(done.stdout)["grid"]["seeds"] == [5, 6]


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (("--d-k", "16,x"), "d_k are whole numbers with commas between them; got '16,x'", "Write 16,64,256."),
        (("--d-k", "0"), "d_k are at least 1 and below 2^63; got 0", ""),
        (("--keys", "1"), "keys are at least 2", ""),
        (("--keys", ""), "keys has at least one value; got an empty list", ""),
        (("--keys", "4,,8"), "keys has at least one value; got nothing between two commas of '4,,8'", ""),
        (("--scale", "sqrtdk"), "a scale is one of", "Did you mean sqrt_dk"),
        (("--distribution", "student"), "a distribution is one of", "Did you mean student_t"),
        (("--engine", "rai"), "an engine is one of local, pool, ray; got 'rai'", "Did you mean 'ray'?"),
        (("--ray-address", "auto"), "an address is for the engine 'ray'", ""),
    ],
)
def test_bad_values(arguments: tuple[str, ...], error: str, hint: str, tmp_path: Path) -> None:
    done = run(*arguments, "--output", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"Error: {error}")
    assert f"Hint: {hint}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_output_is_needed_and_never_replaced_unasked() -> None:
    assert "--output" in run(*SMALL).stderr
    run(*SMALL, "--output", "out")
    other = run(*SMALL, "--rows", "17", "--output", "out")
    assert other.exit_code == 2
    assert other.stderr.startswith("Error: out holds a sweep of another grid: rows is 16 there and 17 here\nHint: ")
    assert run(*SMALL, "--rows", "17", "--output", "out", "--force").exit_code == 0


@pytest.mark.full
def test_ctrl_c_keeps_what_ended_and_ends_the_workers(tmp_path: Path) -> None:
    """As a terminal sends it: to every process of the group."""
    arguments = ("--d-k", "64", "--keys", "128", "--seeds", "30", "--rows", "256", "--output", "out")
    pool = ("--engine", "pool", "--workers", "2")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with python("-m", "sqrtdk", "lab", "sweep", *arguments, *pool, **streams) as process:
        until(lambda: list(tmp_path.glob("out/part-*.parquet")))
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert stdout == ""
    assert stderr == "What ended is kept in out; the same command goes on with the rest.\nInterrupted.\n"
    assert psutil.wait_procs(workers, timeout=120)[1] == []
    again = run(*arguments, "--json")
    assert again.exit_code == 0, again.stderr
    document = json.loads(again.stdout)
    assert document["reused"] > 0
    assert document["computed"] + document["reused"] == document["cells"] == 60


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_bar_on_a_terminal_only(tmp_path: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "sqrtdk", "lab", "sweep", *SMALL, "--output", "out", "--json"],
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    document, _ = process.communicate()
    assert process.returncode == 0
    assert json.loads(document)["cells"] == 8
    assert b"8/8" in shown
