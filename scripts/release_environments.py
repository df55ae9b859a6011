"""Clean environments for release_check.py: made quickly, since torch, most of their size, is installed once.

Each Python gets a folder with one version of torch and what that needs. An environment of its own is new and empty but
for a path file that names this folder, so that pip takes torch as installed and puts all else, in the versions that it
chooses, into the environment itself, which is found first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = ("-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-compile")
# What is no fault of the package: this Python, or this machine, has no such release.
NOT_TO_BE_HAD = re.compile(r"No matching distribution found|requires a different Python|Could not find a version")


class StepError(Exception):
    """Why a step failed; `available` is false if the index has no such release for this Python."""

    def __init__(self, reason: str, available: bool = True) -> None:
        super().__init__(reason)
        self.available = available


def run(
    *command: str | Path, timeout: float = 3000, cwd: Path = ROOT, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program and return what it printed, as text."""
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", cwd=cwd, timeout=timeout, check=False,
        env=variables,
    )  # fmt: skip


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return pip's error, or else the last line of what a program printed."""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1]


@cache
def torch_versions(python: str) -> dict[str, bool]:
    """Return the versions of torch on pip's index, newest first, each with whether its build is one without CUDA."""
    done = run(python, "-m", "pip", "index", "versions", "torch")
    listed = re.search(r"Available versions: (.*)", done.stdout)
    versions = [version.strip() for version in listed[1].split(",")] if listed else []
    alone = sys.platform != "linux"  # elsewhere the plain build has no CUDA
    return {version.split("+")[0]: alone or f"{version.split('+')[0]}+cpu" in versions for version in versions}


@cache
def version_of(python: str) -> str:
    """Return the version of an interpreter, as 3.12.1."""
    return run(python, "-c", "import platform; print(platform.python_version())").stdout.strip()


def interpreter(folder: Path) -> Path:
    """Return the Python of an environment."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def with_torch(python: str, torch: str, place: Path) -> Path:
    """Return the folder of an environment that has this torch alone; it is made once.

    Raises:
        StepError: It can't be made.
    """
    folder = place / f"torch-{torch}-python-{version_of(python)}"
    stamp = folder / ".whole"
    if not stamp.exists():
        _new(python, folder)
        install(folder, f"torch=={torch}")
        stamp.touch()
    return folder


def environment(python: str, torch: str, place: Path, folder: Path) -> None:
    """Make a new environment that has torch and nothing else.

    Args:
        python: The interpreter.
        torch: Version of torch.
        place: Where the folders with torch lie.
        folder: The environment; one that is there is removed.

    Raises:
        StepError: It can't be made.
    """
    lent = with_torch(python, torch, place)
    _new(python, folder)
    of_packages = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages, own = (Path(run(interpreter(each), "-c", of_packages).stdout.strip()) for each in (lent, folder))
    (own / "lent.pth").write_text(f"{packages}\n", encoding="utf-8")


def install(
    folder: Path, *what: str | Path, beside: Path | None = None, variables: dict[str, str] | None = None
) -> None:
    """Install packages into an environment.

    Args:
        folder: The environment.
        what: Names or files of packages.
        beside: A folder with packages of ours, which no index has.
        variables: Of the environment, for a build from source.

    Raises:
        StepError: pip failed; `available` is false if there is no such release.
    """
    links = () if beside is None else ("--find-links", str(beside))
    done = run(interpreter(folder), *PIP, *links, *what, variables=os.environ | (variables or {}))
    if done.returncode:
        raise StepError(last_line(done), available=not NOT_TO_BE_HAD.search(done.stderr))


def _new(python: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    done = run(python, "-m", "venv", folder)
    if done.returncode:
        raise StepError(last_line(done), available=False)
