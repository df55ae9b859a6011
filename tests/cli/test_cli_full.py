"""What can't be written ends in exit code 2, leaves no half file and the old report, and is not announced.

Full devices, limits on a file's size and, as root, a small file system are real here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.errors import check_error
from tests.support.lab_here import of_installed
from tests.support.program import Warm, called, environment

FULL = "/dev/full"
SMALL = ("--seq-len", "8")
pytestmark = pytest.mark.skipif(not os.path.exists(FULL), reason=f"needs {FULL}")

VERBS = {
    "check": ("check", "demo", *SMALL),
    "check --json": ("check", "demo", *SMALL, "--json"),
    "params": ("params",),
    "params --json": ("params", "--json"),
    "env": ("env",),
    "env --json": ("env", "--json"),
    "lab list": ("lab list",),
    "lab list --json": ("lab list", "--json"),
    "lab show": ("lab show", "var-linear"),
    "help": ("--help",),
    "help of a verb": ("check", "--help"),
    "version": ("--version",),
}
VERBS = of_installed(VERBS)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", VERBS)
def test_a_full_stdout_is_an_error(sqrtdk: Warm, name: str) -> None:
    verb, *arguments = VERBS[name]
    done = sqrtdk(*arguments, verb=verb, stdout=FULL)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("warm", [False, True])
def test_a_full_stdout_is_an_error_to_the_very_end(sqrtdk: Warm, warm: bool) -> None:
    """The interpreter's own last flush fails too, and has an exit code of its own."""
    if warm:
        done = sqrtdk("demo", *SMALL, "--json", stdout=FULL, to_the_end=True)
    else:
        command = [sys.executable, "-m", "sqrtdk", "--version"]
        with open(FULL, "w", encoding="utf-8") as full:
            done = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), timeout=300, check=False
            )
    assert done.returncode == 2
    assert [line.partition(" ")[0] for line in done.stderr.splitlines()] == ["Error:", "Hint:"]


def test_a_full_stderr_changes_nothing(sqrtdk: Warm, tmp_path: Path) -> None:
    done = sqrtdk("demo:unscaled", *SMALL, "--output", "r.json", cwd=tmp_path, stderr=FULL)
    assert done.returncode == 1
    assert "unexplained: missing" in done.stdout
    assert os.listdir(tmp_path) == ["r.json"]


def test_both_full(sqrtdk: Warm) -> None:
    assert sqrtdk("demo", *SMALL, stdout=FULL, stderr=FULL).returncode == 2


@pytest.mark.parametrize("option", ["--output", "--html"])
@pytest.mark.parametrize("target", [FULL, "fifo", "directory", "directory/", "no/such/x", "link", "name" * 70])
def test_what_is_no_place_for_a_report(tmp_path: Path, option: str, target: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("/proc/self/fd/1")  # as /dev/stdout
    check_error(called("check", "demo", *SMALL, option, target, "--force", cwd=tmp_path), "Error: cannot write ")
    assert sorted(os.listdir(tmp_path)) == ["directory", "fifo", "link"]
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(("option", "limit"), [("--output", 100), ("--html", 10_000)])
def test_a_limit_on_the_size_of_files_leaves_the_old_report(
    sqrtdk: Warm, tmp_path: Path, option: str, limit: int
) -> None:
    (tmp_path / "r").write_text("old")
    done = sqrtdk("demo", *SMALL, option, "r", "--force", cwd=tmp_path, file_bytes=limit)
    assert done.returncode == 2
    assert "File too large" in done.stderr
    assert "report" not in done.stderr
    assert (tmp_path / "r").read_text() == "old"
    assert os.listdir(tmp_path) == ["r"]


def test_a_limit_on_the_size_of_stdout(sqrtdk: Warm) -> None:
    done = sqrtdk("demo", *SMALL, "--json", file_bytes=1000)
    assert done.returncode == 2
    assert "cannot write to stdout: File too large" in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 16 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "sqrtdk", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"can't mount a file system: {error}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_leaves_the_old_report(sqrtdk: Warm, small_disk: Path) -> None:
    (small_disk / "r").write_text("old")
    done = sqrtdk("demo", *SMALL, "--html", "r", "--force", cwd=small_disk)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "report" not in done.stderr
    assert (small_disk / "r").read_text() == "old"
    assert os.listdir(small_disk) == ["r"]


NETS = """
import os, pathlib, torch
x = (torch.ones(1, 3, 8),) * 3
def vanishes():
    os.rename("out", "gone")
    return torch.nn.MultiheadAttention(8, 2), x
def becomes_a_file():
    os.rename("out", "gone")
    pathlib.Path("out").write_text("")
    return torch.nn.MultiheadAttention(8, 2), x
def is_taken():
    pathlib.Path("out/r.json").write_text("theirs")
    return torch.nn.MultiheadAttention(8, 2), x
"""
MODULES = {"nets.py": NETS}


@pytest.mark.parametrize("what", ["vanishes", "becomes_a_file", "is_taken"])
def test_a_place_that_changes_meanwhile(nets: Path, what: str) -> None:
    (nets / "out").mkdir()
    done = called("check", f"nets:{what}", "--output", "out/r.json", cwd=nets)
    check_error(done)
    assert "report: " not in done.stderr
    files = [path for path in nets.rglob("*") if path.is_file() and path.suffix in (".json", ".tmp")]
    assert [path.read_text() for path in files] == (["theirs"] if what == "is_taken" else [])
