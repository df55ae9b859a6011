"""Pages of the documentation as Markdown reads them: headings, blocks of code, tables, links, prose."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
pytest.importorskip("mdit_py_plugins", reason="myst-parser is not installed")
MATH_PLUGIN = pytest.importorskip("mdit_py_plugins.dollarmath").dollarmath_plugin
LIST_PLUGIN = pytest.importorskip("mdit_py_plugins.deflist").deflist_plugin
READER = MarkdownIt("commonmark").enable("table").use(MATH_PLUGIN).use(LIST_PLUGIN)

# What stands in prose in the place of code and formulas, and at the end of bold text.
CODE, MATH, JOINER = "\ue000", "\ue001", "\u2060"


@dataclass(frozen=True)
class Page:
    """One page; `headings` are levels, `tables` rows and columns, `prose` a text for each paragraph, cell or title."""

    headings: list[int]
    titles: list[str]
    blocks: list[tuple[str, str]]
    tables: list[tuple[int, int]]
    links: list[str]
    pictures: list[str]
    formulas: list[str]
    prose: list[tuple[int, str]]


def pages(tree: str) -> dict[str, Path]:
    """The pages of a tree by their names, as the navigation has them."""
    return {path.relative_to(DOCS / tree).with_suffix("").as_posix(): path for path in (DOCS / tree).rglob("*.md")}


def _plain(token: Token) -> str:
    marks = {"code_inline": CODE, "math_inline": MATH, "math_single": MATH, "softbreak": "\n", "hardbreak": "\n"}
    marks["strong_close"] = JOINER
    return "".join(
        child.content if child.type == "text" else marks.get(child.type, "") for child in token.children or []
    )


def _shapes(tokens: list[Token]) -> list[tuple[int, int]]:
    shapes: list[tuple[int, int]] = []
    for token in tokens:
        if token.type == "table_open":
            shapes.append((0, 0))
        elif token.type == "tr_open":
            shapes[-1] = (shapes[-1][0] + 1, 0)
        elif token.type in ("th_open", "td_open"):
            shapes[-1] = (shapes[-1][0], shapes[-1][1] + 1)
    return shapes


@cache
def read_page(path: Path) -> Page:
    """What the page holds, in its order."""
    tokens = READER.parse(path.read_text(encoding="utf-8"))
    inline = [token for token in tokens if token.type == "inline"]
    children = [child for token in inline for child in token.children or []]
    return Page(
        headings=[int(token.tag[1]) for token in tokens if token.type == "heading_open"],
        titles=[
            "".join(child.content for child in token.children or [])
            for before, token in pairwise(tokens)
            if before.type == "heading_open"
        ],
        blocks=[(token.info.strip(), token.content) for token in tokens if token.type == "fence"],
        tables=_shapes(tokens),
        links=[str(child.attrs["href"]) for child in children if child.type == "link_open"],
        pictures=[str(child.attrs["src"]) for child in children if child.type == "image"],
        formulas=[token.content for token in [*tokens, *children] if token.type.startswith("math_")],
        prose=[((token.map or [0])[0] + 1, _plain(token)) for token in inline],
    )
