"""Tests that need a newer torch or transformers than the oldest that the package takes are skipped, and say so.

    @needs("AuxRequest", torch="2.9")   # one test, or one case; a file's are `pytestmark = needs(...)`

A file that can't be imported without has `pytest.importorskip("torch", minversion="2.9")` above what it imports.
"""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.version import Version


def at_least(package: str, version: str) -> bool:
    """Whether a package is installed, in this version or a newer one."""
    try:
        return Version(importlib.metadata.version(package)).release >= Version(version).release
    except importlib.metadata.PackageNotFoundError:
        return False


def missing(what: str = "", **least: str) -> str | None:
    """Why a test can't run here: None where every package is at least of its version."""
    older = [f"{package} {version}" for package, version in least.items() if not at_least(package, version)]
    return f"needs {' and '.join(older)}{f': {what}' if what else ''}" if older else None


def needs(what: str = "", **least: str) -> pytest.MarkDecorator:
    """Mark a test, a case or a file: it is skipped where a package is older than that."""
    reason = missing(what, **least)
    return pytest.mark.skipif(reason is not None, reason=reason or "")
