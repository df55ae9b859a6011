"""`sqrtdk watch show, compare`: what is printed, written and served, exit codes, errors, and no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.watched_runs import STEPS, head_row, step_row
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
    calls.append(["show", run, "--html", str(tmp_path / "p.html")])
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


def test_a_run_whose_writer_was_killed_is_called_so(tmp_path: Path) -> None:
    from sqrtdk.monitor.folder import RunWriter

    with RunWriter(tmp_path / "run", model={}, settings={}) as writer:
        writer.write([head_row(10, "h", 0)], [step_row(step, 0) for step in range(1, 11)], [])
    assert "The writer" not in _watch("show", tmp_path / "run").stdout
    (tmp_path / "run" / "lock").touch()  # left behind, and held by no process
    done = _watch("show", tmp_path / "run", "--html", tmp_path / "page.html")
    assert done.stdout.count("The writer was killed after step 10; what it had not written is lost.") == 1
    assert "The writer was killed after step 10" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert json.loads(_watch("show", tmp_path / "run", "--json").stdout)["writer"] == "killed"


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
@pytest.mark.parametrize("verb", ["show", "compare"])
def test_exit_codes(verb: str, run: str, bar: str, code: int, runs: dict[str, Path], tmp_path: Path) -> None:
    more = {"show": ["--html", tmp_path / "page.html"], "compare": [runs["healthy"]]}
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
        ("show", runs["healthy"], "--html", target),
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
        assert _watch("show", tmp_path, "--html", tmp_path / "report.html", "--force").returncode == 0
    assert json.loads(_watch("show", tmp_path, "--json").stdout)["last_step"] == 20
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count("<section") > 5


WRITER = """
import sys, time
from sqrtdk.monitor.folder import RunWriter
from tests.monitor.watched_runs import alarms_of, head_row, step_row
with RunWriter(sys.argv[1], model={}, settings={}) as writer:
    for first in range(1, 1000, 10):
        steps = [step_row(step, 0) for step in range(first, first + 10)]
        writer.write([head_row(first + 9, "h", 0)], steps, alarms_of(first) if first == 11 else [])
        print(first + 9, flush=True)
        if sys.stdin.readline() == "":  # the test goes on to the next part, or ends the writer
            break
"""


@contextlib.contextmanager
def _running(command: list[str], **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that takes Ctrl-C, and is gone with the test, however that ends."""

    def take_interrupts() -> None:  # whoever runs the tests may have them ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, text=True, preexec_fn=take_interrupts, **streams) as running:
        try:
            yield running
        except BaseException:
            running.kill()
            raise


@contextlib.contextmanager
def _writer(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A second process that writes a part for each line that it gets, and ends at the end of its input."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": Path(__file__).parents[2]}
    with _running([sys.executable, "-c", WRITER, str(folder)], **pipes) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        yield writer


def _live(folder: Path, *options: str, **streams: Any) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "sqrtdk", "watch", "show", str(folder), *options]
    return _running(command, stderr=subprocess.PIPE, **streams)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("end", ["close", "kill"])
def test_follow_draws_until_the_writer_is_gone_and_says_how(end: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _writer(tmp_path / "run") as writer:
        assert writer.stdin is not None
        with out.open("w") as stream, _live(tmp_path / "run", "--follow", stdout=stream) as shown:
            _wait(lambda: "steps 1 to 10," in out.read_text())
            assert "a logit of 15" not in out.read_text()
            writer.stdin.write("\n")
            writer.stdin.flush()
            _wait(lambda: "steps 1 to 20," in out.read_text() and "a logit of 15" in out.read_text())
            assert shown.poll() is None, "the writer has only paused"
            if end == "kill":
                writer.kill()
            else:
                writer.stdin.close()
            assert shown.wait(120) == 1, "the exit code of the alarms, as without --follow"
            assert shown.stderr is not None
            how = {"close": "The writer has ended at step 20.", "kill": "The writer was killed after step 20; "}[end]
            assert how in shown.stderr.read()


def test_follow_ends_with_ctrl_c(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _writer(tmp_path / "run") as writer:
        with out.open("w") as stream, _live(tmp_path / "run", "--follow", stdout=stream) as shown:
            _wait(lambda: "steps 1 to 10," in out.read_text())
            os.kill(shown.pid, signal.SIGINT)
            assert shown.stderr is not None
            assert "Interrupted." in shown.stderr.read()
        assert shown.returncode == 130
        assert writer.stdin is not None
        writer.stdin.close()


def _get(address: str, **headers: str) -> tuple[int, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=named), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_served_page_follows_the_run_and_answers_to_itself_alone(tmp_path: Path) -> None:
    with _writer(tmp_path / "run") as writer, _live(tmp_path / "run", "--serve", "0", "--lang", "en") as served:
        assert writer.stdin is not None
        assert served.stderr is not None
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/", served.stderr.readline())
        status, page = _get(address)
        assert (status, "(1–10)" in page) == (200, True)
        first = json.loads(_get(f"{address}state")[1])
        assert first["writer"] == "writing"
        assert f'data-mark="{first["mark"]}"' in page, "the page is not told to load itself again"
        writer.stdin.write("\n")
        writer.stdin.flush()
        _wait(lambda: json.loads(_get(f"{address}state")[1])["mark"] != first["mark"])
        assert "(1–20)" in _get(address)[1]
        for status, request in (
            (421, {"Host": "rebound.example"}),
            (403, {"Origin": "https://other.example"}),
            (403, {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}),
            (200, {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}),
        ):
            assert _get(address, **request)[0] == status, request
        assert _get(f"{address}run.json")[0] == 404
        writer.kill()
        _wait(lambda: json.loads(_get(f"{address}state")[1])["writer"] == "killed")
        os.kill(served.pid, signal.SIGINT)
        assert "Interrupted." in served.stderr.read()
    assert served.returncode == 130


def _wait(there: Callable[[], bool]) -> None:
    for _ in range(1200):
        if there():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come within a minute")
