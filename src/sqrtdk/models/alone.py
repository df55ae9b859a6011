"""A model's code may fork; only one process goes on with ours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """End a child process that the code inside forked and that comes back out of it, by a return or an error.

    It would run everything that follows a second time, down to a second report. Its parent goes on.
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
        os._exit(code)  # no exit handlers, no flush: what is in the buffers is the parent's as well
