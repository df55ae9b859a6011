"""The Chinese pages mirror the English ones: the same pages, headings, code, tables, links and pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, pages, read_page

ENGLISH, CHINESE = pages("en"), pages("zh")
TITLES = ":caption:"


def _pairs() -> dict[str, tuple[Path, Path]]:
    pairs = {name: (ENGLISH[name], CHINESE[name]) for name in sorted(ENGLISH.keys() & CHINESE.keys())}
    if (ROOT / "README.zh-CN.md").is_file():
        pairs["README"] = (ROOT / "README.md", ROOT / "README.zh-CN.md")
    return pairs


PAIRS = _pairs()


def _navigation(tree: str) -> list[str]:
    blocks = [block for path in pages(tree).values() for block in read_page(path).blocks]
    lines = "\n".join(text for info, text in blocks if info == "{toctree}").splitlines()
    return [line for line in lines if line and not line.startswith(":")]


def test_both_trees_have_the_same_pages() -> None:
    assert ENGLISH.keys() ^ CHINESE.keys() == set()


def test_the_navigation_has_every_page_once() -> None:
    listed = _navigation("en")
    assert len(listed) == len(set(listed))
    assert _navigation("zh") == listed
    assert {"index", *listed} == ENGLISH.keys()


def _code(block: tuple[str, str]) -> tuple[str, str]:
    """A block as both languages have it: of a directive that holds prose, its name."""
    info, text = block
    if not info.startswith("{"):
        return block
    literal = info.split("}")[0] in ("{toctree", "{eval-rst", "{public")
    lines = [line for line in text.splitlines() if not line.startswith(TITLES)]
    return (info, "\n".join(lines)) if literal else (info.split("}")[0], "")


def _targets(path: Path) -> list[str]:
    """Where links and pictures lead: the anchor is of the heading's own language."""
    page = read_page(path)
    tree = "zh" if path.is_relative_to(DOCS / "zh") or path.name == "README.zh-CN.md" else "en"
    ways = [
        target
        for target in (*(link.split("#")[0] for link in page.links), *page.pictures)
        if target not in ("README.md", "README.zh-CN.md")
    ]
    return sorted(re.sub(rf"(?<=[./]){tree}(?=[./])", "LANG", target) for target in ways)


@pytest.mark.parametrize("name", PAIRS)
def test_a_page_mirrors_the_english_one(name: str) -> None:
    """Headings, code, tables, formulas, links and pictures; words inside a formula may be translated."""
    english, chinese = map(read_page, PAIRS[name])
    assert english.headings == chinese.headings
    assert list(map(_code, english.blocks)) == list(map(_code, chinese.blocks))
    assert english.tables == chinese.tables
    formulas = [sorted(re.sub(r"\\text\{.*?\}|\s", "", text) for text in page.formulas) for page in (english, chinese)]
    assert formulas[0] == formulas[1]
    english_targets, chinese_targets = map(_targets, PAIRS[name])
    assert english_targets == chinese_targets
