"""Catalogues: the same keys and placeholders in both languages, full-width punctuation, every control named."""

from __future__ import annotations

import re
import string

import pytest

from sqrtdk.app.catalogue import LANGUAGES, language_of, words
from sqrtdk.app.figures import FIGURES
from sqrtdk.app.settings import CONTROLS, RULES

ENGLISH, CHINESE = (words(language).entries for language in LANGUAGES)
HAN = r"[\u4e00-\u9fff]"


def test_both_have_the_same_keys() -> None:
    assert list(ENGLISH) == list(CHINESE)


def test_both_have_the_same_placeholders() -> None:
    def placeholders(text: str) -> list[tuple[str, str | None]]:
        return sorted((name, how) for _, name, _, how in string.Formatter().parse(text) if name is not None)

    assert [key for key in ENGLISH if placeholders(ENGLISH[key]) != placeholders(CHINESE[key])] == []


def test_chinese_has_full_width_punctuation() -> None:
    wrong = {
        key: text
        for key, text in CHINESE.items()
        if re.search(rf"{HAN}\s*[,;:!?(]|[,;:!?)]\s*{HAN}|{HAN}\.", re.sub(r"`[^`]*`|\{[^}]*\}", "", text))
    }
    assert wrong == {}


def test_chinese_is_chinese_and_english_is_english() -> None:
    assert [key for key, text in ENGLISH.items() if re.search(HAN, text)] == ["page.language"]
    same = {key for key, text in CHINESE.items() if text == ENGLISH[key]}
    assert all(re.fullmatch(r"[\w\s/√().α+²-]*", CHINESE[key]) for key in same)


def test_all_that_can_be_chosen_has_a_name() -> None:
    assert {f"control.{name}" for name in CONTROLS} <= ENGLISH.keys()
    assert {f"offered_rule.{name}" for name in RULES} <= ENGLISH.keys()
    assert {f"parameter.{name}" for name, control in RULES.items() if control is not None} <= ENGLISH.keys()
    assert {f"{table}.{name}" for table in ("figure", "caption") for name in FIGURES} <= ENGLISH.keys()
    assert {f"offered_components.{name}" for name in CONTROLS["components"].offered} <= ENGLISH.keys()


@pytest.mark.parametrize(("accepted", "language"), [("zh-CN,zh;q=0.9", "zh"), ("ZH", "zh"), ("fr,zh", "en")])
def test_the_readers_first_language_counts(accepted: str, language: str) -> None:
    assert language_of(accepted) == language
