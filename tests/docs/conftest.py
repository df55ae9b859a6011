"""One build of the site for the tests of a run; SQRTDK_SITE names a folder where it is built already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.docs.pages import DOCS


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a warning is an error. Processes of one run, which have a parent folder in common, share it."""
    built = os.environ.get("SQRTDK_SITE")
    if built:
        return Path(built)
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "site"
    with FileLock(f"{folder}.lock"):
        if not (folder / "built").is_file():
            command = [sys.executable, str(DOCS / "site" / "build.py"), str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            (folder / "built").touch()
    return folder
