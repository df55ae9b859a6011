"""Packages that few tests need: where one is missing, what uses it is skipped and says so."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


class Missing:
    """Stands for a module that is not installed; the first use of a name of it skips the test, or the file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks everything in a file for `__test__`
            raise AttributeError(name)
        return pytest.skip(f"{self._name} is not installed", allow_module_level=True)


def optional(name: str) -> Any:
    """Import a module, or return what stands for it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return Missing(name)


jsonschema = optional("jsonschema")

try:
    from syrupy.assertion import SnapshotAssertion as SnapshotAssertion
except ImportError:
    SnapshotAssertion = Any  # the fixture `snapshot` skips: tests/report/conftest.py
