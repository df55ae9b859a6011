"""How the process ends: Ctrl-C at any moment, children that come back, streams that the model's code breaks.

The model sends the signals itself, at moments that a clock would only hit by chance.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.program import Warm, environment

STEPS = 25

NETS = """
import atexit, ctypes, multiprocessing, os, signal, sys, threading, time
import torch
from torch import nn

x = (torch.ones(1, 3, 8),) * 3
libc = ctypes.CDLL(None)

def net():
    return nn.MultiheadAttention(8, 2), x

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

# ---- streams
class Odd:
    isatty = encoding = None
    def write(self, text): raise RuntimeError("write")
    def flush(self): raise RuntimeError("flush")

def closes_1(): os.close(1); return net()
def closes_2(): os.close(2); return net()
def closes_all(): [os.close(n) for n in (0, 1, 2)]; return net()
def closes_stdout(): sys.stdout.close(); sys.__stdout__.close(); return net()
def closes_stderr(): sys.stderr.close(); sys.__stderr__.close(); return net()
def drops_stdout(): sys.stdout = sys.__stdout__ = None; return net()
def drops_stderr(): sys.stderr = sys.__stderr__ = None; return net()
def replaces(): sys.stdout = sys.stderr = Odd(); return net()

def talks():
    def talk():
        while True:
            os.write(1, b"raw\\n")
            print("printed", flush=True)
            sys.__stdout__.write("original\\n")
            sys.__stdout__.flush()
    threading.Thread(target=talk, daemon=True).start()
    return net()

def talks_at_exit():
    def late():
        time.sleep(0.5)
        os.write(1, b"late\\n")
    threading.Thread(target=late).start()
    atexit.register(print, "at exit")
    atexit.register(libc.puts, b"C at exit")
    return net()

# ---- children
class Forks(nn.MultiheadAttention):
    def forward(self, *arguments):
        if (child := os.fork()):
            os.waitpid(child, 0)
        return super().forward(*arguments)

def forks():
    if (child := os.fork()):
        os.waitpid(child, 0)
    return net()

def forks_on(): os.fork(); return net()
def child_raises():
    if os.fork() == 0:
        raise ValueError("of the child")
    return net()
def child_exits():
    if os.fork() == 0:
        sys.exit(3)
    return net()
def child_interrupts():
    if os.fork() == 0:
        raise KeyboardInterrupt
    return net()
def forks_forward(): return Forks(8, 2), x
def pool():
    with multiprocessing.get_context("fork").Pool(2) as workers:
        assert workers.map(abs, [1, -2]) == [1, 2]
    return net()

# ---- Ctrl-C
class Interrupts(nn.MultiheadAttention):
    times = 1
    def forward(self, *arguments):
        for _ in range(self.times):
            interrupt()
        return super().forward(*arguments)

class Twice(Interrupts):
    times = 2

class Masks(nn.MultiheadAttention):
    def forward(self, *arguments):
        try:
            interrupt()
            time.sleep(1)
        except KeyboardInterrupt:
            raise RuntimeError("something else") from None

class Swallows(nn.MultiheadAttention):
    def forward(self, *arguments):
        try:
            interrupt()
            time.sleep(1)
        except BaseException:
            pass
        return super().forward(*arguments)

class Ignores(nn.MultiheadAttention):
    class Finaliser:
        def __del__(self):
            interrupt()
            time.sleep(1)
    def forward(self, *arguments):
        self.Finaliser()
        time.sleep(1)
        return super().forward(*arguments)

class Stubborn(nn.MultiheadAttention):
    def forward(self, *arguments):
        while True:
            try:
                interrupt()
                time.sleep(1)
            except BaseException:
                pass

def in_factory(): interrupt(); return net()
def in_forward(): return Interrupts(8, 2), x
def twice(): return Twice(8, 2), x
def masked(): return Masks(8, 2), x
def swallowed(): return Swallows(8, 2), x
def ignored(): return Ignores(8, 2), x
def stubborn(): return Stubborn(8, 2), x

def at_exit(): atexit.register(interrupt); return net()
def after_python():
    libc.__cxa_atexit(getattr(libc, "raise"), ctypes.c_void_p(signal.SIGINT), None)
    return net()
def in_a_thread_that_stays():
    def stay():
        threading.main_thread().join()  # the main thread waits for this one: the program has ended
        for _ in range(100):
            time.sleep(0.05)
            interrupt()
    threading.Thread(target=stay).start()
    return net()
def resets():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    atexit.register(interrupt)
    return net()

def on_write(number):
    real = os.fsync
    def fsync(descriptor):
        os.kill(os.getpid(), number)
        real(descriptor)
    os.fsync = fsync
    return net()
