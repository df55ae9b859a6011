"""The program on other systems, as far as this one can show them: without what only POSIX has, without docstrings, in a
folder that can't be written, and with file names of any bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.program import environment

pytestmark = pytest.mark.full
# What Python lacks elsewhere, before anything of ours is imported, but for what goes by `sys.platform`, as torch does:
# that is mypy's, which reads the package as for Windows.
NO_POSIX = """
import multiprocessing, os, runpy, signal, sys, torch

for name in ("fork", "forkpty", "register_at_fork", "sched_getaffinity", "O_NOFOLLOW", "O_NONBLOCK"):
    delattr(os, name)
for name in ("SIGHUP", "SIGALRM", "alarm"):
    delattr(signal, name)
for name in ("resource", "pwd", "grp", "termios", "tty", "pty"):
    sys.modules[name] = None
multiprocessing.set_start_method("spawn")
sys.argv[:] = sys.argv[1:]
if sys.argv[0] == "sqrtdk":
    runpy.run_module("sqrtdk", run_name="__main__")
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
WATCHED = """
import sys, torch, sqrtdk

model, x = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0), torch.randn(2, 5, 16)
with sqrtdk.watch(model, every=1, to=sys.argv[1], sinks=[f"jsonl:{sys.argv[1]}.jsonl"]) as watch:
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        watch.step(loss)
"""
DEMO = ("check", "demo:unscaled", "--laws", "none", "--json")


def run(folder: Path, *words: str, python: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, *words]
    settings = environment() | variables
    return subprocess.run(
        command, cwd=folder, env=settings, capture_output=True, encoding="utf-8", errors="surrogateescape", timeout=600,
        check=False,
    )  # fmt: skip


def same(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    plain = run(folder, "-m", "sqrtdk", *DEMO)
    assert done.returncode == plain.returncode == 1, done.stderr
    documents = [json.loads(each.stdout) for each in (done, plain)]
    assert documents[0]["calls"] == documents[1]["calls"]
    assert documents[0]["findings"] == documents[1]["findings"]


def test_without_what_posix_has(tmp_path: Path) -> None:
    same(run(tmp_path, "-c", NO_POSIX, "sqrtdk", *DEMO), tmp_path)
    (tmp_path / "watched.py").write_text(WATCHED, encoding="utf-8")
    done = run(tmp_path, "-c", NO_POSIX, "watched.py", "run")
    assert done.returncode == 0, done.stderr
    done = run(tmp_path, "-c", NO_POSIX, "sqrtdk", "watch", "show", "run", "--json", "--fail-on", "never")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()) >= 2


def test_without_docstrings_and_assertions(tmp_path: Path) -> None:
    same(run(tmp_path, "-m", "sqrtdk", *DEMO, python=("-OO",)), tmp_path)
    assert run(tmp_path, "-m", "sqrtdk", "check", "--help", python=("-OO",)).stdout.startswith("Usage: ")


@pytest.mark.skipif(sys.platform == "win32", reason="names of Windows are text")
def test_reports_whose_names_are_odd(tmp_path: Path) -> None:
    odd = [tmp_path / os.fsdecode(name) for name in (b"a\nb.html", b"\xff.json")]
    done = run(
        tmp_path, "-m", "sqrtdk", *DEMO[:-1], "--html", *map(str, odd[:1]), "--output", str(odd[1]), LC_ALL="C",
        PYTHONUTF8="0", PYTHONCOERCECLOCALE="0",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert odd[0].read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert json.loads(odd[1].read_bytes())["exit_code"] == 1
    assert "b.html" in done.stderr
    assert "\nb.html" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root mounts")
def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    """No folder for temporary files either: all is read, and a report says why it is not written."""
    readonly = "mount --bind {0} {0} && mount -o remount,ro,bind {0}"
    places = " && ".join(readonly.format(place) for place in ("/tmp", "/var/tmp"))
    if subprocess.run(["unshare", "-m", "sh", "-c", places], capture_output=True, check=False).returncode:
        pytest.skip("no mounts of its own here")
    command = ["unshare", "-m", "sh", "-c", f'{places} && cd /tmp && exec "$@"', "sh", sys.executable, "-m", "sqrtdk"]
    for words, code in ((DEMO, 1), ((*DEMO[:-1], "--html", "/tmp/report.html"), 2)):
        done = subprocess.run([*command, *words], env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    assert "/tmp" in done.stderr
