"""How records are shown: `json.to_json` and `html.to_html` write the report of a check; nothing here computes."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

_ROOMS = ("html", "json")


def __getattr__(name: str) -> ModuleType:
    if name not in _ROOMS:
        raise AttributeError(f"module 'sqrtdk.report' has no attribute {name!r}")
    return import_module(f"sqrtdk.report.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOMS])
