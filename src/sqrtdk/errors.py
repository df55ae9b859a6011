"""Errors: what was expected, what came, and what to do about it.

Every error that sqrtdk raises on purpose is a `SqrtdkError` and also the built-in class that fits it, so that
callers may catch either. `str(error)` is the rule with the numbers received; `error.hint` is the fix.
"""

from __future__ import annotations


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


class MissingExtraError(SqrtdkError, ImportError):
    """An optional dependency is not installed; the hint names the pip command."""


class OutputError(SqrtdkError, OSError):
    """A report could not be written."""
