"""One writer a folder, and folders that a run can't go into: one clear error each, and nothing in them is touched."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sqrtdk.errors import OutputError, RunFolderError
from sqrtdk.monitor.reading import read_run
from sqrtdk.store.lock import Lock, locked, writer_of
from tests.monitor.run_records import MODEL, parts, rows, whole, writer, written
from tests.support.paths import with_tests

_HOLD = """
import os, sys, time
from tests.monitor.run_records import Path, rows, writer
run = writer(Path(sys.argv[1]))
run.write(*rows(range(3)))
if not os.fork():
    print(os.getpid(), flush=True)  # by the worker: what it does at its start is behind it
time.sleep(300)
"""


def _state(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    me = f"process {os.getpid()} on '{socket.gethostname()}'"
    with writer(tmp_path) as run:
        run.write(*rows(range(3)))
        for _ in range(2):
            with pytest.raises(OutputError, match=re.escape(f"another writer has {tmp_path}: {me}")):
                writer(tmp_path)
        run.write(*rows(range(3, 5)))
    run.close()
    with pytest.raises(OutputError, match="was closed"):
        run.write(*rows([5]))
    with writer(tmp_path) as other:
        assert other.attempt == 2
    assert whole(read_run(tmp_path), 4)


def test_a_killed_writer_lets_go_though_a_worker_of_it_lives_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=with_tests()) as holder:
        assert holder.stdout
        worker = int(holder.stdout.readline())
        try:
            with pytest.raises(OutputError, match=f"another writer has .*: process {holder.pid} on "):
                writer(tmp_path)
            assert writer_of(tmp_path) == "writing"
            holder.kill()
            holder.wait()
            os.kill(worker, 0)  # it is there
            assert writer_of(tmp_path) == "killed"
            written(tmp_path, 8)
        finally:
            os.kill(worker, 9)
    assert whole(read_run(tmp_path), 8)


def test_a_look_for_the_writer_hinders_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look has the lock for an instant: a writer that begins then waits for it, and is not refused."""
    assert writer_of(tmp_path) == "ended"
    (tmp_path / "lock").touch()
    assert [writer_of(tmp_path), writer_of(tmp_path)] == ["killed", "killed"]
    with (tmp_path / "lock").open() as looked:
        fcntl.flock(looked, fcntl.LOCK_SH)
        monkeypatch.setattr("sqrtdk.store.lock.time.sleep", lambda seconds: fcntl.flock(looked, fcntl.LOCK_UN))
        with writer(tmp_path):
            assert writer_of(tmp_path) == "writing"
    assert writer_of(tmp_path) == "ended"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_lock_that_is_no_file_says_nothing_of_a_writer(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "lock")
    assert writer_of(tmp_path) == "unknown"


def test_a_lock_that_its_owner_removes_while_another_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other would hold a file that no third writer opens."""
    take, path = Lock._take, tmp_path / "lock"
    removed: list[Path] = []

    def late(lock: Lock, folder: Path) -> str:
        note = take(lock, folder)
        if not removed:
            path.unlink()
            removed.append(path)
        return note

    monkeypatch.setattr(Lock, "_take", late)
    with locked(tmp_path) as lock:
        assert json.loads(path.read_text())["pid"] == os.getpid()
        lock.check()
        with pytest.raises(OutputError, match="another writer has"):
            Lock(tmp_path)
    assert not path.exists()


def test_a_forked_child_does_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writer(tmp_path) as run:
        me = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: me + 1)
        with pytest.raises(OutputError, match=f"process {me + 1} writes into .*, which process {me} opened"):
            run.write(*rows([0]))
        run.close()
        monkeypatch.undo()
        run.write(*rows([0]))


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with writer(tmp_path) as one:
        reason = "No locks available): a second writer is noticed only when it has begun"
        assert one.notes == (f"{tmp_path} can't be locked ({reason}",)
        one.write(*rows(range(3)))
        with writer(tmp_path) as other:
            other.write(*rows(range(3, 5)))
            with pytest.raises(OutputError, match=f"another writer took {tmp_path} over: process {os.getpid()} on "):
                one.write(*rows(range(3, 6)))
            other.write(*rows(range(5, 7)))
    assert whole(read_run(tmp_path), 6)


def test_a_system_that_has_no_locks_and_removes_no_open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Windows is: the lock's file is closed before it is removed, and its absence still says that none writes."""

    def remove(path: Path) -> None:
        held = [os.path.realpath(number) for number in Path("/proc/self/fd").iterdir()]
        assert str(path) not in held
        path.unlink()

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr("sqrtdk.store.lock.remove", remove)
    with Lock(tmp_path) as lock:
        assert "this system has none" in lock.note
        assert writer_of(tmp_path) == "unknown"
    assert writer_of(tmp_path) == "ended"


