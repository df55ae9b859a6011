"""Warnings, log records and tracebacks that Python shows for the model's code: no character commands the terminal."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
import warnings
from typing import TextIO

from sqrtdk.cli.output import say
from sqrtdk.cli.process import swallowed
from sqrtdk.report.plain import plain_lines


class PlainMessages:
    """Makes what goes through Python's own machinery to stderr plain, and puts everything back where it is left.

    These are warnings, records of stream handlers, and exceptions that end a thread or are ignored. A log file gets
    what its handler writes, and what code prints itself is its own.
    """

    def __enter__(self) -> None:
        self._before = warnings.showwarning, threading.excepthook, sys.unraisablehook
        warnings.showwarning = _show_warning
        threading.excepthook = _show_thread
        sys.unraisablehook = _show_ignored
        logging.StreamHandler.format = _format  # type: ignore[method-assign]  # its own, where it had its parent's

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
    except Exception:  # it may be half taken apart
        name = f"<{type(args.object).__name__}>"
    where = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
    _show(plain_lines(f"{args.err_msg or 'Exception ignored in'}: {name}\n{''.join(where)}".rstrip("\n")))


def _format(self: logging.Handler, record: logging.LogRecord) -> str:
    text = logging.Handler.format(self, record)
    return text if isinstance(self, logging.FileHandler) else plain_lines(text)


def _show(text: str) -> None:
    """Write to `sys.stderr`, which the spinner makes room on; past it where the model's code broke it."""
    try:
        sys.stderr.write(text + "\n")
    except Exception:
        say(text)
