"""Disks that are full, limited or read-only: one clear error, nothing half written, and what was finished stays."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sqrtdk.errors import OutputError
from sqrtdk.monitor.reading import read_run
from tests.monitor.run_records import files_up_to, parts, rows, whole, writer
from tests.support.paths import with_tests

_FILL = """
import sys
from tests.monitor.run_records import Path, parts, rows, steps, whole, writer
from sqrtdk.errors import OutputError
from sqrtdk.monitor.reading import read_run
folder = Path(sys.argv[1]) / "run"
with writer(folder) as run:
    first = 0
    try:
        for first in range(0, 10_000, 5):
            run.write(*rows(range(first, first + 5)))
    except OutputError as error:
        print(error, error.hint, sep="\\n")
    assert run.last_step == first - 1 > 10
    assert whole(read_run(folder), first - 1)
    assert not list((folder / "parts").glob(".*"))
    gone = folder / "parts" / parts(folder)[0]
    print(gone.name)
    gone.unlink()
    run.write(*rows(range(first, first + 2)))
there = read_run(folder)
assert steps(there) == list(range(5, first + 2))
assert [(damage.first_step, damage.last_step) for damage in there.damaged] == [(0, 4)]
try:
    (folder / "filler").write_bytes(bytes(10**6))
except OSError:
    pass
try:
    writer(folder)
except OutputError as error:
    print(error)
assert steps(read_run(folder)) == steps(there)
"""
_READ_ONLY = """
import subprocess, sys
from tests.monitor.run_records import Path, rows, whole, writer
from sqrtdk.errors import OutputError
from sqrtdk.monitor.reading import read_run
folder = Path(sys.argv[1]) / "run"
with writer(folder) as run:
    run.write(*rows(range(3)))
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
for where in (folder, folder.with_name("new")):
    try:
        writer(where)
    except OutputError as error:
        print(error)
assert whole(read_run(folder), 2)
"""


def _mounted(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code with a file system of 128 KiB at a folder, both in a name space that ends with it."""
    script = 'mount -t tmpfs -o size=128k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    arguments = [str(folder), sys.executable, code]
    options: Any = {"capture_output": True, "text": True, "timeout": 120, "env": with_tests()}
    return subprocess.run([*command, *arguments], check=False, **options)


@functools.cache
def _unable() -> str:
    """Why this user can't mount a file system; "" where it can."""
    try:
        done = _mounted(Path("/mnt"), "")
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


_mounts = pytest.mark.skipif("_unable()", reason="this user can't mount a file system: unshare --user --mount fails")


@_mounts
def test_a_full_disk(tmp_path: Path) -> None:
    done = _mounted(tmp_path, _FILL)
    assert not done.returncode, done.stderr
    error, hint, gone, again = done.stdout.splitlines()
    first = int(error.split()[1])
    kept = f"all up to step {first - 1} is kept"
    assert error.startswith(f"steps {first} to {first + 4} were not recorded; {kept}: cannot write {tmp_path}/run/")
    assert error.endswith(".parquet: No space left on device")
    assert hint == "Free space, and write them again."
    assert gone.startswith("attempt-1.part-000000-")
    assert "No space left on device" in again


@_mounts
def test_a_read_only_disk(tmp_path: Path) -> None:
    done = _mounted(tmp_path, _READ_ONLY)
    assert not done.returncode, done.stderr
    reopen, new = done.stdout.splitlines()
    assert reopen == f"cannot write into {tmp_path}/run: Read-only file system"
    assert new == f"cannot make the directory {tmp_path}/new: Read-only file system"


def test_a_part_that_breaks_off(tmp_path: Path) -> None:
    with writer(tmp_path) as run:
        run.write(*rows(range(5)))
        names = parts(tmp_path)
        with (
            files_up_to(5000),
            pytest.raises(
                OutputError, match=r"steps 5 to 9 were not recorded; all up to step 4 is kept: .*File too lar"
            ),
        ):
            run.write(*rows(range(5, 10)))
        assert (run.last_step, parts(tmp_path)) == (4, names)
        assert whole(read_run(tmp_path), 4)
        run.write(*rows(range(5, 12)))
    assert whole(read_run(tmp_path), 11)


def test_no_space_for_the_lock(tmp_path: Path) -> None:
    with files_up_to(50), pytest.raises(OutputError, match=r"cannot write into .*: No space left on device"):
        writer(tmp_path)
    with writer(tmp_path) as run:
        assert run.attempt == 1


def test_no_space_to_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small parts stay, and nothing is said: nothing is lost."""
    monkeypatch.setattr("sqrtdk.monitor.merge.MOST", 4)
    with writer(tmp_path) as run:
        for step in range(3):
            run.write(*rows([step]))
        largest = max(path.stat().st_size for path in (tmp_path / "parts").iterdir())
        with files_up_to(largest + 10):
            run.write(*rows([3]))
        assert len(parts(tmp_path)) == 4
        run.write(*rows([4]))
    assert whole(read_run(tmp_path), 4)
    assert not list((tmp_path / "parts").glob(".*"))
