"""Imports the optional dependencies on first use."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sqrtdk.errors import MissingExtraError
from sqrtdk.messages import Message

if TYPE_CHECKING:
    import torch

INSTALL_HINT = "errors.hint.install_hf"  # id of a sentence
TRANSFORMERS_AT_LEAST = (4, 48, 0)
REGISTERS_AT_LEAST = (4, 53, 0)


def import_transformers() -> Any:
    """Return the transformers module.

    Raises:
        MissingExtraError: It is not installed, or is older than 4.48; the hint names the pip command.
    """
    try:
        module = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError(
            Message("errors.extras.transformers", reason=str(error)), hint=Message(INSTALL_HINT)
        ) from error
    return check_version(module)


def attention_registers() -> tuple[Any, Any]:
    """Return transformers' registers of attention functions and of their masks.

    Raises:
        MissingExtraError: transformers is not installed, or is older than 4.53, which knows no function of others.
    """
    check_version(import_transformers(), REGISTERS_AT_LEAST)
    masks = importlib.import_module("transformers.masking_utils")
    return importlib.import_module("transformers").AttentionInterface, masks.AttentionMaskInterface


def check_version(module: Any, least: tuple[int, ...] = TRANSFORMERS_AT_LEAST) -> Any:
    """Return `module` if its version is `least` or newer.

    Raises:
        MissingExtraError: It is older.

    Example:
        >>> import types
        >>> check_version(types.SimpleNamespace(__version__="4.49.0.dev0")).__version__
        '4.49.0.dev0'
        >>> check_version(types.SimpleNamespace(__version__="4.47.1"))
        Traceback (most recent call last):
        sqrtdk.errors.MissingExtraError: transformers 4.47.1 is too old: 4.48.0 or newer is needed
        Hint: Run: pip install 'sqrtdk[hf]'
    """
    version = str(module.__version__)
    if _numbers(version) < least:
        oldest = ".".join(map(str, least))
        raise MissingExtraError(
            Message("errors.extras.old_transformers", version=version, oldest=oldest), hint=Message(INSTALL_HINT)
        )
    return module


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def build_options(dtype: torch.dtype, *, static: bool) -> dict[str, Any]:
    """Return what `from_config` and `from_pretrained` take under a name of their version.

    Args:
        dtype: The dtype of the weights.
        static: Whether the model is built without values.
    """
    version = _numbers(import_transformers().__version__)
    options: dict[str, Any] = {"dtype" if version >= (4, 56) else "torch_dtype": dtype}
    if static and version >= (5,):
        options["experts_implementation"] = "batched_mm"  # others route by values, which meta tensors lack
    return options


def stored_dtype(config: Any) -> torch.dtype | None:
    """Return the dtype that a config names, under its name of before 4.56 or after; None if it names none."""
    import torch

    stored = getattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", None)
    if isinstance(stored, str):  # what a version does not know it takes as it stands in the file
        stored = getattr(torch, stored, None)
    return stored if isinstance(stored, torch.dtype) else None


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
