"""The compiled kernel under the address and undefined-behaviour sanitizers: no access out of bounds, no overflow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sqrtdk.impl.kernel.compiler import command
from sqrtdk.impl.kernel.libraries import KERNEL_FOLDER
from tests.attention.cases import CASES, LONG_CASES
from tests.attention.planted_copy import planted_copy
from tests.planting.changes import Change, plant
from tests.support.kernel_here import needs_kernel
from tests.support.paths import with_tests

PROGRAM = Path(__file__).with_name("sanitized.py")
OVERRUN = plant("impl/kernel/forward.h:Tile", Change("(A * B),", "(A * B - 16),", at=0))  # the logits of a tile
pytestmark = [
    pytest.mark.slow,
    needs_kernel,
]


def run(cache: Path, package: Path) -> subprocess.CompletedProcess[str]:
    found = [
        subprocess.run([*command(), f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")
    ]
    given = with_tests(package) | {
        "LD_PRELOAD": " ".join(path.strip() for path in found),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "SQRTDK_CACHE": str(cache),
    }
    return subprocess.run([sys.executable, str(PROGRAM)], env=given, capture_output=True, text=True, check=False)


def test_the_battery_runs_clean(tmp_path: Path) -> None:
    done = run(tmp_path, KERNEL_FOLDER.parents[2])
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    assert done.stdout.startswith(f"{len(LONG_CASES) + sum(case.cpu_at_once for case in CASES)} ")
    assert "ERROR" not in done.stderr
    assert "runtime error" not in done.stderr


def test_a_planted_overrun_is_seen(tmp_path: Path) -> None:
    planted_copy(OVERRUN, tmp_path)
    done = run(tmp_path / "cache", tmp_path)
    assert done.returncode == 99
    assert "heap-buffer-overflow" in done.stderr
