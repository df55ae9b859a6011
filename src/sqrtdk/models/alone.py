"""Guards against user code that forks: only the original process goes on with our code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """End a child process that the code inside forked and that returns from it, normally or with an error.

    The child would run everything that follows a second time, and write a second report. The parent goes on.
    """
    home = os.getpid()
    try:
        yield
    except BaseException:
        _end_child(home, 1)
        raise
    _end_child(home, 0)


def _end_child(home: int, code: int) -> None:
    if os.getpid() != home:
        os._exit(code)  # no exit handlers and no flush: the parent owns what is in the buffers
