"""Libraries that only an extra installs: imported when they are needed, and named with the pip command if missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sqrtdk.errors import MissingExtraError


def load(module: str, extra: str = "lab") -> Any:
    """Import a module of an extra.

    Args:
        module: its full name.
        extra: that installs it.

    Raises:
        MissingExtraError: it can't be imported; the hint names the pip command.

    Example:
        >>> load("matplotlib.figure").__name__
        'matplotlib.figure'
    """
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise MissingExtraError(
            f"{name} can't be imported: {error}", hint=f"Install it: pip install 'sqrtdk[{extra}]'"
        ) from error
