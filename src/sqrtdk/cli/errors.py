"""What a user sees when something goes wrong: one clear message, a hint, an exit code; a traceback only on request."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

import typer

from sqrtdk.errors import SqrtdkError, text_of
from sqrtdk.report.plain import plain

FAILED = 2  # usage, configuration or input/output error
INTERRUPTED = 130
_MOST_LINES = 12
_UNEXPECTED = "this error is not one of sqrtdk's own; --traceback (or SQRTDK_TRACEBACK=1) shows where it was raised"


@contextlib.contextmanager
def reported(show_traceback: bool) -> Iterator[None]:
    """Turn what is raised inside into a message on stderr and an exit code.

    Args:
        show_traceback: print the traceback as well; the environment variable SQRTDK_TRACEBACK=1 does the same.

    Raises:
        typer.Exit: with code 2 for an error, 130 for Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        _say("Interrupted.")
        raise typer.Exit(INTERRUPTED) from None
    except SqrtdkError as error:
        _fail(error, text_of(error), error.hint, show_traceback)
    except BaseException as error:  # a SystemExit of the model's must not choose our exit code
        _fail(error, f"{type(error).__name__}: {text_of(error)}", _UNEXPECTED, show_traceback)


def _fail(error: BaseException, message: str, hint: str, show_traceback: bool) -> None:
    if show_traceback or os.environ.get("SQRTDK_TRACEBACK", "") not in ("", "0"):
        _say("".join(traceback.format_exception(error)).rstrip())
    lines = [plain(line) for line in message.strip().split("\n")] or [type(error).__name__]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], "..."]
    _say("Error: " + "\n  ".join(lines))
    if hint:
        _say(f"Hint: {plain(hint)}")
    raise typer.Exit(FAILED) from None


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stderr is no reason for a second error
        print(text, file=sys.stderr, flush=True)
