"""Streams: where text goes, its width and colours, and what happens if nobody reads it.

The program duplicates the descriptors of stdout and stderr (`keep_streams`), so that the model's code can close,
replace or print to the standard streams without touching the report. Inside another program, such as a test,
`sys.stdout` and `sys.stderr` are used.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqrtdk import _files
from sqrtdk._language import Language, chosen
from sqrtdk._progress import pass_progress_to
from sqrtdk.errors import OutputError
from sqrtdk.messages import Message, said
from sqrtdk.models.alone import alone
from sqrtdk.report.plain import plain, plain_lines

PIPE_WIDTH = 160  # wide, because one line for each site is easier to search in a log
# errors of fsync that mean lost data; it fails with others on files that can't be synced, such as a pipe
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_SHOW_CURSOR = b"\x1b[?25h"


@dataclass(frozen=True, slots=True)
class _OwnDescriptor:
    """A descriptor of our own, with device and inode: its number could be closed and reused for another file."""

    number: int
    place: tuple[int, int]
    encoding: str

    @classmethod
    def of(cls, number: int, stream: Any) -> _OwnDescriptor:
        own = os.dup(number)
        status = os.fstat(own)
        return cls(own, (status.st_dev, status.st_ino), getattr(stream, "encoding", None) or "utf-8")

    def write(self, text: str) -> None:
        """Write the whole text, even to a slow, non-blocking reader.

        Raises:
            OSError: the text can't be written; EBADF if other code closed the descriptor.
        """
        status = os.fstat(self.number)
        # the model's code closed our number, and another file has it now
        if (status.st_dev, status.st_ino) != self.place:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        rest = memoryview(text.encode(self.encoding, "backslashreplace"))
        # a raw stream, as Windows takes UTF-8 for a console from it, and from os.write its code page
        with open(self.number, "wb", buffering=0, closefd=False) as raw:
            while rest:
                written = raw.write(rest)
                if written is None:  # a full pipe: wait until it takes more
                    select.select([], [self.number], [])
                else:
                    rest = rest[written:]
        if stat.S_ISREG(status.st_mode):
            try:
                os.fsync(self.number)  # some file systems report a full disk only here
            except OSError as error:
                if error.errno in _DISK_FULL_ERRORS:
                    raise


_language: Language | None = None
_stdout: _OwnDescriptor | None = None
_stderr: _OwnDescriptor | None = None


def keep_streams() -> None:
    """Duplicate the descriptors of stdout and stderr, so that what a model prints does not mix with our output."""
    global _stdout, _stderr
    _stdout, _stderr = _OwnDescriptor.of(1, sys.stdout), _OwnDescriptor.of(2, sys.stderr)


def print_text(text: str) -> bool:
    """Write to stdout. A reader that went away (`| head`) and characters that can't be encoded are not errors.

    Returns:
        Whether there was a reader.

    Raises:
        OutputError: the text could not be written whole: the disk is full, or the model's code closed stdout.
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
    """Return the error to raise for text that stdout did not take, or not whole."""
    return OutputError(
        Message("errors.output.stdout", reason=_files.os_reason(error)), hint=Message("errors.hint.redirect")
    )


def drop_stdout() -> None:
    """Discard what `sys.stdout` still buffers, so that it is not written elsewhere when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout.flush()


def print_path(path: str) -> None:
    """Write a path to stdout: unchanged for a script, with control characters escaped on a terminal."""
    print_text((plain(path) if _is_terminal() else path) + "\n")


def write_stderr(text: str) -> None:
    """Write lines to stderr, with control characters escaped; a stderr that can't be written is no error."""
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
    """Set the language of help, errors and messages; until then it is that of the environment."""
    global _language
    _language = language


def spoken() -> Language:
    """Return the language that `speak` set; without it, that of the environment."""
    return _language or chosen("auto", os.environ)


def tell_reader(sentence: str) -> None:
    """Write a sentence to stderr, in the reader's language."""
    write_stderr(said(sentence, spoken()))


def say_written(kind: str, path: object) -> None:
    """Tell the reader where a report was written; a line break in its name is escaped.

    Args:
        kind: Kind of the report, as the sentence names it.
        path: Its file.
    """
    tell_reader(Message("progress.report", kind=kind, path=plain(str(path))))


