from pathlib import Path

import pytest

from tests.support.program import Warm, warm


@pytest.fixture
def sqrtdk() -> Warm:
    """`sqrtdk VERB`, each call a process of its own."""
    return warm()


@pytest.fixture
def nets(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory with the modules of factories that the test's file lists: `MODULES`, by path."""
    for name, code in request.module.MODULES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, encoding="utf-8")
    return tmp_path
