"""Shows errors to the user: one message, a hint and an exit code; a traceback only on request.

Warnings, log records and tracebacks that Python prints for the model's code pass `plain` too, so that no escape
sequence in them reaches the terminal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

import typer

from sqrtdk.cli.output import say
from sqrtdk.cli.process import FAILED, INTERRUPTED, interrupted, swallowed
from sqrtdk.cli.verbs import INSTEAD, VERBS
from sqrtdk.errors import SqrtdkError, text_of
from sqrtdk.report.plain import plain, plain_lines

_MOST_LINES = 12
_UNEXPECTED = "this error is not one of sqrtdk's own"
_HOW_TO_SEE = "; --traceback (or SQRTDK_TRACEBACK=1) shows where it was raised"


@contextlib.contextmanager
def reported(show_traceback: bool) -> Iterator[None]:
    """Turn an exception raised inside into a message on stderr and an exit code.

    Args:
        show_traceback: whether to print the traceback too; see `fail`.

    Raises:
        typer.Exit: with code 2 for an error, 130 for Ctrl-C.
    """
    try:
        yield
    except BaseException as error:  # even SystemExit: the model's code must not choose our exit code
        if isinstance(error, KeyboardInterrupt) or interrupted():  # some libraries turn it into another error
            say("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None
        fail(error, show_traceback)
        raise typer.Exit(FAILED) from None


def fail(error: BaseException, show_traceback: bool = False) -> None:
    """Print an error message, and a hint on what to do about it.

    Args:
        error: the exception that was raised.
        show_traceback: whether to print the traceback too, as the environment variable SQRTDK_TRACEBACK=1 does.
    """
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a verb: the text is its help
        say(text_of(error))
        return
    show_traceback = show_traceback or os.environ.get("SQRTDK_TRACEBACK", "") not in ("", "0")
    if hasattr(error, "format_message"):  # a ClickException; typer has classes of that name in several modules
        message = error.format_message().replace(": Value error, ", ": ", 1)
        hint = _how_it_is_used(error, message)
    elif isinstance(error, SqrtdkError):
        message, hint = text_of(error), error.hint
    else:
        message = f"{type(error).__name__}: {text_of(error)}"
        hint = f"{_UNEXPECTED}{'' if show_traceback else _HOW_TO_SEE}."
    if show_traceback:
        say("".join(traceback.format_exception(error)).rstrip())
    lines = [plain(line) for line in message.strip().split("\n")] or [type(error).__name__]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], "..."]
    say("Error: " + "\n  ".join(lines))
    if hint:
        say("Hint: " + "\n  ".join(map(plain, hint.split("\n"))))


def _how_it_is_used(error: Any, message: str) -> str:
    """Return the hint of a usage error: what replaces a removed feature, or an example and where to find options."""
    context = getattr(error, "ctx", None)
    if context is None:
        return ""
    path = context.command_path
    for (command, begin), instead in INSTEAD.items():
        if command == path and message.startswith(begin):
            return instead
    verb = VERBS.get(path.removeprefix("sqrtdk "))
    example = f"for example: {verb.examples[0].partition(' #')[0].rstrip()}; " if verb else ""
    return f"{example}all options: {path} --help"


class PlainMessages:
    """Escapes control characters in what Python itself prints to stderr, until it is exited.

    That covers warnings, records of stream handlers, and exceptions that end a thread or are ignored. Log files and
    direct prints are left alone.
    """

    def __enter__(self) -> None:
        self._before = warnings.showwarning, threading.excepthook, sys.unraisablehook
        warnings.showwarning = _show_warning
        threading.excepthook = _show_thread
        sys.unraisablehook = _show_ignored
        logging.StreamHandler.format = _format  # type: ignore[method-assign]  # inherited so far: `del` restores it

    def __exit__(self, *_: object) -> None:
        warnings.showwarning, threading.excepthook, sys.unraisablehook = self._before
        del logging.StreamHandler.format


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = plain_lines(warnings.formatwarning(message, category, filename, lineno, line).rstrip("\n"))
    if file is None:
        _show(text)
    else:
        file.write(text + "\n")


def _show_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread is not None else "?"
    where = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
    _show(plain_lines(f"Exception in thread {name}:\n{''.join(where)}".rstrip("\n")))


def _show_ignored(args: sys.UnraisableHookArgs) -> None:
    if issubclass(args.exc_type, KeyboardInterrupt):
        swallowed()
        return
    try:
        name = repr(args.object)
    except Exception:  # a finaliser's object may be half torn down
        name = f"<{type(args.object).__name__}>"
    where = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
    _show(plain_lines(f"{args.err_msg or 'Exception ignored in'}: {name}\n{''.join(where)}".rstrip("\n")))


def _format(self: logging.Handler, record: logging.LogRecord) -> str:
    text = logging.Handler.format(self, record)
    return text if isinstance(self, logging.FileHandler) else plain_lines(text)


def _show(text: str) -> None:
    """Write to `sys.stderr`, which the spinner redirects above itself, or to our own stream if the model broke it."""
    try:
        sys.stderr.write(text + "\n")
    except Exception:
        say(text)
