"""Errors planted in the package's own backward passes, in a copy of it: the law `gradient` names each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sqrtdk
from tests.attention.planted_copy import planted_copy
from tests.laws.kernel_faults import PLANTINGS
from tests.support import kernel_here, triton_here
from tests.support.paths import with_tests

FINDER = Path(__file__).with_name("find_gradient.py")
HOME = Path(sqrtdk.__file__).parent
NEEDS = {
    "cpu": [kernel_here.needs_kernel],
    "triton": [triton_here.needs_triton, triton_here.in_the_interpreter],
}
CASES = [
    pytest.param(name, marks=[pytest.mark.full if one.cheap else pytest.mark.slow, *NEEDS.get(one.impl, ())])
    for name, one in PLANTINGS.items()
]


def asked(package: Path, impl: str, call: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What the law says of the package in that folder."""
    variables = {"OMP_NUM_THREADS": "1", **variables}
    if impl == "triton":
        variables["TRITON_INTERPRET"] = os.environ.get("TRITON_INTERPRET", "1")
    program = [sys.executable, str(FINDER), impl, call]
    return subprocess.run(program, env=with_tests(package, **variables), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", CASES)
def test_a_planted_error_is_named(name: str, tmp_path: Path) -> None:
    one = PLANTINGS[name]
    planted_copy(one.planted, tmp_path)
    compiled = {"SQRTDK_CACHE": str(tmp_path / "cache")} if one.planted.file.endswith(".h") else {}
    done = asked(tmp_path, one.impl, one.call, **compiled)
    assert re.fullmatch(one.answer, "; ".join(done.stdout.splitlines())), done.stdout + done.stderr[-2000:]
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("impl", "call"),
    [
        pytest.param(impl, call, marks=NEEDS.get(impl, ()))
        for impl, call in sorted({(one.impl, one.call) for one in PLANTINGS.values()})
    ],
)
def test_without_a_planted_error_the_law_is_kept(impl: str, call: str) -> None:
    done = asked(HOME.parent, impl, call)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
