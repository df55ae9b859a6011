"""The tiers: `make test` and `make rest` share the cases of a sample, in any number of processes; the report."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT, with_tests
from tests.tiers import TIERS

TESTS = """
import pytest

many = pytest.mark.parametrize("case", range(40))

@pytest.mark.sampled(5)
@many
def test_some(case):
    pass

@pytest.mark.sampled(5)
@many
def test_the_same(case):
    pass

def test_always():
    sum(range(10**7))

@pytest.mark.full
def test_costly():
    pass

@pytest.mark.slow
def test_of_hours():
    pass
"""
MARKERS = "[pytest]\nmarkers =\n  sampled\n  full\n  slow\n  gpu\n"


PASSED = re.compile(r"::(test_\w+(?:\[\d+\])?) PASSED|PASSED \S*::(test_\w+(?:\[\d+\])?)")  # without and with xdist


def run(folder: Path, *arguments: str) -> tuple[set[str], str]:
    """The tests that passed, and all that pytest said."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "xdist", "-p", "tests.tiers", "-p", "no:cacheprovider"]
    few = with_tests() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the others take a second of each process
    done = subprocess.run([*command, *arguments], cwd=folder, env=few, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {alone or worker for alone, worker in PASSED.findall(done.stdout)}, done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_small.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(MARKERS)
    return tmp_path


def test_a_sample_and_the_rest_are_the_whole(folder: Path) -> None:
    """Two workers without a seed draw the same cases, and the printed seed draws them again."""
    drawn, output = run(folder, "-n", "2", "-m", TIERS["test"])
    (seed,) = re.findall(r"--sample-seed (\d+)", output)
    assert run(folder, "-m", TIERS["test"], "--sample-seed", seed)[0] == drawn
    rest, _ = run(folder, "-m", TIERS["rest"], "--sample-seed", seed)
    whole, _ = run(folder, "-m", TIERS["full"])
    assert not drawn & rest
    assert drawn | rest == whole
    assert len(whole) == 82
    part, _ = run(folder, "-n", "2", "-m", TIERS["rest"], "--sample-seed", seed, "--share", "4")
    assert part < rest
    assert len(part) == 18  # of 71


@pytest.mark.full
def test_functions_of_a_file_draw_the_same_cases_and_a_named_one_runs(folder: Path) -> None:
    drawn, _ = run(folder, "-m", TIERS["test"])
    some, same = (
        {name.partition("[")[2] for name in drawn if name.startswith(f"{f}[")} for f in ("test_some", "test_the_same")
    )
    assert some == same
    assert len(some) == 5
    assert {name for name in drawn if "[" not in name} == {"test_always"}
    left_out = next(f"test_some[{case}]" for case in range(40) if f"{case}]" not in some)
    assert run(folder, "-m", TIERS["test"], f"test_small.py::{left_out}")[0] == {left_out}


@pytest.mark.full
def test_the_seconds_of_a_test_are_told(folder: Path) -> None:
    _, output = run(folder, "-n", "2", "-m", TIERS["test"])
    report = output.partition("CPU seconds")[2]
    seconds = {name: float(value) for value, name in re.findall(r"^ +([\d.]+)  \S+::(\S+)$", report, re.MULTILINE)}
    assert max(seconds, key=lambda name: seconds[name]) == "test_always"
    assert "2 process(es)" in report
    assert "11 tests" in report


def test_make_selects_by_the_same_markers() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for tier, marks in TIERS.items():
        assert re.search(rf"^{tier}: .*\n\t\$\(call tests,{marks}\)$", makefile, re.MULTILINE), tier
    assert f"-m '{TIERS['test']}'" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
