"""The kernels compiled for GPUs that are not here: scripts/gpu_kernels.py, in a process without the interpreter."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_kernels.py"
# Small enough for CI; `-m slow` compiles all.
FEW = {
    "plain": ("sm_90", "forward bf16 64, causal"),
    "statistics": ("sm_90", "forward bf16 128, causal, all statistics"),
    "keys split": ("sm_80", "decode bf16 128, all statistics"),
    "backward": ("gfx942", "backward bf16 64, causal"),
}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    own["PYTHONPATH"] = str(ROOT / "src")
    return subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True, env=own, check=False)


@functools.cache
def compiled(target: str, name: str) -> tuple[dict[str, Any], ...]:
    done = run("--json", "--exact", target, name)
    assert done.returncode == 0, done.stdout + done.stderr
    return tuple(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("which", FEW)
def test_a_kernel_fits_its_target_and_spills_nothing_in_its_loop(which: str) -> None:
    records = compiled(*FEW[which])
    assert records
    for record in records:
        assert record["missed"] == []
        assert record["registers"] > 16
        if record["kernel"] != "combine":
            assert record["hot_loop_local"] == 0
            assert record["shared"] > 0
            assert sum(record["products"].values()) > 0


@pytest.mark.parametrize("which", ["plain", "statistics"])
def test_hopper_multiplies_by_warp_groups_and_loads_by_descriptors(which: str) -> None:
    (record,) = compiled(*FEW[which])
    assert set(record["products"]) == {"wgmma"}
    assert record["descriptors"]
    assert record["tensor_loads"] >= 4


def test_what_is_not_asked_for_costs_nothing() -> None:
    (plain,), (full,) = compiled(*FEW["plain"]), compiled(*FEW["statistics"])
    assert plain["instructions_a_logit"] < 9 < full["instructions_a_logit"] < 26
    assert plain["a_logit"]["MUFU"] < 1.1
    assert full["a_logit"]["MUFU"] < 1.1


def test_split_keys_are_combined() -> None:
    assert [record["kernel"] for record in compiled(*FEW["keys split"])] == ["forward", "combine"]


@pytest.mark.slow
def test_all_configurations_fit_and_the_page_and_the_record_say_so() -> None:
    done = run("--check")
    assert done.returncode == 0, done.stdout + done.stderr