def while_written(): return on_write(signal.SIGINT)
def terminated_while_written(): return on_write(signal.SIGTERM)
"""
MODULES = {"nets.py": NETS}


def reports(folder: Path) -> list[str]:
    """What is in the folder beside the model's code."""
    return sorted(name for name in os.listdir(folder) if name not in ("nets.py", "__pycache__"))


STREAMS = ["closes_1", "closes_2", "closes_all", "closes_stdout", "closes_stderr", "drops_stdout", "drops_stderr"]


@pytest.mark.parametrize("what", [*STREAMS, "replaces", "talks"])
def test_json_stays_json(sqrtdk: Warm, nets: Path, what: str) -> None:
    done = sqrtdk(f"nets:{what}", "--json", "--html", "r.html", cwd=nets)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["class"] == "MultiheadAttention"
    assert "1 attention call: 1 exact." in done.stderr
    assert reports(nets) == ["r.html"]
    assert (nets / "r.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_json_stays_json_to_the_end(sqrtdk: Warm, nets: Path) -> None:
    done = sqrtdk("nets:talks_at_exit", "--json", cwd=nets, to_the_end=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0
    for word in ("late", "at exit", "C at exit"):
        assert word in done.stderr.splitlines()


CHILDREN = ["forks", "forks_on", "child_raises", "child_exits", "child_interrupts", "forks_forward", "pool"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", CHILDREN)
def test_a_child_writes_no_report(sqrtdk: Warm, nets: Path, what: str) -> None:
    done = sqrtdk(f"nets:{what}", "--json", "--html", "r.html", cwd=nets)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0
    lines = [line for line in done.stderr.splitlines() if "report" in line or "attention call" in line]
    assert len(lines) == 2, done.stderr
    assert "Error" not in done.stderr
    assert reports(nets) == ["r.html"]


@pytest.mark.parametrize("what", ["in_factory", "in_forward", "twice", "masked", "ignored", "stubborn"])
def test_ctrl_c_ends_in_130(sqrtdk: Warm, nets: Path, what: str) -> None:
    done = sqrtdk(f"nets:{what}", "--json", "--output", "r.json", cwd=nets)
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    assert "report" not in done.stderr
    assert "Traceback" not in done.stderr
    assert reports(nets) == []


def test_a_swallowed_ctrl_c_ends_in_the_result(sqrtdk: Warm, nets: Path) -> None:
    done = sqrtdk("nets:swallowed", "--json", "--laws", "none", cwd=nets)  # a second Ctrl-C leaves at once
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0


@pytest.mark.parametrize("what", ["at_exit", "after_python", "in_a_thread_that_stays", "resets"])
def test_ctrl_c_after_the_report_changes_nothing(sqrtdk: Warm, nets: Path, what: str) -> None:
    done = sqrtdk(f"nets:{what}", "--json", "--html", "r.html", cwd=nets, to_the_end=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0
    assert "HTML report: r.html" in done.stderr
    assert "Traceback" not in done.stderr
    assert reports(nets) == ["r.html"]


@pytest.mark.parametrize(("what", "code"), [("while_written", 130), ("terminated_while_written", -signal.SIGTERM)])
def test_a_signal_leaves_no_half_file(sqrtdk: Warm, nets: Path, what: str, code: int) -> None:
    done = sqrtdk(f"nets:{what}", "--output", "r.json", cwd=nets)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "report" not in done.stderr
    assert "Traceback" not in done.stderr
    assert reports(nets) == ["r.json"]
    json.loads((nets / "r.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2, 3])
def test_ctrl_c_at_any_moment(tmp_path: Path, times: int) -> None:
    """From the start of our code to the end of the process, in equal steps."""
    ready = "import sys, sqrtdk.cli; print(file=sys.stderr, flush=True); sys.argv[0] = 'sqrtdk'; sqrtdk.cli.main()"
    command = [sys.executable, "-c", ready, "check", "demo", "--seq-len", "8", "--json", "--html", "r.html", "--force"]

    def run(delay: float | None) -> tuple[int, float]:
        with subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
        ) as process:
            assert process.stderr is not None
            process.stderr.readline()
            start = time.monotonic()
            if delay is not None:
                time.sleep(delay)
                for _ in range(times):
                    process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=120)
            took = time.monotonic() - start
        left = os.listdir(tmp_path)
        assert "Traceback" not in error
        assert left in ([], ["r.html"])
        assert "HTML report" not in error or left == ["r.html"]
        if process.returncode == 0:
            json.loads(out)
        return process.returncode, took

    code, whole = run(None)
    assert code == 0
    codes = [run(whole * step / STEPS)[0] for step in range(1, STEPS + 1)]
    assert set(codes) <= {0, 130}, codes
    assert 130 in codes
