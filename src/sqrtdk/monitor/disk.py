"""Bytes on disk: written whole and durably, read within limits, with one writer per folder.

The writer holds a lock that the system releases when its process ends, killed or not.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import Any

from sqrtdk import _files
from sqrtdk._stranger import shown
from sqrtdk.errors import OutputError, RunFolderError

_SAFE = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def put(path: Path, content: Any) -> None:
    """Write a file atomically, replacing one of the same name; once this returns, a power cut can't undo it.

    Args:
        path: the file; its directory exists.
        content: bytes, or a buffer.

    Raises:
        OutputError: It can't be written.
    """
    _files.write_bytes(path, content, force=True)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Flush the names in a directory to disk, if the system and the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def take(path: Path, limit: int) -> bytes:
    """Return the bytes of an untrusted file, if it is a regular file, not a link, and of limited size.

    Args:
        path: the file.
        limit: largest size in bytes.

    Raises:
        FileNotFoundError: It does not exist; NotADirectoryError if a parent is no directory.
        RunFolderError: It is another kind of file, too large, or can't be read.
    """
    try:
        descriptor = os.open(path, _SAFE)
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise RunFolderError("it is no regular file")
            if about.st_size > limit:
                raise RunFolderError(f"it has {about.st_size} bytes; at most {limit} are read")
            return file.read(limit)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, MemoryError) as error:
        raise RunFolderError(f"it can't be read: {getattr(error, 'strerror', None) or error}") from error


def remove(path: Path) -> None:
    """Remove a file if possible; callers can cope with one that stays."""
    with contextlib.suppress(OSError):
        path.unlink()


def tidy(folder: Path, name: str) -> None:
    """Remove the temporary files of killed processes; only the folder's single writer may call this.

    Args:
        folder: the directory to clean.
        name: name of the file that they would have become, or a pattern.
    """
    for path in folder.glob(f".{name}.*.tmp"):
        remove(path)


def make(folder: Path) -> None:
    """Make a directory and its parents, if missing.

    Raises:
        OutputError: It can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make the directory {folder}: {error.strerror}", hint="Choose another directory."
        ) from error


LOCK = "lock"
_MAX_BYTES = 1000
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
        """Raise if the folder is no longer this writer's; called before each write.

        Raises:
            OutputError: It was closed, a forked child calls, or another writer came, because locks don't work here or
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
            content = take(self._path, _MAX_BYTES)
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
        """Release the lock; a second call does nothing."""
        if self._descriptor < 0 or os.getpid() != self._process:  # a forked child closed it at its start
            return
        descriptor, self._descriptor = self._descriptor, -1
        _held.discard(descriptor)
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            # a child forked without Python's hooks may hold a copy of the descriptor
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _owner(path: Path) -> str:
    """Return who wrote the lock, for a message."""
    try:
        owner = json.loads(take(path, _MAX_BYTES))
        return f"process {int(owner['pid'])} on {shown(owner['host'])}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # it is being written
        return "its process is not known yet"
