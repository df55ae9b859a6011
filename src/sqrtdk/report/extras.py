"""Libraries that only the extra `lab` installs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sqrtdk.errors import MissingExtraError


def load(module: str) -> Any:
    """Import a module of the extra `lab`.

    Args:
        module: its full name.

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
            f"{name} can't be imported: {error}", hint="Install it: pip install 'sqrtdk[lab]'"
        ) from error