def announce(model: str) -> None:
    """Tell the reader that MODEL is not a directory, before the hub is asked for it."""
    tell_reader(Message("progress.asking_hub", model=repr(model)))


def colors() -> bool:
    """Return whether stdout takes colours: it is a terminal, TERM is not "dumb", and NO_COLOR is not set."""
    return _is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def screen() -> int | None:
    """Return the height of the terminal in lines; None if stdout is not a terminal that can be redrawn.

    It is 24 if the terminal does not say.
    """
    if not _is_terminal() or os.environ.get("TERM") == "dumb":
        return None
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(_stdout.number if _stdout is not None else sys.stdout.fileno()).lines or 24
    return 24


def width() -> int:
    """Return the number of columns of the output: from COLUMNS, else from the terminal, else `PIPE_WIDTH`."""
    columns = os.environ.get("COLUMNS", "")  # may hold anything: only a positive number counts
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
    """Show a spinner if stderr is a terminal, and keep the model's prints away from stdout.

    The model's code may print in C or start programs, which use descriptor 1 and not `sys.stdout`. The yielded function
    changes the text beside the spinner; so do progress messages of the package.
    """
    with _away_from_stdout(), _console() as console:
        if console is None:
            with alone(), pass_progress_to(lambda work_now, done, total: None):
                yield lambda text: None
            return
        from rich.text import Text

        language = spoken()

        def doing(work_now: str, done: int, total: int) -> None:
            work: str = Message("joins.colon", first=text, second=work_now)
            if total:
                work = Message("progress.steps", work=work, done=done, total=total)
            status.update(Text(plain(said(work, language))))

        with console.status(Text(plain(said(text, language)))) as status, alone(), pass_progress_to(doing):
            yield lambda text: status.update(Text(plain(said(text, language))))


@contextlib.contextmanager
def counting(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if stderr is a terminal; the yielded function takes (done, total).

    As in `working`, nothing inside reaches stdout.
    """
    with _away_from_stdout(), _console() as console:
        if console is None:
            with alone(), pass_progress_to(lambda work_now, done, total: None):
                yield lambda done, total: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar, alone(), pass_progress_to(lambda work_now, done, total: None):
            task = bar.add_task(said(text, spoken()), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def _console() -> Iterator[Any]:
    """Yield a rich console on a stderr that the model's code can't close, or None if stderr is not a terminal."""
    number = _stderr.number if _stderr is not None else 2
    if not (os.isatty(number) if _stderr is not None else sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console

    with open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as stream:
        yield Console(file=stream, no_color=bool(os.environ.get("NO_COLOR")))


def open_closed_streams() -> None:
    """Open standard descriptors that are closed, on /dev/null.

    Otherwise the next file that is opened would become stdin, stdout or stderr.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, so this one
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


@contextlib.contextmanager
def _away_from_stdout() -> Iterator[None]:
    """Redirect stdout to stderr. In the program this is permanent, because the model's threads may outlive the run."""
    if _stdout is None or _stderr is None:
        with descriptor_1_to_2(), contextlib.redirect_stdout(sys.stderr):
            yield
        return
    _flush()
    os.dup2(_stderr.number, 1)
    # a separate stream, so that code that closes sys.stdout does not close sys.stderr
    sys.stdout = open(1, "w", buffering=1, encoding=_stderr.encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    try:
        yield
    finally:
        _flush()
        open_closed_streams()  # a report must not become descriptor 1 or 2


@contextlib.contextmanager
def descriptor_1_to_2() -> Iterator[None]:
    """Return a context in which descriptor 1 (stdout) is a duplicate of descriptor 2 (stderr)."""
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
    """Redirect stdout to stderr until the process ends.

    Threads and exit handlers of the model outlive the report, and may print.
    """
    _flush()
    with contextlib.suppress(OSError):  # the model closed descriptor 2
        os.dup2(2, 1)


def _is_terminal() -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.isatty(_stdout.number) if _stdout is not None else sys.stdout.isatty()
    return False


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.__stdout__, sys.stderr)):
        with contextlib.suppress(Exception):  # the stream may have no reader, be closed, or be the model's own object
            stream.flush()
    if "ctypes" in sys.modules:  # torch imports it; without torch nothing was printed in C
        with contextlib.suppress(OSError, TypeError, AttributeError):  # Windows has no such handle
            sys.modules["ctypes"].CDLL(None).fflush(None)


def _tolerant(stream: object) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