def test_a_folder_that_was_moved_away(tmp_path: Path) -> None:
    with writer(tmp_path / "run") as run:
        (tmp_path / "run").rename(tmp_path / "old")
        with pytest.raises(OutputError, match="lock is gone: the directory was moved or removed"):
            run.write(*rows([0]))
        with writer(tmp_path / "run"), pytest.raises(OutputError, match=r"another writer took .* over"):
            run.write(*rows([0]))


def _stranger(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "a\x1b[31m").write_bytes(b"")


def _parts_alone(folder: Path) -> None:
    written(folder, 3)
    (folder / "run.json").unlink()


def _changed(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        written(folder, 3)
        there = json.loads((folder / "run.json").read_text())
        del there["checksum"]  # as an older version wrote it
        (folder / "run.json").write_text(json.dumps({**there, **changes}))

    return change


def _text(text: str) -> Any:
    return lambda folder: (folder / "run.json").write_text(text)


_ATTEMPT = {"number": 1, "first_step": 0, "started": 0.0, "settings": None}
_OTHER = {**MODEL, "heads": 4, "layers": 1}


@pytest.mark.parametrize(
    ("prepare", "kind", "message"),
    [
        (_stranger, OutputError, r"holds no run, as there is no run.json, and is not empty: 'a\\x1b\[31m', 'model.saf"),
        (_parts_alone, OutputError, "holds no run, as there is no run.json, and is not empty: 'parts'"),
        (_changed(model=_OTHER), RunFolderError, "another model: heads is '4' there and '3' here; layers is '1' there"),
        (_changed(model=None), RunFolderError, "of another model: it is 'None' there and "),
        (_changed(schema_version=2), RunFolderError, "of schema version '2'; this version of sqrtdk has 1"),
        (_changed(schema_version=True), RunFolderError, "of schema version 'True'"),
        (_changed(attempts=[_ATTEMPT, _ATTEMPT]), RunFolderError, "the numbers of its attempts don't increase"),
        (
            _changed(attempts=[{**_ATTEMPT, "number": 0}]),
            RunFolderError,
            r"\[0\]\.number is '0'; it is from 1 to ",
        ),
        (_changed(attempts=[{**_ATTEMPT, "first_step": 0.5}]), RunFolderError, r"first_step is '0.5'; expected int"),
        (_changed(attempts=[{"number": 1}]), RunFolderError, r"attempts\[0\] lacks 'first_step'"),
        (_changed(attempts=[{**_ATTEMPT, "parts": -1}]), RunFolderError, "parts is '-1'; it is from 0 to "),
        (_changed(attempts=[{**_ATTEMPT, "last_step": True}]), RunFolderError, r"last_step is 'True'; expected int"),
        (_changed(attempts=[7]), RunFolderError, r"attempts\[0\] is '7'; expected object"),
        (_changed(attempts={}), RunFolderError, "its attempts are no list"),
        (_text("[1]"), RunFolderError, "is not that of a run: it has no 'schema_version'"),
        (_text('{"schema_version": 1,'), RunFolderError, "is not JSON"),
        (_text('{"schema_version": 1, "schema_version": 1}'), RunFolderError, "has the name 'schema_version' twice"),
        (_text("[" * 100_000), RunFolderError, "is nested too deeply"),
        (_text(" " * (2**22 + 1)), RunFolderError, "it has 4194305 bytes; at most 4194304 are read"),
    ],
)
def test_a_folder_of_something_else(prepare: Any, kind: type[Exception], message: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    before = _state(tmp_path)
    with pytest.raises(kind, match=message) as raised:
        writer(tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert getattr(raised.value, "hint", "")
    assert _state(tmp_path) == before
    if kind is RunFolderError and "another model" not in message and "of another" not in message:
        with pytest.raises(RunFolderError, match=message):
            read_run(tmp_path)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(OutputError, match=r"cannot make the directory .*: File exists"):
        writer(tmp_path / "run")
    with pytest.raises(OutputError, match=r"cannot make the directory .*: Not a directory"):
        writer(tmp_path / "run" / "deeper")


def test_a_model_that_run_json_cannot_hold(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(30):
        deep = [deep]
    with pytest.raises(RunFolderError, match="the model is nested too deeply"):
        writer(tmp_path / "run", model=deep)
    with pytest.raises(RunFolderError, match="the settings has 1048579 bytes of JSON; 1048576 are the limit"):
        writer(tmp_path / "run", settings="a" * 2**20)
    assert not (tmp_path / "run").exists()


def test_what_a_killed_beginning_leaves_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("{")
    (tmp_path / "parts").mkdir()
    (tmp_path / ".run.json.0123456789ab.tmp").write_text("{")
    written(tmp_path, 3)
    assert whole(read_run(tmp_path), 3)
    assert len(parts(tmp_path)) == 1
    assert not list(tmp_path.glob(".*"))
