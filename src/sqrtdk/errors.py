"""Errors: what was expected, what came, and what to do about it.

Every error that sqrtdk raises on purpose is a `SqrtdkError` and also the built-in class that fits it, so that
callers may catch either. `str(error)` is the rule with the numbers received; `error.hint` is the fix.
"""

from __future__ import annotations

INTERRUPTS = (KeyboardInterrupt,)  # the user's own: whoever catches all else lets it pass


class SqrtdkError(Exception):
    """Base class of every error raised on purpose; `hint` says in one sentence what to do."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class InvalidValueError(SqrtdkError, ValueError):
    """A shape or a value that the rule in the message does not admit."""


class InvalidTypeError(SqrtdkError, TypeError):
    """An argument of the wrong type."""


class UnsupportedError(SqrtdkError, NotImplementedError):
    """A combination that is valid but not supported."""


class ModelError(SqrtdkError, RuntimeError):
    """The model to be audited could not be found, built, or run."""


class LabError(SqrtdkError, RuntimeError):
    """A cell of an experiment or of a sweep could not be computed, or the engine that computes cells not be had."""


class TraceFileError(SqrtdkError, ValueError):
    """A trace file that is none, is damaged, or breaks a rule of its format."""


class RunFolderError(SqrtdkError, ValueError):
    """A folder of a run's records that is none, is damaged, or is that of another run."""


class BaselineError(SqrtdkError, ValueError):
    """A baseline that is none, is damaged, is of another version, or was written by another kind of check."""


class MissingExtraError(SqrtdkError, ImportError):
    """An optional dependency is not installed; the hint names the pip command."""


class OutputError(SqrtdkError, OSError):
    """A report could not be written."""


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or a remark in its place where a stranger's `__str__` raises.

    Example:
        >>> text_of(ValueError("no"))
        'no'
    """
    try:
        return str(error)
    except INTERRUPTS:
        raise
    except BaseException as broken:  # whatever a stranger's __str__ raises
        return f"(its text can't be shown: {type(broken).__name__})"


def short_text(error: BaseException, limit: int = 400) -> str:
    """Return an error's text on one line, cut at `limit` characters: it may quote a stranger's file.

    Example:
        >>> short_text(ValueError("one\\n two"), limit=6)
        'one...'
    """
    text = " ".join(text_of(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def kind_and_text(error: BaseException, limit: int = 400) -> str:
    """Return an error's class and its short text.

    Example:
        >>> kind_and_text(ValueError("one\\n two"))
        'ValueError: one two'
    """
    return f"{type(error).__name__}: {short_text(error, limit)}"
