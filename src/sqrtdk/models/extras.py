"""Imports the optional dependencies on first use."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from sqrtdk.errors import MissingExtraError
from sqrtdk.messages import Message

INSTALL_HINT = "errors.hint.install_hf"  # id of a sentence
TRANSFORMERS_AT_LEAST = (5, 20, 2)


def import_transformers() -> Any:
    """Return the transformers module.

    Raises:
        MissingExtraError: It is not installed, or is older than 5.20.2; the hint names the pip command.
    """
    try:
        module = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError(
            Message("errors.extras.transformers", reason=str(error)), hint=Message(INSTALL_HINT)
        ) from error
    return check_version(module)


def check_version(module: Any) -> Any:
    """Return `module` if its version is 5.20.2 or newer.

    Raises:
        MissingExtraError: It is older.

    Example:
        >>> import types
        >>> check_version(types.SimpleNamespace(__version__="5.21.0.dev0")).__version__
        '5.21.0.dev0'
        >>> check_version(types.SimpleNamespace(__version__="4.57.1"))
        Traceback (most recent call last):
        sqrtdk.errors.MissingExtraError: transformers 4.57.1 is too old: 5.20.2 or newer is needed
        Hint: Run: pip install 'sqrtdk[hf]'
    """
    version = str(module.__version__)
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < TRANSFORMERS_AT_LEAST:
        oldest = ".".join(map(str, TRANSFORMERS_AT_LEAST))
        raise MissingExtraError(
            Message("errors.extras.old_transformers", version=version, oldest=oldest), hint=Message(INSTALL_HINT)
        )
    return module


def import_accelerate() -> Any:
    """Return the accelerate module.

    Raises:
        MissingExtraError: It is not installed; the hint names the pip command.
    """
    try:
        return importlib.import_module("accelerate")
    except ImportError as error:
        raise MissingExtraError(
            Message("errors.extras.accelerate", reason=str(error)), hint=Message(INSTALL_HINT)
        ) from error


def quiet_transformers() -> contextlib.AbstractContextManager[None]:
    """Return a context in which transformers prints no log lines and no progress bars."""
    logging = import_transformers().utils.logging
    had_bars = logging.is_progress_bar_enabled()
    return _quiet(logging, logging.disable_progress_bar, logging.enable_progress_bar if had_bars else None)


def quiet_hub() -> contextlib.AbstractContextManager[None]:
    """Return a context in which huggingface_hub prints no log lines and no progress bars."""
    utils = importlib.import_module("huggingface_hub.utils")
    had_bars = not utils.are_progress_bars_disabled()
    return _quiet(utils.logging, utils.disable_progress_bars, utils.enable_progress_bars if had_bars else None)


@contextlib.contextmanager
def _quiet(logging: Any, hide_bars: Callable[[], None], show_bars: Callable[[], None] | None) -> Iterator[None]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    hide_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if show_bars is not None:
            show_bars()
