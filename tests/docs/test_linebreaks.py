"""Lines of a Chinese source are joined without the space that a browser would show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

nodes = pytest.importorskip("docutils.nodes", reason="docutils is not installed")
SITE = Path(__file__).parents[2] / "docs" / "site"


@pytest.fixture(autouse=True)
def _site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(SITE), *sys.path])


@pytest.fixture
def paragraph() -> nodes.paragraph:
    """As the parser of Markdown leaves it: a line break is a piece of its own."""
    from linebreaks import join_lines

    code = nodes.literal("", "k：\n键")
    pieces = ["缩放，", "\n", "再把", "\n", "熵", "\n", code, "\n", "，然后", "\n", "softmax 给出", "\n", "权重："]
    pieces += [nodes.strong("", "公式。"), " 对每个"]  # a space that Markdown asks for
    made = nodes.paragraph("", "", *(nodes.Text(piece) if isinstance(piece, str) else piece for piece in pieces))
    join_lines(nodes.section("", made))
    return made


def test_chinese_lines_are_joined_and_others_keep_their_space(paragraph: nodes.paragraph) -> None:
    assert paragraph.astext() == "缩放，再把熵\nk：\n键，然后\nsoftmax 给出权重：公式。对每个"


def test_code_keeps_its_lines(paragraph: nodes.paragraph) -> None:
    (code,) = paragraph.findall(nodes.literal)
    assert code.astext() == "k：\n键"


def test_a_formula_keeps_the_marks_beside_it() -> None:
    from linebreaks import keep_marks

    pieces = ["缩放（", nodes.math("", "s"), "）。因子 ", nodes.math("", "c"), " 与", nodes.math("", "a"), ", b"]
    made = nodes.paragraph("", "", *(nodes.Text(piece) if isinstance(piece, str) else piece for piece in pieces))
    text = made.astext()
    keep_marks(nodes.section("", made))
    assert made.astext() == text
    assert [piece.astext() for piece in made.findall(nodes.inline)] == ["（s）。", "a,"]
    assert all(piece["classes"] == ["whole"] for piece in made.findall(nodes.inline))
