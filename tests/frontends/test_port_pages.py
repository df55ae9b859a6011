"""The pages "Port from JAX", "Port to MLX" and "Port to llama.cpp": their programs, and what the commands print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.program import called

PAGES = {"jax": "jax", "mlx": "mlx.core", "llama-cpp": "llama_cpp"}  # by name, what must be installed
WRITES_FILES = "llama-cpp"  # its program writes the files that the commands read
# Versions, shares and residues, which differ from one machine to another.
UNSTEADY = re.compile(r"\d\.?\d*e-\d+|\d+\.\d+%|\d+\.\d+\.\d+|by 0\.\d+")


def _steady(line: str) -> str:
    return re.sub(r"\s+", " ", UNSTEADY.sub("#", line)).strip()


@pytest.mark.full
@pytest.mark.parametrize("name", PAGES)
def test_the_commands_print_what_the_page_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(PAGES[name])
    page = (ROOT / "docs" / "en" / f"{name}.md").read_text(encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for code, file in re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", page, re.MULTILINE | re.DOTALL):
        (tmp_path / file).write_text(code)
        if name == WRITES_FILES:
            subprocess.run([sys.executable, file], cwd=tmp_path, check=True, capture_output=True)
    console, *_ = re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for command in console.split("$ sqrtdk ")[1:]:
        words, _, printed = command.partition("\n")
        done = called(*words.split(), cwd=tmp_path, COLUMNS="110")
        found = list(map(_steady, done.stdout.splitlines()))
        for line in filter(None, map(_steady, printed.splitlines())):
            assert line == "..." or line in found, done.stdout + done.stderr
