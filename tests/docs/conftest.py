"""One build of the site for the tests of a run; SQRTDK_SITE names a folder where it is built already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.once import made_once

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a warning is an error."""

    def build(folder: Path) -> None:
        command = [sys.executable, str(DOCS / "site" / "build.py"), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    built = os.environ.get("SQRTDK_SITE")
    return Path(built) if built else made_once(tmp_path_factory, "site", build)
