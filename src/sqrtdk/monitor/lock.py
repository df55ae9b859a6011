"""One writer a folder: a lock that the system opens when its process ends, killed or not."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
from pathlib import Path

from sqrtdk._stranger import shown
from sqrtdk.errors import OutputError, RunFolderError
from sqrtdk.monitor import disk

LOCK = "lock"
_MAX_BYTES = 1000
_held: set[int] = set()


def _let_go() -> None:
    """A forked child (a worker of a data loader) would hold the lock beyond the life of its parent."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class Lock:
    """Held from the making of it until `release`, by this process alone.

    Attributes:
        note: why a second writer would be noticed late: the file system has no locks; "" where it has.
    """

    def __init__(self, folder: Path) -> None:
        """Take it.

        Raises:
            OutputError: Another writer holds it, or the folder can't be written.
        """
        self._path = folder / LOCK
        self._process = os.getpid()
        owner = {"pid": self._process, "host": socket.gethostname(), "token": secrets.token_hex(8)}
        self._content = json.dumps(owner).encode()
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError as error:
            raise OutputError(
                f"cannot write into {folder}: {error.strerror}", hint="Choose another directory."
            ) from error
        _held.add(self._descriptor)
        try:
            self.note = self._take(folder)
            self._write(folder)
        except BaseException:
            self.release()
            raise

    def _take(self, folder: Path) -> str:
        try:
            import fcntl

            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"another writer has {folder}: {_owner(self._path)}",
                hint="Wait until it ends, or write into another directory.",
            ) from error
        except (ImportError, OSError) as error:
            reason = getattr(error, "strerror", None) or "this system has none"
            return f"{folder} can't be locked ({reason}): a second writer is noticed only when it has begun"
        return ""

    def _write(self, folder: Path) -> None:
        try:
            os.ftruncate(self._descriptor, 0)
            if os.write(self._descriptor, self._content) < len(self._content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OutputError(
                f"cannot write into {folder}: {error.strerror}", hint="Free space, or choose another directory."
            ) from error

    def check(self) -> None:
        """Raise if the folder is not this writer's any more; before each write.

        Raises:
            OutputError: It was closed, a forked child asks, or another writer came where locks don't work, or where
                the folder was removed and made anew.
        """
        if self._descriptor < 0:
            raise OutputError(f"{self._path.parent} was closed", hint="Open another RunWriter.")
        if os.getpid() != self._process:
            raise OutputError(
                f"process {os.getpid()} writes into {self._path.parent}, which process {self._process} opened",
                hint="Write in the process that made the RunWriter.",
            )
        try:
            content = disk.take(self._path, _MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError, RunFolderError) as error:
            raise OutputError(
                f"{self._path} is gone: the directory was moved or removed", hint="Open another RunWriter."
            ) from error
        if content != self._content:
            raise OutputError(
                f"another writer took {self._path.parent} over: {_owner(self._path)}",
                hint="Give each process a directory of its own.",
            )

    def release(self) -> None:
        """Let go; a second time does nothing."""
        if self._descriptor < 0 or os.getpid() != self._process:  # a forked child closed it at its start
            return
        descriptor, self._descriptor = self._descriptor, -1
        _held.discard(descriptor)
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked around Python may have a copy
        os.close(descriptor)


def _owner(path: Path) -> str:
    """Who wrote the lock, for a message."""
    try:
        owner = json.loads(disk.take(path, _MAX_BYTES))
        return f"process {int(owner['pid'])} on {shown(owner['host'])}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # it is being written
        return "its process is not known yet"
