"""Whatever the model's code does to the streams or the process, stdout has the report alone, and the exit code is true.

The program runs in a process of its own here: file descriptors are the subject.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sqrtdk.cli.output import working
from tests.monitor.watched_runs import write_sick
from tests.support.program import Warm, called, environment, fresh, terminal

NETS = """
import atexit, ctypes, os, sys
import torch
from torch import nn

class Own(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class Loud(nn.MultiheadAttention):
    def forward(self, *arguments):
        os.write(1, b"written\\n")
        os.system("echo child")
        sys.__stdout__.write("original\\n")
        print("printed")
        ctypes.CDLL(None).puts(b"from C")
        return super().forward(*arguments)

class Leaves(nn.MultiheadAttention):
    def forward(self, *arguments):
        sys.exit(0)

class Raises(nn.MultiheadAttention):
    def forward(self, *arguments):
        raise Own("stop")

class Silent(nn.MultiheadAttention):
    def forward(self, *arguments):
        raise Mute

x = (torch.ones(1, 3, 8),) * 3
def loud():
    atexit.register(os.write, 1, b"at exit\\n")
    atexit.register(lambda: sys.__stdout__.write("original at exit\\n"))
    return Loud(8, 2), x
def leaves(): return Leaves(8, 2), x
def raises(): return Raises(8, 2), x
def silent(): return Silent(8, 2), x

class Modèle(nn.MultiheadAttention):
    pass

def accent(): return Modèle(8, 2), x
"""
MODULES = {"nets.py": NETS, "exits.py": "import sys\nsys.exit(0)\n"}
SAID = ["written", "child", "original", "printed", "from C", "at exit"]


@pytest.mark.full
def test_a_call_a_fork_and_a_fresh_start_say_the_same(
    sqrtdk: Warm, nets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a pipe, as a file, gets the report alone."""
    start = fresh("nets:loud", cwd=nets)
    fork = sqrtdk("nets:loud", cwd=nets, to_the_end=True)
    monkeypatch.setattr(atexit, "register", lambda *_: None)  # this process has another end
    assert start.stdout == fork.stdout == called("check", "nets:loud", "--laws", "all", cwd=nets).stdout
    assert "1 attention call" in start.stdout
    for done in (start, fork):
        assert done.returncode == 0
        assert set(SAID) <= set(done.stderr.splitlines())
    assert "original at exit" in start.stderr.splitlines()


def test_a_file_gets_the_document_alone(sqrtdk: Warm, nets: Path) -> None:
    done = sqrtdk("nets:loud", "--json", cwd=nets)
    assert json.loads(done.stdout)["model"]["class"] == "Loud"
    assert {*SAID[:-1]} <= set(done.stderr.splitlines())


def test_a_terminal_gets_the_report_alone(sqrtdk: Warm, nets: Path) -> None:
    with terminal() as (name, shown):
        done = sqrtdk("nets:loud", cwd=nets, stdout=name, to_the_end=True)
    assert "1 attention call" in shown()
    assert not set(SAID) & set(shown().split("\r\n"))
    assert set(SAID) <= set(done.stderr.splitlines())


@pytest.fixture
def folder(nets: Path) -> Path:
    """The factories, and a run that can be read without torch."""
    write_sick(nets / "run")
    return nets


SHOW = "watch show run --fail-on never"
LOUD = "check nets:loud --json --fail-on never"


@pytest.mark.parametrize("closed", ["1", "2"])
@pytest.mark.parametrize("line", [f"{SHOW} --json", pytest.param(LOUD, marks=pytest.mark.full)])
def test_a_closed_stream_is_no_error(folder: Path, closed: str, line: str) -> None:
    """From the start of the interpreter, which has no such stream then."""
    command = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", sys.executable, "-m", "sqrtdk", *line.split()]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    if closed == "2":
        json.loads(done.stdout)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (f"{SHOW} --json", 0),
        pytest.param("check demo:unscaled --json", 1, marks=pytest.mark.full),
    ],
)
def test_a_reader_that_goes_away_is_no_error(folder: Path, line: str, code: int) -> None:
    command = [sys.executable, "-m", "sqrtdk", *line.split()]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        complaint = process.stderr.read()
        assert process.wait(300) == code
    assert "Error" not in complaint
    assert "Broken" not in complaint


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{SHOW} --lang zh-CN", r"\u7b2c 1 \u6b65"),
        pytest.param("check nets:accent", r"Mod\xe8le", marks=pytest.mark.full),
    ],
)
def test_an_output_that_takes_ascii_only_is_no_error(folder: Path, line: str, words: str) -> None:
    command = [sys.executable, "-m", "sqrtdk", *line.split()]
    ascii_only = environment() | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=ascii_only)
    assert done.returncode == 0
    assert "Error" not in done.stderr
    assert words in done.stdout


def test_descriptor_1_comes_back_with_what_was_written_before(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    with working("Checking"):
        os.write(1, b"inside\n")
        ctypes.CDLL(None).puts(b"in C")
    os.write(1, b"after\n")
    captured = capfd.readouterr()
    assert captured.out == "before\nafter\n"
    assert captured.err == "inside\nin C\n"


def test_descriptor_1_comes_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), working("Checking"):
        raise ZeroDivisionError
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


@pytest.mark.parametrize(
    ("model", "word"),
    [("nets:leaves", "SystemExit"), ("nets:raises", "Own"), ("nets:silent", "Mute"), ("exits:make", "SystemExit")],
)
def test_a_model_that_leaves_is_an_error(nets: Path, model: str, word: str) -> None:
    done = called("check", model, "--json", cwd=nets)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: ")
    assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full  # `watch show --follow` ends so too, and imports less
def test_ctrl_c_from_outside_exits_130(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nopen('started', 'w').close()\ndef make():\n    time.sleep(60)\n")
    command = [sys.executable, "-m", "sqrtdk", "params", "slow:make"]

    def take_interrupts() -> None:  # a job in the background of a shell ignores them
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=take_interrupts
    ) as process:
        while not (tmp_path / "started").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        complaint = process.stderr.read()
        assert process.wait(300) == 130
    assert complaint == "Interrupted.\n"
