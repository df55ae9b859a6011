"""Tests of the Triton kernel: on a GPU where there is one, else in the interpreter; with the cases of the battery."""

import pytest


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 rows and 16 keys, and keys that are split from 32 on: a small call is many programs and blocks."""
    from tests.gpu.tiling import SMALL

    for place, value in SMALL.items():
        monkeypatch.setattr(place, value)
