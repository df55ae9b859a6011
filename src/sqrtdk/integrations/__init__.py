"""What other libraries are given; each module imports its library on first use."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

_ROOMS = ("transformers",)


def __getattr__(name: str) -> ModuleType:
    if name not in _ROOMS:
        raise AttributeError(f"module 'sqrtdk.integrations' has no attribute {name!r}")
    return import_module(f"sqrtdk.integrations.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOMS])
