"""No watch leaves a global hook or a mode behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from watched_models import global_hooks


@pytest.fixture(autouse=True)
def _no_hook_is_left() -> Iterator[None]:
    before = global_hooks()
    yield
    assert global_hooks() == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
