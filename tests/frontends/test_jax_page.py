"""The page "Port from JAX": its two programs, and what the two commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.frontends.programs import jax
from tests.support.paths import ROOT
from tests.support.program import called

PAGE = (ROOT / "docs" / "en" / "jax.md").read_text(encoding="utf-8")


def _steady(line: str) -> str:
    """Without blanks, shares and residues, which differ from CPU to CPU."""
    return re.sub(r"\s+", " ", re.sub(r"\d\.?\d*e-\d+|\d+\.\d+%", "#", line)).strip()


@pytest.mark.full
def test_the_commands_print_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jax.__version__
    monkeypatch.syspath_prepend(str(tmp_path))
    for code, name in re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(code)
    (console,) = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for command in console.split("$ sqrtdk ")[1:]:
        words, _, printed = command.partition("\n")
        done = called(*words.split(), cwd=tmp_path, COLUMNS="110")
        found = list(map(_steady, done.stdout.splitlines()))
        for line in filter(None, map(_steady, printed.splitlines())):
            assert line == "..." or line in found, done.stdout + done.stderr
