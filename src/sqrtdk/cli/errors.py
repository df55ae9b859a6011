"""Shows errors to the user: one message, a hint and an exit code; a traceback only on request.

Warnings, log records and tracebacks that Python prints for the model's code pass `plain` too, so that no escape
sequence in them reaches the terminal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import typer

from sqrtdk.cli import guesses
from sqrtdk.cli.help import HelpfulGroup
from sqrtdk.cli.output import spoken, tell_reader, write_stderr
from sqrtdk.cli.process import EXIT_FAILED, exit_refused, interrupted, swallowed
from sqrtdk.errors import EXIT_INTERRUPTED, SqrtdkError, text_of
from sqrtdk.messages import Message, joined, said, word
from sqrtdk.report.plain import plain, plain_lines

_MOST_ERROR_LINES = 12
_ALIKE = re.compile(r" \(Possible options: .+\)$| Did you mean .+\?$")
# How typer words usage errors, each with the id of its sentence. A reason is worded by one of the patterns below it.
_TYPERS_WORDS: Mapping[str, str] = {
    r"No such option: (?P<option>\S+) \(Possible options: (?P<options>.+)\)": "errors.usage.no_option_but",
    r"No such option: (?P<option>.+)": "errors.usage.no_option",
    r"No such command (?P<verb>.+)\. Did you mean (?P<verbs>.+)\?": "errors.usage.no_verb_but",
    r"No such command (?P<verb>.+)\.": "errors.usage.no_verb",
    r"Missing command\.": "errors.usage.verb_missing",
    r"Missing argument (?P<name>.+)\.": "errors.usage.argument_missing",
    r"Missing option (?P<name>.+)\.": "errors.usage.option_missing",
    r"Got unexpected extra argument\(s\) \((?P<arguments>.+)\)": "errors.usage.extra",
    r"Option (?P<option>.+) requires an argument\.": "errors.usage.value_missing",
    r"Option (?P<option>.+) does not take a value\.": "errors.usage.no_value",
    r"Invalid value for (?P<option>'.+?'): (?P<reason>.+)": "errors.usage.invalid",
    r"(?P<value>.+) is an option itself; the value was left out": "errors.usage.option_itself",
    r"(?P<value>.+) is not one of (?P<choices>.+)\.": "errors.usage.choice",
    r"Input should be greater than or equal to (?P<least>.+)": "errors.usage.least",
    r"Input should be less than or equal to (?P<most>.+)": "errors.usage.most",
    r"Input should be a valid integer, unable to parse string as an integer": "errors.usage.whole",
    r"Input should be a valid number, unable to parse string as a number": "errors.usage.number",
}


@contextlib.contextmanager
def reported(show_traceback: bool) -> Iterator[None]:
    """Turn an exception raised inside, and a call of `os._exit`, into a message on stderr and an exit code.

    Args:
        show_traceback: whether to print the traceback too; see `fail`.

    Raises:
        typer.Exit: with code 2 for an error, 130 for Ctrl-C.
    """
    try:
        with exit_refused():
            yield
    except BaseException as error:  # even SystemExit: the model's code must not choose our exit code
        if isinstance(error, KeyboardInterrupt) or interrupted():  # some libraries turn it into another error
            tell_reader(Message("progress.interrupted"))
            raise typer.Exit(EXIT_INTERRUPTED) from None
        fail(error, show_traceback)
        raise typer.Exit(EXIT_FAILED) from None


def fail(error: BaseException, show_traceback: bool = False) -> None:
    """Print an error message, and a hint on what to do about it.

    Args:
        error: the exception that was raised.
        show_traceback: whether to print the traceback too, as the environment variable SQRTDK_TRACEBACK=1 does.
    """
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a verb: the text is its help
        write_stderr(text_of(error))
        return
    show_traceback = show_traceback or os.environ.get("SQRTDK_TRACEBACK", "") not in ("", "0")
    message, hint = words_of(error, show_traceback)
    if show_traceback:
        write_stderr("".join(traceback.format_exception(error)).rstrip())
    language = spoken()
    lines = [plain(line) for line in said(message, language).strip().split("\n")] or [type(error).__name__]
    if len(lines) > _MOST_ERROR_LINES:
        lines = [*lines[:_MOST_ERROR_LINES], "..."]
    write_stderr(word("errors.frame.error", language) + "\n  ".join(lines))
    if hint:
        write_stderr(word("errors.frame.hint", language) + "\n  ".join(map(plain, said(hint, language).split("\n"))))


def words_of(error: BaseException, show_traceback: bool = False) -> tuple[str, str]:
    """Return the message of an error, and the hint on what to do about it.

    Args:
        error: the exception that was raised.
        show_traceback: whether the traceback is printed too.
    """
    message: str
    hint: str
    if hasattr(error, "format_message"):  # a ClickException; typer has classes of that name in several modules
        refusal = error.format_message().replace(": Value error, ", ": ", 1)
        instead = _instead(error)
        if instead is not None:  # what looks alike is not what is meant
            refusal, hint = _ALIKE.sub("", refusal), instead
        else:
            hint = _how_it_is_used(error)
        message = _in_our_words(refusal)
    elif isinstance(error, SqrtdkError):
        message, hint = error.message, error.hint
    else:
        message = f"{type(error).__name__}: {text_of(error)}"
        hint = Message("errors.frame.not_ours" if show_traceback else "errors.frame.not_ours_see")
    return message, hint


def _in_our_words(refusal: str) -> str:
    """Return a usage error of typer as a sentence of the catalogue; one that is not in it stays as it is."""
    for pattern, id in _TYPERS_WORDS.items():
        if found := re.fullmatch(pattern, refusal, re.DOTALL):
            values = found.groupdict()
            if "reason" in values:
                values["reason"] = _in_our_words(values["reason"])
            if "options" in values:
                values["options"] = joined(values["options"].split(", "), "comma")
            return Message(id, **values)
    return refusal


def _instead(error: Any) -> Message | None:
    """Return what does what a refused word asked for, or None if nothing is known of it."""
    context = getattr(error, "ctx", None)
    option = getattr(error, "option_name", None)
    words = [option] if option else getattr(error, "words", ())
    path = "" if context is None else context.command_path
    return guesses.instead(path, words, error.format_message()) if path else None


def _how_it_is_used(error: Any) -> str:
    """Return the hint of a usage error: an example, and where to find the options."""
    context = getattr(error, "ctx", None)
    if context is None:
        return ""
    if isinstance(context.command, HelpfulGroup):
        return Message("errors.usage.all_options", verb=context.command_path)
    return Message("errors.usage.example", example=context.command.first_example(), verb=context.command_path)


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
        write_stderr(text)
