"""The shapes in annotations are true: every annotated function runs with them checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import with_tests

CHILD = Path(__file__).parent / "run_checked.py"


@pytest.mark.full
def test_shapes_are_those_of_the_annotations() -> None:
    """In one process of its own, as the package is loaded with its functions wrapped."""
    for package in ("beartype", "jaxtyping"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, str(CHILD)], env=with_tests(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert len(answer["right"]) > 150
    errors = {name: error for name, error in answer["right"].items() if error}
    assert not errors, "\n\n".join(f"{name}: {error}" for name, error in errors.items())
    assert answer["never called"] == []

    unrefused = {name: error for name, error in answer["wrong shapes"].items() if "TypeCheckError" not in error}
    assert unrefused == {}
    *unlike, unknown = answer["wrong annotations"].items()
    for function, error in unlike:
        assert error.startswith("TypeCheckError"), (function, error)
        assert function in error
    assert unknown[1] == "NameError: name 'Floats' is not defined"
