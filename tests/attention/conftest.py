"""Every test here: tiny calls are many blocks."""

from collections.abc import Iterator
from importlib import import_module

import pytest

import sqrtdk._attention  # noqa: F401 - its names are bound before any is replaced
from tests.support.program import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """`sqrtdk` and code in forks of a process that found no compiled kernel; each looks again in its own cache."""
    modules = (
        "sqrtdk._attention, sqrtdk._environment, sqrtdk.report.environment, sqrtdk.impl.kernel.build, "
        "torch.utils.cpp_extension"
    )
    with Warm(modules, SQRTDK_CACHE=str(tmp_path_factory.mktemp("no_library"))) as server:
        yield server


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What "auto" does on a machine that has no compiled kernel."""
    monkeypatch.setattr("sqrtdk.impl.choice.loaded", lambda: False)
    monkeypatch.setattr("sqrtdk.impl.choice.why_not_loaded", lambda: "there is no C++ compiler")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.attention.small import SIZES

    for module, sizes in SIZES.items():
        for name, value in sizes.items():
            monkeypatch.setattr(import_module(module), name, value)
