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

_FULL_FOR_A_WHILE = """
import os, sys
from tests.monitor.test_run_writing import Heads, Path, read_run, torch, watch
from sqrtdk.monitor import journal
journal.SAMPLES_A_PART = 4
mount = Path(sys.argv[1])
model, x, told = Heads(), torch.randn(1, 20, 3, 2), []
with watch(model, every=1, to=mount / "run", on_alarm=told.append) as health:
    for step in range(1, 61):
        if step == 10:
            with open(mount / "filler", "wb", buffering=0) as filler:
                try:
                    while filler.write(bytes(256)):
                        pass
                except OSError:
                    pass
        if step == 40:
            os.remove(mount / "filler")
        loss = model(x).square().mean()
        loss.backward()
        health.step(loss)
run = read_run(mount / "run")
assert run.steps["step"].to_pylist() == list(range(1, 61))
assert run.heads["step"].to_pylist() == [step for step in range(1, 61) for _ in range(20)]
assert run.damaged == ()
records = [alarm for alarm in told if alarm.name == "records"]
assert len(records) == 1, records
assert "No space left on device" in records[0].text
assert "records" in run.alarms["name"].to_pylist()
assert not list((mount / "run" / "parts").glob(".*"))
"""


def _mounted(folder: Path, code: str, size: str = "128k") -> subprocess.CompletedProcess[str]:
    """Run code with a small file system at a folder, both in a name space that ends with it."""
    script = f'mount -t tmpfs -o size={size} tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    arguments = [str(folder), sys.executable, code]
    options: Any = {"capture_output": True, "text": True, "timeout": 300, "env": with_tests()}
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


@pytest.mark.full
@_mounts
def test_a_disk_that_is_full_for_a_while_loses_nothing(tmp_path: Path) -> None:
    done = _mounted(tmp_path, _FULL_FOR_A_WHILE, "1m")
    assert not done.returncode, done.stderr


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
    monkeypatch.setattr("sqrtdk.monitor.folder.SMALL_PARTS_BEFORE_MERGE", 4)
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
