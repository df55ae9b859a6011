"""Whatever the model's code does to the streams or the process, stdout has the report alone, and the exit code is true.

The program runs in a process of its own here: file descriptors are the subject.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from sqrtdk.cli.errors import reported
from sqrtdk.cli.output import working
from tests.support.program import Warm, environment, fresh

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
    return Loud(8, 2), x
def leaves(): return Leaves(8, 2), x
def raises(): return Raises(8, 2), x
def silent(): return Silent(8, 2), x
"""
MODULES = {"nets.py": NETS, "exits.py": "import sys\nsys.exit(0)\n"}
SAID = ["written", "child", "original", "printed", "from C", "at exit"]


class Own(BaseException):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sqrtdk", "check", *arguments]


def test_a_pipe_gets_the_document_alone(nets: Path) -> None:
    done = fresh("nets:loud", "--json", cwd=nets)
    assert json.loads(done.stdout)["model"]["class"] == "Loud"
    for word in SAID:
        assert word in done.stderr.splitlines()


def test_a_file_gets_the_document_alone(sqrtdk: Warm, nets: Path) -> None:
    done = sqrtdk("nets:loud", "--json", cwd=nets)
    assert json.loads(done.stdout)["model"]["class"] == "Loud"
    assert {*SAID[:-1]} <= set(done.stderr.splitlines())


def test_a_terminal_gets_the_report_alone(nets: Path) -> None:
    pty = pytest.importorskip("pty")
    primary, secondary = pty.openpty()
    try:
        done = subprocess.run(
            command("nets:loud"),
            cwd=nets,
            env=environment(),
            stdout=secondary,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
        shown = os.read(primary, 65536).decode()
    finally:
        os.close(primary)
        os.close(secondary)
    assert "1 attention call" in shown
    assert not set(SAID) & set(shown.split("\r\n"))
    assert set(SAID) <= set(done.stderr.splitlines())


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_stream_is_no_error(nets: Path, closed: str) -> None:
    script = f'exec "$@" {closed}>&-'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command("nets:loud", "--json", "--fail-on", "never")],
        cwd=nets,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    if closed == "2":
        json.loads(done.stdout)


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
def test_a_model_that_leaves_is_an_error(sqrtdk: Warm, nets: Path, model: str, word: str) -> None:
    done = sqrtdk(model, "--json", cwd=nets)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (SystemExit(0), "Error: SystemExit: 0"),
        (Own("stop"), "Error: Own: stop"),
        (Mute(), "Error: Mute: (its text can't be shown: RuntimeError)"),
    ],
)
@pytest.mark.parametrize("traceback", [False, True])
def test_the_last_resort(capsys: pytest.CaptureFixture[str], error: BaseException, line: str, traceback: bool) -> None:
    with pytest.raises(typer.Exit) as caught, reported(traceback):
        raise error
    assert caught.value.exit_code == 2
    assert line in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["demo", "--text", "/dev/zero"], "not a regular file"),
        (["--batch", "100000000", "--seq-len", "1000000"], "elements"),
        (["--seed", "18446744073709551616"], "seed"),
        (["--device-map", "auto"], "device_map"),
    ],
)
def test_what_cannot_be_meant_is_refused(sqrtdk: Warm, arguments: list[str], word: str) -> None:
    done = sqrtdk(*arguments)
    assert done.returncode == 2
    assert word in done.stderr
    assert "\nHint: " in done.stderr
    assert "not one of sqrtdk's own" not in done.stderr
