"""Errors planted in the Triton kernels, one at a time, in a copy of the package: the quick tests must find each."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attention.planted_copy import HOME, changed_code, planted_copy
from tests.gpu.gpu_mutants import MUTANTS, Tests
from tests.support.paths import ROOT, with_tests
from tests.support.triton_here import in_the_interpreter, needs_triton

HERE = Path(__file__).parent
CHEAP = "ties counted once"
SOME = {"block that begins the band seen in full": pytest.mark.full, "gradients of one query head": pytest.mark.full}
MARKS = dict.fromkeys(MUTANTS, pytest.mark.slow) | SOME | {CHEAP: pytest.mark.full}
RUN = """
import sys, pytest
code = pytest.main(sys.argv[1:])
import sqrtdk
print(sqrtdk.__file__)
sys.exit(code)
"""


def judged(package: Path, tests: Tests) -> subprocess.CompletedProcess[str]:
    """The tests, by the package in that folder."""
    file, chosen = tests
    arguments = [
        "-q",
        "-x",
        "-n",
        "0",
        "-m",
        "not slow and not gpu",
        "-p",
        "no:cacheprovider",
        str(HERE / file),
        "-k",
        chosen,
    ]
    return subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        env=with_tests(package),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@needs_triton
@in_the_interpreter
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def test_planted_error_is_found(name: str, tmp_path: Path) -> None:
    planted, tests = MUTANTS[name]
    planted_copy(planted, tmp_path)
    done = judged(tmp_path, tests)
    if done.returncode == -signal.SIGSEGV:
        return  # it reads where there is no memory; without it nothing does, see below
    assert done.returncode == 1, f"nothing finds: {name}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert f"{tmp_path / 'sqrtdk'}" in done.stdout, "another package was judged"
    assert "\nFAILED " in done.stdout, done.stdout[-2000:]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("tests", sorted({tests for _, tests in MUTANTS.values()}), ids=" ".join)
def test_without_a_planted_error_nothing_is_found(tests: Tests) -> None:
    done = judged(HOME.parent, tests)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_every_planted_error_has_its_place() -> None:
    for planted, _ in MUTANTS.values():
        text = (HOME / planted.file).read_text()
        assert changed_code(text, planted) != text


def test_number_of_planted_errors() -> None:
    assert len(MUTANTS) == len(MARKS) >= 70
