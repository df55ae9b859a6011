"""Streams: where text goes, how wide and colourful it may be, and what happens when nobody reads it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator

PIPE_WIDTH = 160  # nobody wraps a log or a pipe, and one line a site is easier to search


def print_text(text: str) -> None:
    """Write to stdout; a reader that went away (`| head`) is no error, and an encoding that is too small neither."""
    try:
        _tolerant(sys.stdout)
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _to_nowhere()


def say(text: str) -> None:
    """Write a line to stderr; one that nobody can read is no error."""
    with contextlib.suppress(OSError, ValueError):
        _tolerant(sys.stderr)
        print(text, file=sys.stderr, flush=True)


def colors() -> bool:
    """Say whether stdout takes colours: a terminal that is not dumb, and no NO_COLOR."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Return the columns of the terminal, or of COLUMNS, or enough for a pipe."""
    fallback = 80 if sys.stdout.isatty() else PIPE_WIDTH
    return shutil.get_terminal_size((fallback, 24)).columns


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr while it is a terminal; keep what the model prints away from stdout.

    Its code may print in C or start programs, which know descriptor 1 and nothing of `sys.stdout`. What is yielded
    changes the text beside the spinner.
    """
    with descriptor_1_to_2(), contextlib.redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield lambda text: None
            return
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR"))).status(Text(text)) as status:
            yield lambda text: status.update(Text(text))


@contextlib.contextmanager
def counting(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr while it is a terminal; what is yielded is told (done, total).

    As in `working`, nothing that runs inside reaches stdout.
    """
    with descriptor_1_to_2(), contextlib.redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield lambda done, total: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")))) as bar:
            task = bar.add_task(text, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def open_closed_streams() -> None:
    """Point the standard descriptors that are closed at nothing: else the next file opened becomes one of them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free, so this one
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


@contextlib.contextmanager
def descriptor_1_to_2() -> Iterator[None]:
    """Send what is written to descriptor 1 inside to descriptor 2."""
    _flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        _flush()
        os.dup2(saved, 1)
        os.close(saved)


def end_stdout() -> None:
    """Send what still comes to stderr: threads and exit handlers of the model outlive the report."""
    _flush()
    with contextlib.suppress(OSError):  # the model closed descriptor 2
        os.dup2(2, 1)


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.__stdout__)):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    if "ctypes" in sys.modules:  # torch imports it; without torch nothing was printed in C
        with contextlib.suppress(OSError, TypeError, AttributeError):  # Windows has no such handle
            sys.modules["ctypes"].CDLL(None).fflush(None)


def _tolerant(stream: object) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _to_nowhere() -> None:
    """Point stdout at nothing, so that the flush at exit does not complain again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
