"""Where the repository is, and an environment in which another process can import the tests' own modules."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def with_tests(*first: Path, **variables: str) -> dict[str, str]:
    """This process's environment, with `first` and then the repository's root on the path of Python."""
    path = [*map(str, first), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | variables
