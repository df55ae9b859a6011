"""Streams: where text goes, how wide and colourful it may be, and what happens when nobody reads it.

The program keeps descriptors of its own for stdout and stderr (`keep_streams`), so that nothing that the model's code
closes, replaces or prints to reaches the report. Used inside another program, as in a test, `sys.stdout` and
`sys.stderr` serve.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sqrtdk._language import Language, chosen
from sqrtdk._progress import heard
from sqrtdk.errors import OutputError
from sqrtdk.models.alone import alone
from sqrtdk.report.plain import plain, plain_lines
from sqrtdk.report.said import said
from sqrtdk.report.terminal_words import word

PIPE_WIDTH = 160  # nobody wraps a log or a pipe, and one line a site is easier to search
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_SHOW_CURSOR = b"\x1b[?25h"


@dataclass(frozen=True, slots=True)
class _Kept:
    """A descriptor of our own, and what it was opened on: a number can be closed and given to another file."""

    number: int
    place: tuple[int, int]
    encoding: str

    @classmethod
    def of(cls, number: int, stream: Any) -> _Kept:
        own = os.dup(number)
        status = os.fstat(own)
        return cls(own, (status.st_dev, status.st_ino), getattr(stream, "encoding", None) or "utf-8")

    def write(self, text: str) -> None:
        """Write all of it, also where the other end takes a little at a time.

        Raises:
            OSError: it can't be written, EBADF where someone closed it.
        """
        status = os.fstat(self.number)
        if (status.st_dev, status.st_ino) != self.place:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        rest = memoryview(text.encode(self.encoding, "backslashreplace"))
        while rest:
            try:
                rest = rest[os.write(self.number, rest) :]
            except BlockingIOError:
                select.select([], [self.number], [])
        if stat.S_ISREG(status.st_mode):
            try:
                os.fsync(self.number)  # some file systems tell only now that the disk is full
            except OSError as error:
                if error.errno in _FULL:
                    raise


_language: Language | None = None
_stdout: _Kept | None = None
_stderr: _Kept | None = None


def keep_streams() -> None:
    """Keep descriptors of stdout and stderr for the program alone."""
    global _stdout, _stderr
    _stdout, _stderr = _Kept.of(1, sys.stdout), _Kept.of(2, sys.stderr)


def print_text(text: str) -> bool:
    """Write to stdout; a reader that went away (`| head`) is no error, and an encoding that is too small neither.

    Returns:
        Whether there was a reader.

    Raises:
        OutputError: not all of it could be written: a full disk, or stdout closed by the model's code.
    """
    try:
        if _stdout is not None:
            _stdout.write(text)
        else:
            _tolerant(sys.stdout)
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        return False
    except OSError as error:
        raise unwritable(error) from error
    return True


def unwritable(error: OSError) -> OutputError:
    """The error that says that stdout did not take everything."""
    hint = "Redirect it elsewhere, or write with --output."
    return OutputError(f"cannot write to stdout: {error.strerror or error}", hint=hint)


def drop_stdout() -> None:
    """Forget what `sys.stdout` still holds, so that it does not come out elsewhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout.flush()


def print_path(path: str) -> None:
    """Write a path to stdout: as it is for a script, with its controls made visible on a terminal."""
    print_text((plain(path) if _is_terminal() else path) + "\n")


def say(text: str) -> None:
    """Write lines to stderr, no character of which commands a terminal; one that nobody can read is no error."""
    text = plain_lines(text) + "\n"
    with contextlib.suppress(OSError, ValueError):
        if _stderr is not None:
            _flush()
            _stderr.write(text)
        else:
            _tolerant(sys.stderr)
            sys.stderr.write(text)
            sys.stderr.flush()


def speak(language: Language) -> None:
    """Tell in this language from now on; before that in the one of the environment."""
    global _language
    _language = language


def tell(text: str) -> None:
    """Say lines in the reader's language, as far as the catalogues have them; errors are said as they are."""
    say("\n".join(said(line, _spoken()) for line in text.split("\n")))


def listed(names: Iterable[str]) -> str:
    """Names one after the other, with the marks of the reader's language between them."""
    return word("list comma", _spoken()).join(names)


