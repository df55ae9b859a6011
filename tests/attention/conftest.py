"""Every test here: tiny calls are many blocks, so that the tiled implementation is more than the dense one."""

import sys
from pathlib import Path

import pytest

import sqrtdk._attention  # noqa: F401 - its names are bound before any is replaced

sys.path.insert(0, str(Path(__file__).parent))

ROWS = 3  # of a block


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from sqrtdk.impl import tiled

    monkeypatch.setattr(tiled, "block_rows", lambda call: ROWS)
