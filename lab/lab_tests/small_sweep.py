"""A small sweep for the tests, and ways to leave its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sqrtdk_lab.sweep import Grid, _store, sweep

SMALL = Grid(d_k=[16, 4], keys=[8], scale=["none", "sqrt_dk"], distribution=["normal", "uniform"], seeds=[1, 0], rows=8)


def stop_after(count: int) -> Any:
    """A progress that raises when `count` cells are there."""

    def progress(done: int, total: int) -> None:
        assert total == 16
        if done == count:
            raise KeyboardInterrupt

    return progress


def interrupted(folder: Path, count: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Leave `count` cells, each in a part of its own."""
    monkeypatch.setattr(_store, "_PART_EVERY_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        sweep(SMALL, folder, progress=stop_after(count), **options)


def names(folder: Path) -> list[str]:
    """The files of the directory."""
    return sorted(path.name for path in folder.iterdir())


def edit(folder: Path, **changes: Any) -> None:
    """Change entries of the manifest."""
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
