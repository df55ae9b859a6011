"""Sixteen numbers at once, in registers of every width: on this CPU, and on ARM under emulation if it is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from sqrtdk.impl.kernel import compiler
from sqrtdk.impl.kernel.libraries import KERNEL_FOLDER, TARGETS
from tests.attention.planted_copy import planted_copy
from tests.planting.changes import Change, Planted, plant
from tests.support.kernel_here import needs_kernel, takes

PROGRAM = Path(__file__).with_name("lanes_check.cpp")
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
NO_ARM = "not measured: install g++-aarch64-linux-gnu and qemu-user"
WIDTHS = {"avx512_bf16": 16, "avx512": 16, "avx2": 8, "sse4": 4, "neon": 4}
LANES, MASKS = "impl/kernel/lanes.h", "impl/kernel/masks.h"
PLANTED: dict[str, Planted] = {
    "half of a register": plant(f"{LANES}:folded", Change("<1>", "<2>")),
    "every second run of a product": plant(f"{LANES}:dot", Change("return F(A + B) + C;", "return F(A) + C;")),
    "a band one key too long": plant(f"{MASKS}:between", Change("(A - B, 0, C)", "(A - B + 1, 0, C)", at=1)),
}
pytestmark = [pytest.mark.full, needs_kernel]


def checked(target: str, made: Path, kernel: Path = KERNEL_FOLDER) -> subprocess.CompletedProcess[str]:
    """Compile the program for one of TARGETS, and run it."""
    arm = TARGETS[target].machine == "aarch64" and not takes(target)
    command = [ARM_COMPILER, "-static"] if arm else compiler.command()
    includes = [f"-isystem{path}" for path in include_paths()]
    flags = ["-O3", "-std=c++20", *TARGETS[target].flags, *includes, f"-I{kernel}"]
    subprocess.run([*command, *flags, str(PROGRAM), "-o", str(made)], check=True, capture_output=True)
    return subprocess.run([ARM_EMULATOR] * arm + [str(made)], capture_output=True, text=True, check=False)


def can(target: str) -> bool:
    """Whether it runs here: on this CPU, or under emulation."""
    emulated = TARGETS[target].machine == "aarch64" and shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)
    return takes(target) or bool(emulated)


@pytest.mark.parametrize("target", TARGETS)
def test_sixteen_at_once_are_one_at_a_time(target: str, tmp_path: Path) -> None:
    if not can(target):
        pytest.skip(NO_ARM if target == "neon" else f"this CPU has no {target}")
    done = checked(target, tmp_path / "check")
    assert done.returncode == 0, done.stdout[-2000:]
    assert f"in registers of {WIDTHS[target]}: " in done.stdout


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_found(name: str, tmp_path: Path) -> None:
    planted_copy(PLANTED[name], tmp_path)
    done = checked("sse4" if takes("sse4") else "neon", tmp_path / "check", tmp_path / "sqrtdk/impl/kernel")
    assert done.returncode == 1
    assert "differ" in done.stdout
