"""Chinese pages: full-width punctuation, no space beside it, a space between Chinese and Latin letters or code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import CODE, JOINER, MATH, ROOT, pages, read_page

PAGES = {**pages("zh"), "README.zh-CN": ROOT / "README.zh-CN.md"}
HAN = r"\u3400-\u9fff"
MARKS = "，。：；？！、（）《》“”"
LATIN = f"A-Za-z0-9{CODE}{MATH}"
# (B, H, L, E) and tanh(z), which are read as code is
SHAPE = re.compile(rf"(?a:\w+)\([^(){HAN}]*\)|\((?=[^()]*[,=\d])[^(){HAN}]*\)")

WRONG = {
    "half-width punctuation beside Chinese": rf"[{HAN}] ?[,;:?!()]|[,;:?!()] ?[{HAN}]|[{HAN}]\.(?!\w)",
    "a half-width comma between two pieces of code": rf"{CODE}, {CODE}",
    "straight quotation marks": rf"[{HAN}]['\"]|['\"][{HAN}]",
    "a space beside full-width punctuation": rf"[{HAN}{LATIN}{MARKS}] [{MARKS}]|[{MARKS}] [{HAN}{LATIN}{MARKS}]",
    "a space between Chinese characters": rf"[{HAN}] [{HAN}]",
    "no space between Chinese and Latin letters": rf"[{HAN}][{LATIN}]|[{LATIN}][{HAN}]",
    "bold that is not read as such": r"\*\*",
}


def wrong_places(path: Path, pattern: str) -> list[str]:
    places = []
    for line, written in read_page(path).prose:
        text = SHAPE.sub(CODE, written)
        if re.search(rf"[{HAN}]", text):
            shown = text.replace(CODE, "`").replace(MATH, "$").replace(JOINER, "")
            places += [f"{path.name}:{line}: {shown}" for _ in re.findall(pattern, text)]
    return places


@pytest.mark.parametrize("rule", WRONG)
def test_punctuation_and_spaces(rule: str) -> None:
    places = [place for path in PAGES.values() if path.is_file() for place in wrong_places(path, WRONG[rule])]
    assert places == []


TEXTS = {
    "half-width punctuation beside Chinese": "缩放,熵",
    "a half-width comma between two pieces of code": "函数 `a`, `b`",
    "straight quotation marks": '所谓"熵"',
    "a space beside full-width punctuation": "熵 （nat）",
    "a space between Chinese characters": "缩放 因子",
    "no space between Chinese and Latin letters": "用softmax",
    "bold that is not read as such": "**熵。**是",
}


@pytest.mark.parametrize("rule", WRONG)
def test_each_rule_can_fail(rule: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(TEXTS[rule], encoding="utf-8")
    assert wrong_places(page, WRONG[rule])
    fine = tmp_path / "fine.md"
    fine.write_text("**缩放因子**是 `scale`：把 logit（即 $z$）乘上它，\n熵便会改变。", encoding="utf-8")
    assert wrong_places(fine, WRONG[rule]) == []
