"""Processes of the tests of engines and sweeps: started, waited for, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """What it gives, as soon as that is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
    return found


def running(folder: Path) -> list[int]:
    """Processes in the middle of a `slow_square`."""
    texts = [path.read_text().split() for path in folder.glob("*.log")]
    return [int(lines[-1]) for lines in texts if lines and lines[-1] != "ended"]


@contextlib.contextmanager
def python(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python in a group of its own, which Ctrl-C interrupts even where this process ignores it, as in a job."""
    process = subprocess.Popen(
        [sys.executable, *arguments], text=True, start_new_session=True, preexec_fn=_take_interrupts, **options
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _take_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
