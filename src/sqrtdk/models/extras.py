"""The optional dependencies, imported on first use."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from sqrtdk.errors import MissingExtraError

HINT = "Run: pip install 'sqrtdk[hf]'"
TRANSFORMERS_AT_LEAST = (5, 5)


def import_transformers() -> Any:
    """Return the transformers module.

    Raises:
        MissingExtraError: It is not installed, or older than 5.5; the hint names the pip command.
    """
    try:
        module = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError(f"transformers can't be imported: {error}", hint=HINT) from error
    return check_version(module)


def check_version(module: Any) -> Any:
    """Return `module` if its version is 5.5 or newer.

    Raises:
        MissingExtraError: It is older.

    Example:
        >>> import types
        >>> check_version(types.SimpleNamespace(__version__="5.5.0.dev0")).__version__
        '5.5.0.dev0'
        >>> check_version(types.SimpleNamespace(__version__="4.57.1"))
        Traceback (most recent call last):
        sqrtdk.errors.MissingExtraError: transformers 4.57.1 is too old: 5.5 or newer is needed
    """
    version = str(module.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < TRANSFORMERS_AT_LEAST:
        raise MissingExtraError(f"transformers {version} is too old: 5.5 or newer is needed", hint=HINT)
    return module


def import_accelerate() -> Any:
    """Return the accelerate module.

    Raises:
        MissingExtraError: It is not installed; the hint names the pip command.
    """
    try:
        return importlib.import_module("accelerate")
    except ImportError as error:
        raise MissingExtraError(f"a device map needs accelerate: {error}", hint=HINT) from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' log lines and progress bars off the terminal; restore its settings afterwards."""
    logging = import_transformers().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
