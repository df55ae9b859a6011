"""Tests of the Triton kernel: on a GPU where there is one, else in the interpreter; with the cases of the battery."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.with_name("attention"))]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 rows and 16 keys, and keys that are split from 32 on: a small call is many programs and blocks."""
    from tiling import SMALL

    for place, value in SMALL.items():
        monkeypatch.setattr(place, value)
