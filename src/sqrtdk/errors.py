"""Errors: the expected rule, the received numbers, and the fix.

Every error that sqrtdk raises on purpose is a `SqrtdkError` and also the matching built-in class, so that callers may
catch either. `str(error)` is the rule with the numbers received; `error.hint` is the fix.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches

EXIT_INTERRUPTED = 130  # of a process that Ctrl-C ended, and of a report that it cut short
INTERRUPTS = (KeyboardInterrupt,)  # the user's own; every broad `except` lets them pass


def add_note(error: BaseException, note: str) -> None:
    """Add a line that a traceback shows below the error; that of Python 3.10 leaves it out."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        vars(error).setdefault("__notes__", []).append(note)


class SqrtdkError(Exception):
    """Base class of every error raised on purpose.

    Attributes:
        message: The rule and the numbers received; `str(error)` is this text in English.
        hint: What to do, in one sentence.

    Both may be a `sqrtdk.messages.Message`, which the command line says in the reader's language.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint
        if hint:
            add_note(self, f"Hint: {hint}")  # so that a traceback shows it


# What a model's own code may raise when it is run in another way, in float64 or with other weights.
MODEL_ERRORS = (SqrtdkError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class InvalidValueError(SqrtdkError, ValueError):
    """A shape or a value is wrong; the text gives the rule, what was received, and how to correct it."""


class InvalidTypeError(SqrtdkError, TypeError):
    """An argument has the wrong type or dtype; the text gives the rule, what was received, and how to correct it."""


class UnsupportedError(SqrtdkError, NotImplementedError):
    """The arguments are valid, but their combination is not supported."""


class ModelError(SqrtdkError, RuntimeError):
    """The model to be audited can't be found, built or run."""


class LabError(SqrtdkError, RuntimeError):
    """A cell of an experiment or a sweep could not be computed, or its engine could not be started."""


class TraceFileError(SqrtdkError, ValueError):
    """A file is not a trace file, is damaged, or breaks a rule of the format."""


class RunFolderError(SqrtdkError, ValueError):
    """A folder does not hold the records of a run, is damaged, or belongs to another run."""


class BaselineError(SqrtdkError, ValueError):
    """A file is not a baseline, is damaged, has another version, or was written by another kind of check."""


class MissingExtraError(SqrtdkError, ImportError):
    """An optional dependency is not installed; the hint has the pip command."""


class OutputError(SqrtdkError, OSError):
    """An output file, or stdout, could not be written."""


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the name nearest to an unknown one, or "" if none is near.

    Example:
        >>> did_you_mean("cosin", ["dot", "cosine"]), did_you_mean("entropy", ["lse", "entropy_nats"])
        ("; did you mean 'cosine'?", "; did you mean 'entropy_nats'?")
    """
    known, text = list(names), str(name)
    near = get_close_matches(text, known, n=1) or [one for one in known if text and text in one]
    return f"; did you mean {near[0]!r}?" if near else ""


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or a remark instead if the `__str__` of a foreign class raises.

    Example:
        >>> text_of(ValueError("no"))
        'no'
    """
    try:
        return str(error)
    except INTERRUPTS:
        raise
    except BaseException as broken:  # a foreign __str__ may raise anything
        return f"(its text can't be shown: {type(broken).__name__})"


def short_text(error: BaseException, limit: int = 400) -> str:
    """Return an error's text on one line, cut at `limit` characters, because it may quote an untrusted file.

    Example:
        >>> short_text(ValueError("one\\n two"), limit=6)
        'one...'
    """
    text = " ".join(text_of(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def said_by(error: SqrtdkError) -> str:
    """Return what an error of ours says: its sentence of the catalogue as it is, a plain text shortened.

    Example:
        >>> said_by(ModelError("no such model"))
        'no such model'
    """
    return short_text(error) if type(error.message) is str else error.message


def kind_and_text(error: BaseException, limit: int = 400) -> str:
    """Return an error's class and its short text.

    Example:
        >>> kind_and_text(ValueError("one\\n two"))
        'ValueError: one two'
    """
    return f"{type(error).__name__}: {short_text(error, limit)}"
