"""Shared by every test: no hub, one seed."""

import contextlib
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _kernel() -> None:
    """Build the compiled kernel where that is possible, so that "auto" takes the same way in every run.

    Where it is not, the tests of the kernel are skipped (`kernel_here.unable`), or fail and say why.
    """
    from sqrtdk.errors import UnsupportedError
    from sqrtdk.impl.kernel import build

    with contextlib.suppress(UnsupportedError):
        build.ready()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
