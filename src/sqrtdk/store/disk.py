"""Bytes on disk: written whole and durably, read within limits, and hashed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from sqrtdk import _files
from sqrtdk.errors import OutputError, RunFolderError
from sqrtdk.messages import Message

# a link is not followed, and opening a named pipe does not wait for its writer
SAFE = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


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
    """Flush the names in a directory to disk (fsync), so that a rename survives a power cut.

    Does nothing where the system or the file system can't do it.
    """
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
        FileNotFoundError: It does not exist; NotADirectoryError if a parent is not a directory.
        RunFolderError: It is another kind of file, too large, or can't be read.
    """
    try:
        descriptor = os.open(path, SAFE)
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
    """Remove a file; does nothing if it is missing or can't be removed."""
    with contextlib.suppress(OSError):
        path.unlink()


def tidy(folder: Path, *names: str) -> None:
    """Remove the temporary files of killed processes; only the folder's single writer may call this.

    Args:
        folder: the directory to clean.
        names: names of the files that they would have become, or patterns.
    """
    for name in names:
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
            Message("errors.folder.not_made", folder=str(folder), reason=_files.os_reason(error)),
            hint=Message("errors.folder.choose"),
        ) from error


def digest(content: Any, size: int = 8) -> str:
    """Return a hash of bytes, or of a buffer, as `2 * size` hexadecimal digits.

    The 8 bytes of the default tell damage and change; a name that must never be shared by two contents takes 16.

    Example:
        >>> digest(b"PAR1")
        'ae217414c71c180a'
    """
    return hashlib.blake2b(content, digest_size=size).hexdigest()


def hash_of(content: Any) -> str:
    """Return a hash of JSON data, whatever the order of its names: the key of the result that the data decide.

    Example:
        >>> hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1})
        True
    """
    return digest(json.dumps(content, sort_keys=True).encode(), 16)