def written(kind: str, path: object) -> None:
    """Say where a report is; a line break in its name makes no second line."""
    tell(f"{kind} report: {plain(str(path))}")


def announce(model: str) -> None:
    """Say that a name is no directory, before the hub is asked for it."""
    tell(f"There is no directory {model!r}: asking the hub for it.")


def colors() -> bool:
    """Say whether stdout takes colours: a terminal that is not dumb, and no NO_COLOR."""
    return _is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def screen() -> int | None:
    """Return the lines of the terminal, where stdout is one that can be drawn anew; else None."""
    if not _is_terminal() or os.environ.get("TERM") == "dumb":
        return None
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(_stdout.number if _stdout is not None else sys.stdout.fileno()).lines or 24
    return 24


def width() -> int:
    """Return the columns of COLUMNS, or of the terminal, or enough for a pipe."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    if not _is_terminal():
        return PIPE_WIDTH
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(_stdout.number if _stdout is not None else sys.stdout.fileno()).columns or 80
    return 80


def show_cursor() -> None:
    """Show the terminal's cursor again, which the spinner hides."""
    if _stderr is not None and os.isatty(_stderr.number):
        with contextlib.suppress(OSError):
            os.write(_stderr.number, _SHOW_CURSOR)


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr while it is a terminal; keep what the model prints away from stdout.

    Its code may print in C or start programs, which know descriptor 1 and nothing of `sys.stdout`. What is yielded
    changes the text beside the spinner, as does what the package tells of itself.
    """
    with _away_from_stdout(), _console() as console:
        if console is None:
            with alone(), heard(lambda told, done, total: None):
                yield lambda text: None
            return
        from rich.text import Text

        language = _spoken()

        def doing(told: str, done: int, total: int) -> None:
            parts = [word("colon", language).join((said(text, language), said(told, language)))]
            parts += [word("of", language, done=done, total=total)] if total else []
            status.update(Text(plain(word("comma", language).join(parts))))

        with console.status(Text(plain(said(text, language)))) as status, alone(), heard(doing):
            yield lambda text: status.update(Text(plain(said(text, language))))


@contextlib.contextmanager
def counting(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr if it is a terminal; call the yielded function with (done, total).

    As in `working`, nothing that runs inside reaches stdout.
    """
    with _away_from_stdout(), _console() as console:
        if console is None:
            with alone(), heard(lambda told, done, total: None):
                yield lambda done, total: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar, alone(), heard(lambda told, done, total: None):
            task = bar.add_task(said(text, _spoken()), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def _console() -> Iterator[Any]:
    """A rich console on stderr if that is a terminal, else None; on a stream that the model's code can't close."""
    number = _stderr.number if _stderr is not None else 2
    if not (os.isatty(number) if _stderr is not None else sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console

    with open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as stream:
        yield Console(file=stream, no_color=bool(os.environ.get("NO_COLOR")))


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
def _away_from_stdout() -> Iterator[None]:
    """Send what is written to stdout inside to stderr; in the program from then on: threads may outlive the run."""
    if _stdout is None or _stderr is None:
        with descriptor_1_to_2(), contextlib.redirect_stdout(sys.stderr):
            yield
        return
    _flush()
    os.dup2(_stderr.number, 1)
    # a stream of its own: who closes it does not close sys.stderr
    sys.stdout = open(1, "w", buffering=1, encoding=_stderr.encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    try:
        yield
    finally:
        _flush()
        open_closed_streams()  # a report must not become descriptor 1 or 2


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


def _spoken() -> Language:
    return _language or chosen("auto", os.environ)


def _is_terminal() -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.isatty(_stdout.number) if _stdout is not None else sys.stdout.isatty()
    return False


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.__stdout__, sys.stderr)):
        with contextlib.suppress(Exception):  # nobody reads it, it is closed, or it is of the model's making
            stream.flush()
    if "ctypes" in sys.modules:  # torch imports it; without torch nothing was printed in C
        with contextlib.suppress(OSError, TypeError, AttributeError):  # Windows has no such handle
            sys.modules["ctypes"].CDLL(None).fflush(None)


def _tolerant(stream: object) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
