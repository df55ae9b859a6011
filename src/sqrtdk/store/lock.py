"""One writer a folder: a lock that the system releases when its process ends, killed or not."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sqrtdk import _files
from sqrtdk._records import parse_json, quote, record_from_json
from sqrtdk.errors import OutputError, RunFolderError
from sqrtdk.messages import Message
from sqrtdk.store.disk import SAFE, make, remove, take, tidy

if TYPE_CHECKING:
    from typing_extensions import Self

LOCK = "lock"  # name of the file, which is there while a writer is
_MAX_LOCK_BYTES = 1000
_LOOK_S = 0.02  # `writer_of` has the lock for less
Writer = Literal["writing", "ended", "killed", "unknown"]
_held: set[int] = set()


def _let_go() -> None:
    """Close the inherited locks in a forked child (a data loader's worker), which would outlive its parent and keep
    them."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class Lock:
    """The lock of a folder, held by this process alone from construction until `release`.

    Attributes:
        note: why a second writer would be noticed late, if the file system has no locks; otherwise "".
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            OutputError: Another writer holds it, or the folder can't be written.
        """
        self._path = folder / LOCK
        self._process, self.note = os.getpid(), ""
        owner = {"pid": self._process, "host": socket.gethostname(), "token": secrets.token_hex(8)}
        self._content = json.dumps(owner).encode()
        while True:
            self._open(folder)
            try:
                self.note = self._take(folder)
                # a writer that ended removes its file, perhaps after we opened it: what we locked is then no one's
                if not self.note and not self._is_there():
                    self.release()
                    continue
                self._write(folder)
            except BaseException:
                self.release()
                raise
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()

    def _open(self, folder: Path) -> None:
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError as error:
            raise OutputError(
                Message("errors.folder.not_written", folder=str(folder), reason=_files.os_reason(error)),
                hint=Message("errors.folder.choose"),
            ) from error
        _held.add(self._descriptor)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def _take(self, folder: Path) -> str:
        """Take the lock.

        Returns:
            A note if this system can't lock files; "" if the lock is held.

        Raises:
            OutputError: Another process holds it.
        """
        try:
            try:
                _flock(self._descriptor, "LOCK_EX")
            except BlockingIOError:  # perhaps only somebody who looks whether there is a writer
                time.sleep(_LOOK_S)
                _flock(self._descriptor, "LOCK_EX")
        except BlockingIOError as error:
            raise OutputError(
                Message("errors.folder.taken", folder=str(folder), owner=_owner(self._path)),
                hint=Message("errors.folder.wait"),
            ) from error
        except OSError as error:
            reason = _files.os_reason(error)
            return f"{folder} can't be locked ({reason}): a second writer is noticed only when it has begun"
        return ""

    def _write(self, folder: Path) -> None:
        try:
            os.ftruncate(self._descriptor, 0)
            if os.write(self._descriptor, self._content) < len(self._content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OutputError(
                Message("errors.folder.not_written", folder=str(folder), reason=_files.os_reason(error)),
                hint=Message("errors.folder.free"),
            ) from error

    def check(self) -> None:
        """Raise if the folder is no longer this writer's; called before each write.

        Raises:
            OutputError: It was closed, a forked child calls, or another writer came, because locks don't work here or
                the folder was removed and made anew.
        """
        if self._descriptor < 0:
            raise OutputError(f"{self._path.parent} was closed", hint="Open it anew.")
        if os.getpid() != self._process:
            raise OutputError(
                f"process {os.getpid()} writes into {self._path.parent}, which process {self._process} opened",
                hint="Write in the process that opened it.",
            )
        try:
            content = take(self._path, _MAX_LOCK_BYTES)
        except (FileNotFoundError, NotADirectoryError, RunFolderError) as error:
            raise OutputError(
                f"{self._path} is gone: the directory was moved or removed", hint="Open it anew."
            ) from error
        if content != self._content:
            raise OutputError(
                f"another writer took {self._path.parent} over: {_owner(self._path)}",
                hint="Give each process a directory of its own.",
            )

    def release(self) -> None:
        """Release the lock and remove its file; a second call does nothing."""
        if self._descriptor < 0 or os.getpid() != self._process:  # a forked child closed it at its start
            return
        descriptor, self._descriptor = self._descriptor, -1
        _held.discard(descriptor)
        if self.note:  # Windows removes no file that is open
            os.close(descriptor)
        with contextlib.suppress(OSError, RunFolderError):
            # The file is removed while the lock is still held: after the unlock it could be another writer's.
            if take(self._path, _MAX_LOCK_BYTES) == self._content:  # not if the folder was moved, or taken over
                remove(self._path)
        if self.note:
            return
        with contextlib.suppress(OSError):
            # a child forked without Python's hooks may hold a copy of the descriptor
            _flock(descriptor, "LOCK_UN")
        os.close(descriptor)


def _flock(descriptor: int, operation: Literal["LOCK_EX", "LOCK_SH", "LOCK_UN"]) -> None:
    """Change the lock of an open file, without waiting.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: The system or the file system has no locks.
    """
    if sys.platform == "win32":
        raise OSError(errno.ENOTSUP, "this system has none")
    import fcntl

    fcntl.flock(descriptor, getattr(fcntl, operation) | fcntl.LOCK_NB)


def writer_of(folder: Path) -> Writer:
    """Return whether a folder has a writer, without becoming one.

    Returns:
        "writing": a process holds the lock. "ended": there is no lock, as the last writer released it. "killed": the
        process that took the lock is gone and did not release it. "unknown": the file system has no locks.
    """
    try:
        descriptor = os.open(folder / LOCK, SAFE)
    except FileNotFoundError:
        return "ended"
    except OSError:
        return "unknown"
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return "unknown"
        _flock(descriptor, "LOCK_SH")  # shared: two readers don't take each other for writers
    except BlockingIOError:
        return "writing"
    except OSError:
        return "unknown"
    finally:
        os.close(descriptor)  # releases the lock
    return "killed"


@contextlib.contextmanager
def locked(folder: Path, *names: str) -> Iterator[Lock]:
    """Make a directory if it is missing, and hold its lock.

    Args:
        folder: the directory.
        names: of the files that are written there, or patterns: what killed processes left of them half written goes.

    Raises:
        OutputError: The directory can't be made or written, or another writer holds it.
    """
    make(folder)
    with Lock(folder) as lock:
        tidy(folder, *names)
        yield lock


@dataclass(frozen=True, slots=True)
class _Owner:
    pid: int
    host: str
    token: str  # tells two writers of one process apart


def _owner(path: Path) -> str:
    """Return who wrote the lock, for a message."""
    try:
        document = parse_json(take(path, _MAX_LOCK_BYTES), "the lock", RunFolderError, "")
        owner = record_from_json(_Owner, document, "the lock", RunFolderError, "")
        return Message("errors.folder.process", process=owner.pid, host=quote(owner.host))
    except (OSError, RunFolderError):  # it is being written
        return Message("errors.folder.unknown_process")
