"""Errors planted in the compiled kernel, one at a time, in a copy of the package: the battery must find each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sqrtdk
from sqrtdk.impl.kernel import libraries
from tests.attention.kernel_mutants import MUTANTS
from tests.attention.planted_copy import planted_copy
from tests.support.kernel_here import needs_kernel, takes
from tests.support.paths import with_tests

HOME = Path(sqrtdk.__file__).parent
FINDER = Path(__file__).with_name("find_planted.py")
CHEAP = "lse's gradient left out"  # of the Python part: nothing is compiled
MARKS = dict.fromkeys(MUTANTS, pytest.mark.slow) | {CHEAP: pytest.mark.full}
pytestmark = needs_kernel


def judged(package: Path, cache: Path | None, **given: str) -> subprocess.CompletedProcess[str]:
    """By the kernel that is compiled into the cache; the one that is there, where no cache is named."""
    variables = with_tests(package, **({} if cache is None else {"SQRTDK_CACHE": str(cache)}), **given)
    return subprocess.run([sys.executable, str(FINDER)], env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def test_planted_error_is_found(name: str, tmp_path: Path) -> None:
    planted_copy(MUTANTS[name], tmp_path)
    done = judged(tmp_path, tmp_path / "cache" if MUTANTS[name].file.endswith(".h") else None)
    assert done.returncode == 1, f"nothing finds: {name}\n{done.stderr[-2000:]}"
    assert done.stdout, done.stderr[-2000:]
    assert "compiler" not in done.stdout, "found by the compiler, not by the battery"
    assert "compiled kernel can't be" not in done.stdout, "never judged: " + done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", [name for name in libraries.TARGETS if takes(name)])
def test_without_a_planted_error_nothing_is_found(target: str, tmp_path: Path) -> None:
    done = judged(HOME.parent, tmp_path, SQRTDK_KERNEL=target)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    (library,) = (tmp_path / "sqrtdk").iterdir()
    assert library.name.startswith(f"attention-{target}-")
