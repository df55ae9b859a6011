"""`sqrtdk watch show, report, compare`: what is printed and written, exit codes, errors, and no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.watched_runs import STEPS, alarms_of, head_row, step_row
from tests.support.program import called


def _watch(*arguments: object) -> subprocess.CompletedProcess[str]:
    return called("watch", *arguments, COLUMNS="110")


def test_help_and_reading_a_run_need_no_torch(runs: dict[str, Path], tmp_path: Path) -> None:
    run = str(runs["unscaled"])
    calls = [
        ["--help"],
        ["show", run],
        ["show", run, "--json"],
        ["compare", run, run, "--html", str(tmp_path / "c.html")],
    ]
    calls.append(["report", run, "--output", str(tmp_path / "p.html")])
    code = f"""
import sys
from sqrtdk.cli import _app
for arguments in {calls!r}:
    try:
        _app(["watch", *arguments])
    except SystemExit as end:
        assert not end.code, arguments
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("False\n"), done.stderr
    assert "show" in done.stdout
    assert (tmp_path / "p.html").stat().st_size > 10000


def test_show_draws_a_line_for_each_attention(runs: dict[str, Path]) -> None:
    done = _watch("show", runs["unscaled"], "--statistic", "scale_ratio,peak")
    lines = done.stdout.partition("\nalarms  ")[0].splitlines()
    (line,) = [line for line in lines if line.startswith("blocks.1.1") and line.split()[2] == "4"]
    assert line.split()[-1] == str(STEPS)
    assert "\nalarms  " in done.stdout
    assert "max_logit  the worst" not in done.stdout


@pytest.mark.parametrize(
    ("run", "bar", "code"),
    [
        ("healthy", "warn", 0),
        ("healthy", "unmeasured", 0),
        ("unscaled", "warn", 1),
        ("unscaled", "never", 0),
        ("sick", "fail", 1),
        ("sick", "never", 0),
    ],
)
@pytest.mark.sampled(9)
@pytest.mark.parametrize("verb", ["show", "report", "compare"])
def test_exit_codes(verb: str, run: str, bar: str, code: int, runs: dict[str, Path], tmp_path: Path) -> None:
    more = {"report": ["--output", tmp_path / "page.html"], "compare": [runs["healthy"]]}
    assert _watch(verb, runs[run], *more.get(verb, []), "--fail-on", bar).returncode == code


def test_json_is_one_document(runs: dict[str, Path], tmp_path: Path) -> None:
    document = json.loads(_watch("show", runs["unscaled"], "--json").stdout)
    assert document["samples"][-1] == STEPS
    assert _watch("show", runs["unscaled"], "--output", tmp_path / "run.json", "--fail-on", "never").returncode == 0
    assert json.loads((tmp_path / "run.json").read_text()) == document
    two = json.loads(_watch("compare", runs["healthy"], runs["unscaled"], "--json").stdout)
    assert two["b"]["sites"] == document["sites"]


def test_nothing_is_overwritten_without_force(runs: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.write_text("mine")
    for arguments in (
        ("show", runs["healthy"], "--output", target),
        ("report", runs["healthy"], "--output", target),
        ("compare", runs["healthy"], runs["sick"], "--html", target),
        ("compare", runs["healthy"], runs["sick"], "--output", target),
    ):
        done = _watch(*arguments)
        assert done.returncode == 2
        assert "exists and is not overwritten" in done.stderr
        assert target.read_text() == "mine"
        assert _watch(*arguments, "--force").returncode in (0, 1)
        assert target.read_text() != "mine"
        target.write_text("mine")


def test_the_page_lies_in_the_run_which_can_go_on(tmp_path: Path) -> None:
    from sqrtdk.monitor.folder import RunWriter

    for first in (1, 11):
        with RunWriter(tmp_path, model={}, settings={}) as writer:
            steps = range(first, first + 10)
            heads = [head_row(step, "h", 0) for step in steps if step % 5 == 0]
            writer.write(heads, [step_row(step, 0) for step in steps], [])
        assert _watch("report", tmp_path, "--force").returncode == 0
    assert json.loads(_watch("show", tmp_path, "--json").stdout)["last_step"] == 20
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count("<section") > 5


def test_follow_draws_what_is_written_meanwhile(tmp_path: Path) -> None:
    from sqrtdk.monitor.folder import RunWriter

    with RunWriter(tmp_path / "run", model={}, settings={}) as writer:
        steps = range(1, 11)
        writer.write([head_row(10, "h", 0)], [step_row(step, 0) for step in steps], [])
        command = [sys.executable, "-m", "sqrtdk", "watch", "show", str(tmp_path / "run"), "--follow"]
        out = tmp_path / "out"

        def take_interrupts() -> None:  # whoever runs the tests may have them ignored
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        pipes: Any = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": take_interrupts}
        with out.open("w") as stream, subprocess.Popen(command, stdout=stream, **pipes) as shown:
            try:
                _wait(lambda: "steps 1 to 10," in out.read_text())
                assert "a logit of 15" not in out.read_text()
                more = [step_row(step, 0) for step in range(11, 21)]
                writer.write([head_row(20, "h", 0)], more, alarms_of(11))
                _wait(lambda: "steps 1 to 20," in out.read_text() and "a logit of 15" in out.read_text())
            finally:
                os.kill(shown.pid, signal.SIGINT)
            assert shown.stderr is not None
            assert "Interrupted." in shown.stderr.read()
        assert shown.returncode == 130


def _wait(there: Callable[[], bool]) -> None:
    for _ in range(1200):
        if there():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come within a minute")
