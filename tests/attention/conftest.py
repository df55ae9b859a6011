"""Every test here: tiny calls are many blocks."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

import sqrtdk._attention  # noqa: F401 - its names are bound before any is replaced

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What "auto" does on a machine that has no compiled kernel."""
    monkeypatch.setattr("sqrtdk.impl.choice.loaded", lambda: False)
    monkeypatch.setattr("sqrtdk.impl.choice.unavailable", lambda: "there is no C++ compiler")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from small import SIZES

    for module, sizes in SIZES.items():
        for name, value in sizes.items():
            monkeypatch.setattr(import_module(module), name, value)
