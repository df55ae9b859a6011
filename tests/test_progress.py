"""Progress: on stderr where that is a terminal, nowhere else, and told to one listener alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import sqrtdk
from sqrtdk import _progress
from sqrtdk._progress import pass_progress_to, progress_bar, progress_counted, progress_shown, report_progress
from tests.support.lab_here import LAB
from tests.support.program import terminal, warm

WORK = """
import sys, tempfile
import sqrtdk
from sqrtdk import _progress
_progress.AFTER_S = _progress.EVERY_S = 0.0
sqrtdk.check("demo", seq_len=16)
sqrtdk.diff("demo", "demo:unscaled", seq_len=16)
sqrtdk.kv.kv_forecast("demo", kv_dtype="int8", seq_len=16)
"""
LAB_WORK = """
import sqrtdk_lab
from sqrtdk_lab.sweep import Grid, sweep
sqrtdk_lab.run("params-single", quick=True)
with tempfile.TemporaryDirectory() as folder:
    sweep(Grid(d_k=[16], keys=[8], rows=16), folder)
"""
if LAB:
    WORK += LAB_WORK
WORK += 'print("done")'

TOLD = (
    "check: applying the rules",
    "diff: running B",
    "forecast of the cache",
    *(("params-single (1 of 1)", "cells") if LAB else ()),
)


@pytest.mark.full
def test_a_terminal_shows_how_far_it_is() -> None:
    with terminal() as (name, shown):
        done = warm()(WORK, verb="-c", stderr=name, TERM="xterm", COLUMNS="120")
    assert (done.returncode, done.stdout) == (0, "done\n")
    for words in TOLD:
        assert words in shown()
    assert shown().endswith("\x1b[2K")  # the line of the bar is empty at the end


@pytest.mark.full
def test_elsewhere_it_is_silent() -> None:
    done = warm()(WORK, verb="-c", PYTHONWARNINGS="ignore")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


class Terminal:
    """A stderr that says that it is one."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Terminal]:
    """Makes stderr one, where a bar comes after so many seconds; called in the test, as pytest sets its own before."""

    def open_terminal(after_s: float) -> Terminal:
        stream = Terminal()
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr(_progress, "AFTER_S", after_s)
        monkeypatch.setenv("TERM", "xterm")
        return stream

    return open_terminal


@pytest.mark.parametrize(("variable", "value"), [("SQRTDK_PROGRESS", "0"), ("TERM", "dumb")])
def test_it_can_be_switched_off(
    stand_in: Callable[[float], Terminal], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    stream = stand_in(0.0)
    monkeypatch.setenv(variable, value)
    with progress_shown("work"):
        report_progress("half", 1, 2)
        threading.Event().wait(0.2)  # a bar would be there
    assert stream.text == ""


def test_what_is_quick_shows_nothing(stand_in: Callable[[float], Terminal]) -> None:
    stream = stand_in(60.0)
    with progress_shown("work"):
        report_progress("half", 1, 2)
    assert stream.text == ""
    assert not any(
        isinstance(thread, threading.Timer) and not thread.finished.is_set() for thread in threading.enumerate()
    )


def test_a_bar_goes_also_where_the_work_raises(stand_in: Callable[[float], Terminal]) -> None:
    stream = stand_in(0.0)

    def work() -> None:
        with progress_shown("work"):
            _until(lambda: "work" in stream.text)
            report_progress("half", 1, 1)
            assert "work: half" in stream.text
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert stream.text.endswith("\x1b[2K")
    report_progress("nobody listens", 1, 1)


def _until(true: object) -> None:
    ended = threading.Event()
    for _ in range(10_000):
        if true():  # type: ignore[operator]
            return
        ended.wait(0.01)
    raise AssertionError


def test_who_listens_is_told_and_no_bar_is_shown(stand_in: Callable[[float], Terminal]) -> None:
    stream = stand_in(0.0)
    told: list[tuple[str, int, int]] = []
    with (
        pass_progress_to(lambda *words: told.append(words)),
        progress_shown("inner"),
        progress_counted("cells") as count,
    ):
        report_progress("half", 1, 2)
        count(2, 2)
    assert told == [("half", 1, 2), ("cells", 2, 2)]
    assert stream.text == ""
    with progress_bar("outer"), progress_shown("inner"):
        pass


def test_a_check_and_a_comparison_tell_what_they_do() -> None:
    told: list[tuple[str, int, int]] = []
    with pass_progress_to(lambda *words: told.append(words)):
        sqrtdk.check("demo", seq_len=16)
        checked = [text for text, _, _ in told]
        assert checked[:3] == ["loading", "running", "judging the scales"]
        told.clear()
        sqrtdk.diff("demo", "demo:unscaled", seq_len=16)
        assert list(dict.fromkeys(text for text, _, _ in told)) == [
            "loading", "running A", "running B", "comparing the attentions",
        ]  # fmt: skip
