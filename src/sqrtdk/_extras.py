"""Imports on demand: libraries of an extra, named with the pip command if missing, and own modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def load_extra(module: str, extra: str = "lab") -> Any:
    """Import a module of an extra.

    Args:
        module: its full name.
        extra: the extra that installs it.

    Raises:
        MissingExtraError: It can't be imported; the hint names the pip command.

    Example:
        >>> load_extra("safetensors.torch").__name__
        'safetensors.torch'
    """
    try:
        return import_module(module)
    except ImportError as error:
        # here, since pytest imports the plugin's package, and with it this file, in every run
        from sqrtdk.errors import MissingExtraError
        from sqrtdk.messages import Message

        name = module.partition(".")[0]
        raise MissingExtraError(
            Message("errors.extras.missing", name=name, reason=str(error)),
            hint=Message("errors.hint.install", extra=extra),
        ) from error


def lazy_rooms(package: str, names: tuple[str, ...]) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its modules on first use.

    Args:
        package: its full name.
        names: of its modules.

    Example:
        >>> import sqrtdk.report
        >>> sqrtdk.report.json.__name__, "html" in dir(sqrtdk.report)
        ('sqrtdk.report.json', True)
    """

    def get(name: str) -> ModuleType:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    def listed() -> list[str]:
        return sorted(names)

    return get, listed


def lazy_names(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a module whose names are imported on first use.

    Args:
        package: its full name.
        home: full name of the module that each name comes from.

    Example:
        >>> import sqrtdk.testing
        >>> sqrtdk.testing.assert_laws.__module__, "assert_laws" in dir(sqrtdk.testing)
        ('sqrtdk.testing.laws', True)
    """

    def get(name: str) -> Any:
        if name not in home:
            import_module("sqrtdk._guesses").no_attribute(package, name, home)
        return getattr(import_module(home[name]), name)

    def listed() -> list[str]:
        return sorted(home)

    return get, listed
