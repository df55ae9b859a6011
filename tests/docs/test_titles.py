"""A page has one name: its title, which the navigation shows, stands in the tables that lead to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

NAMED = {
    "start": "Start here",
    "why-sqrt-dk": "Why sqrt(d_k)",
    "check": "Check a model",
    "diff": "Compare two",
    "attention": "Use the attention",
    "watch": "Watch a run",
    "repair": "Repair",
    "numbers": "What the numbers mean",
    "port": "Port a model",
    "claims": "Claims",
    "limits": "Limits",
    "api": "API",
    "architecture": "Architecture",
    "glossary": "Glossary",
}
LINK = re.compile(r"\[([^]`]+(?:\([^)]*\))?)\]\(([\w/-]+\.md)\)")


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


@pytest.mark.parametrize("name", NAMED)
def test_the_navigation_has_these_words(name: str) -> None:
    assert _title(DOCS / "en" / f"{name}.md") == NAMED[name]


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md", "docs/en/index.md", "docs/zh/index.md"])
def test_tables_of_pages_name_them_by_their_titles(name: str) -> None:
    page = ROOT / name
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    found = [link for row in rows for link in LINK.findall(row)]
    links = [link for link in found if "docs" in (page.parent / link[1]).relative_to(ROOT).parts]
    assert len(links) > 12
    assert {
        (text, _title(page.parent / target)) for text, target in links if text != _title(page.parent / target)
    } == set()
