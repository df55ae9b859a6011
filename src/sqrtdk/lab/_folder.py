"""A directory that one process writes: locked against others, and cleaned of what killed ones left half written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from sqrtdk.errors import OutputError


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a directory against other processes; the system releases it when this process ends, killed or not.

    Raises:
        OutputError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"another process writes into {folder}", hint="Wait for it, or choose another --output."
            ) from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


def tidy(folder: Path, names: Iterable[str]) -> None:
    """Remove the temporary files of `sqrtdk._files` that a killed process left.

    Args:
        folder: locked by this process.
        names: patterns of the names that the files would have had.
    """
    for name in names:
        for path in folder.glob(f".{name}.*.tmp"):
            path.unlink(missing_ok=True)
