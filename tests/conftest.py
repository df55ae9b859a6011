"""Shared by every test: no hub, one seed, Triton's interpreter where there is no GPU."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["LC_ALL"] = "C.UTF-8"  # English, wherever the tests run
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import hypothesis
import pytest
import torch
from filelock import FileLock

from tests.support.once import made_once

logging.getLogger().addHandler(logging.NullHandler())  # without any, Python writes warnings to stderr

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# The same examples in every run, so that a red run is of the change; `--hypothesis-profile explore` draws others.
# How long an example takes says how busy the machine is.
UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("repeat", derandomize=True, **UNTIMED)
hypothesis.settings.register_profile("explore", **UNTIMED)
hypothesis.settings.load_profile("repeat")

if not torch.cuda.is_available() and not torch.xpu.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton's functions are made: before anything imports it


@pytest.fixture(autouse=True, scope="session")
def _kernel(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Build the compiled kernel where that is possible, so that "auto" takes the same way in every run.

    Of several workers one builds it. Where it can't be built, the tests of the kernel are skipped
    (`kernel_here.unable`), or fail and say why.
    """
    from sqrtdk.errors import UnsupportedError
    from sqrtdk.impl.kernel import build

    own = tmp_path_factory.getbasetemp()
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with FileLock(folder / "kernel.lock"), contextlib.suppress(UnsupportedError):
        build.ready()


@pytest.fixture(autouse=True, scope="session")
def _rules_alone() -> None:
    """Let `check` ask no laws where a test names none: hundreds of tests are of rules."""
    from sqrtdk.laws import table

    table.DEFAULT = "none"


@pytest.fixture(autouse=True)
def _seed() -> None:
    # torch.manual_seed keeps the stack for each kind of device that is not there: two milliseconds a test
    (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(0)


@pytest.fixture
def accelerate_anew() -> Iterator[None]:
    """Accelerate keeps its state for the process: none comes in from other tests, and none is left to them."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    forget()
    yield
    forget()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium for the tests of a file.

    No longer: Playwright's loop counts as running in the thread while it lives, so that a second one is refused, and
    so is every `asyncio.run`.
    """
    from playwright.sync_api import sync_playwright

    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=flags, timeout=180_000)
        yield started
        started.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs: "healthy" and "unscaled" really trained, "sick" written with all that can go wrong."""
    from tests.monitor import watched_runs

    folder = made_once(tmp_path_factory, "runs", watched_runs.make_all)
    return {name: folder / name for name in ("healthy", "unscaled", "sick")}
