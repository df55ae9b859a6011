"""`make gpu`: where there is no GPU it says so in one line, installs nothing, and exits with 2."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
GPU: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "gpu.py"))
BESIDE = ROOT / ".venv-gpu"
TOLD = {"python": [3, 12], "torch": "2.13.0+cu130", "cuda": "13.0", "sees": True, "triton": True, "missing": []}


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
@pytest.mark.parametrize(
    "named",
    ["/no/such/python", *(pytest.param(named, marks=pytest.mark.full) for named in (None, sys.executable))],
    ids=["missing", "none", "this"],
)
def test_without_a_gpu_nothing_is_made(tmp_path: Path, named: str | None) -> None:
    there = BESIDE.exists()
    around = {name: value for name, value in os.environ.items() if name not in ("SQRTDK_TORCH", "OUT")}
    if named:
        around["SQRTDK_TORCH"] = named
    command = ["make", "--no-print-directory", "-C", str(ROOT), "gpu", f"PYTHON={sys.executable}", f"OUT={tmp_path}/o"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=around)
    assert (done.returncode, done.stdout) == (2, "")
    line, makes_own = done.stderr.splitlines()
    assert line.startswith("make gpu needs an NVIDIA GPU and torch 2.11 or newer for CUDA: ")
    assert "SQRTDK_TORCH=/path/to/python" in line
    assert "Error 2" in makes_own
    if named == "/no/such/python":
        assert "/no/such/python: it does not run" in line
    else:
        assert f"torch {torch.__version__}" in line
    assert BESIDE.exists() is there
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"torch": "2.11.0"}, None),
        ({"torch": "2.14.0a0+git12ab"}, None),
        ({"sees": False}, r"built for CUDA 13.0\) sees no NVIDIA GPU"),
        ({"cuda": None}, "built without CUDA"),  # that for AMD sees its own GPUs
        ({"torch": "2.10.1"}, "torch 2.10.1 is older than 2.11"),
        ({"python": [3, 10]}, "Python 3.10 is older than 3.11"),
        ({"triton": False}, "Triton is missing"),
        ({"error": "ModuleNotFoundError: no torch"}, "no torch"),
    ],
)
def test_which_torch_will_do(change: dict[str, Any], words: str | None) -> None:
    reason = GPU["obstacle"](TOLD | change)
    if words is None:
        assert reason is None
    else:
        with pytest.raises(ValueError, match=words):
            raise ValueError(reason)


@pytest.mark.full
def test_this_python_is_probed_as_it_is() -> None:
    told = GPU["probe"](sys.executable)
    assert (told["torch"], told["sees"]) == (torch.__version__, torch.cuda.is_available())
    assert told["missing"] == []
    assert Path(told["folder"], "torch").is_dir()
    assert GPU["complete"](sys.executable, told) == sys.executable  # nothing is missing: nothing is made


@pytest.mark.full
def test_the_record_of_the_tests_has_each_of_them(tmp_path: Path) -> None:
    code = (
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip(reason='why')\ndef test_c(): pass"
    )
    (tmp_path / "test_three.py").write_text(code)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=x.xml", "test_three.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300, check=False)
    record = json.loads(json.dumps(GPU["outcomes"](tmp_path / "x.xml")))
    assert record["counts"] == {"passed": 1, "failure": 1, "error": 0, "skipped": 1}
    assert [row["outcome"] for row in record["tests"]] == ["passed", "failure", "skipped"]
    assert record["tests"][2]["test"] == "test_three::test_c"
    assert "why" in record["tests"][2]["reason"]
    assert GPU["outcomes"](tmp_path / "none.xml")["tests"] == []
