"""The page of claims and the quotes of the lesson are those of the register, with the verdicts of its full run."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from doc_pages import DOCS, ROOT
from sqrtdk.lab.register import CLAIMS
from sqrtdk.report.lab_words import ANSWERS

SCRIPT = ROOT / "scripts" / "claims_page.py"


def test_the_pages_are_as_written() -> None:
    for path, text in runpy.run_path(str(SCRIPT))["pages"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python scripts/claims_page.py"


def sections(language: str) -> dict[str, str]:
    text = (DOCS / language / "claims.md").read_text(encoding="utf-8")
    found = re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(found) == len(dict(found))
    return dict(found)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_claim_has_its_verdict_condition_and_command(language: str) -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "lab.json").read_text(encoding="utf-8"))["claims"]
    found = sections(language)
    assert list(found) == list(CLAIMS) == [row["id"] for row in rows]
    for row in rows:
        text = found[row["id"]]
        answer = row["full"]["verdict"]
        assert f"**{getattr(ANSWERS[answer], language)}**" in text
        assert text.count("\n- ") == (5 if answer == "depends" else 4), row["id"]
        assert f"`sqrtdk lab run {row['id']}`" in text


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_kind_lists_its_claims(language: str) -> None:
    text = (DOCS / language / "claims.md").read_text(encoding="utf-8")
    for kind in ("S0", "S1", "S2", "S3", "S4"):
        (row,) = re.findall(rf"^\| [^|]*`{kind}`[^|]* \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
        assert re.findall(r"\(#([a-z0-9-]+)\)", row) == [one.id for one in CLAIMS.values() if kind in one.sources]


def test_an_edited_page_is_found_out(tmp_path: Path) -> None:
    for name in ("scripts", "benchmarks/results", "docs/en", "docs/zh"):
        (tmp_path / name).mkdir(parents=True)
    copied = [SCRIPT, ROOT / "benchmarks/results/lab.json"]
    copied += [DOCS / language / f"{name}.md" for language in ("en", "zh") for name in ("claims", "why-sqrt-dk")]
    for path in copied:
        (tmp_path / path.relative_to(ROOT)).write_bytes(path.read_bytes())
    lesson = tmp_path / "docs" / "zh" / "why-sqrt-dk.md"
    lesson.write_text(lesson.read_text(encoding="utf-8").replace("**部分成立**", "**成立**"), encoding="utf-8")
    command = [sys.executable, tmp_path / "scripts" / "claims_page.py"]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, "docs/zh/why-sqrt-dk.md: run python scripts/claims_page.py\n")
