"""Bytes on disk: written whole and made to last, read within limits."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

from sqrtdk import _files
from sqrtdk.errors import OutputError, RunFolderError

_SAFE = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def put(path: Path, content: Any) -> None:
    """Write a file, all of it or nothing, over one of the same name; when this returns a power cut can't undo it.

    Args:
        path: the file; its directory exists.
        content: bytes, or a buffer.

    Raises:
        OutputError: It can't be written.
    """
    _files.write_bytes(path, content, force=True)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Make the names in a directory last; a file system or system that can't is let be."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def take(path: Path, limit: int) -> bytes:
    """The bytes of a stranger's file: a regular file, no link, of limited size.

    Args:
        path: the file.
        limit: most bytes.

    Raises:
        FileNotFoundError: It is not there; NotADirectoryError where it can't be.
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
    """Remove a file; one that can't be removed does no harm where this is used."""
    with contextlib.suppress(OSError):
        path.unlink()


def tidy(folder: Path, name: str) -> None:
    """Remove the temporary files that killed processes left; this process alone writes into the folder.

    Args:
        folder: where they are.
        name: of what they were to become, or a pattern.
    """
    for path in folder.glob(f".{name}.*.tmp"):
        remove(path)


def make(folder: Path) -> None:
    """Make a directory, with those above it, where it is not there.

    Raises:
        OutputError: It can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make the directory {folder}: {error.strerror}", hint="Choose another directory."
        ) from error
