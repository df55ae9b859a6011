"""No watch leaves a global hook or a mode behind; checkpoints that several files of tests read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.monitor.saved_runs import STEPS, measure, save
from tests.monitor.watched_models import global_hooks


@pytest.fixture(autouse=True)
def _no_hook_is_left() -> Iterator[None]:
    before = global_hooks()
    yield
    assert global_hooks() == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("runs") / "a", STEPS)


@pytest.fixture(scope="session")
def measured(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of `saved`; they are read only."""
    return measure(saved, tmp_path_factory.mktemp("records") / "run").runs[0]
