"""One form for each term in all Chinese texts: catalogues, claims, pages of the documentation, README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXTS = sorted(
    path
    for pattern in (
        "README.zh-CN.md",
        "docs/zh/**/*.md",
        "docs/zh/**/*.svg",
        "docs/site/api_zh/*.txt",
        "src/sqrtdk/**/*.toml",
        "src/sqrtdk/**/*.py",
        "src/sqrtdk/**/*.html",
        "src/sqrtdk/**/*.js",
        "scripts/*.py",
    )
    for path in ROOT.glob(pattern)
)
HAN = "一-鿿"
FORMS = {  # what is wrong, and what the term is
    "内积": "点积",
    "点乘": "点积",
    "奈特": "nat",
    "归一化": "规范化",
    "层标准化": "层规范化",
    "批标准化": "批量规范化",
    "批规范化": "批量规范化",
    "打分": "评分",
    "得分函数": "评分函数",
    "对数几率": "logit",
    "雅可比(?!矩阵)": "雅可比矩阵",
    "注意力沉(?:没|淀)": "注意力汇点",
    rf"(?<=[{HAN}，。；：（])\s?[Ll]ogits\b": "logit",
    rf"\b[Ll]ogits\s?(?=[{HAN}，。；：）])": "logit",
    rf"(?<=[{HAN}])[,;?!](?=[{HAN}\s]|$)": "full-width punctuation",
    rf"(?<=[{HAN}]):(?=[{HAN}])": "full-width punctuation",
    rf"(?<=[{HAN}])\([{HAN}]|[{HAN}]\)(?=[{HAN}])": "full-width brackets",
}


def wrong(text: str) -> list[str]:
    """What is not as it should be, line by line.

    Example:
        >>> wrong("q 与 k 的内积")
        ['1: 内积, for 点积']
    """
    plain = re.sub(r"\]\([^)\n]*\)", "]", text)  # without the targets of links
    return [
        f"{number}: {found[0]}, for {term}"
        for number, line in enumerate(plain.split("\n"), 1)
        if re.search(f"[{HAN}]", line)
        for form, term in FORMS.items()
        for found in re.finditer(form, line)
    ]


@pytest.mark.parametrize(
    "text", ["内积", "层归一化之后", "各 logits 的和", "缩放, 而后", "softmax 雅可比为", "(见下)的"]
)
def test_a_wrong_form_is_seen(text: str) -> None:
    assert wrong(text)


@pytest.mark.parametrize("text", ["点积 max_logits", "softmax 雅可比矩阵", "logit 的和", "缩放，而后", "`f(x)` 的值"])
def test_a_right_form_is_not(text: str) -> None:
    assert not wrong(text)


def test_every_chinese_text_has_the_terms() -> None:
    assert len(TEXTS) > 100
    found = [f"{path.relative_to(ROOT)}:{one}" for path in TEXTS for one in wrong(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)
