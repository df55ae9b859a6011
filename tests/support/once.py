"""What is costly to make is made once, for all processes of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the first process to need it has made; workers of xdist have its parent in common."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"once-{name}"
    made = Path(f"{folder}.made")
    with FileLock(f"{folder}.lock"):
        if not made.exists():
            make(folder)
            made.touch()
    return folder
