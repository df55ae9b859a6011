"""No watch leaves a global hook or a mode behind; checkpoints that several files of tests read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.monitor.saved_runs import STEPS, measure, save
from tests.monitor.watched_models import global_hooks
from tests.support.once import made_once
from tests.support.two_ranks import two_ranks as two_ranks


@pytest.fixture(autouse=True)
def _no_hook_is_left() -> Iterator[None]:
    before = global_hooks()
    yield
    assert global_hooks() == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "saved", lambda folder: save(folder / "a", STEPS)) / "a"


@pytest.fixture(scope="session")
def measured(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of `saved`; they are read only."""
    return made_once(tmp_path_factory, "measured", lambda folder: measure(saved, folder))
