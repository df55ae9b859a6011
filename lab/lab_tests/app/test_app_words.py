"""The words of the page: full-width punctuation in Chinese, and every control named."""

from __future__ import annotations

import re

import pytest

from sqrtdk.messages._catalogue import topic
from sqrtdk_lab.app.figures import EXPLORER_FIGURES
from sqrtdk_lab.app.serve import language_of
from sqrtdk_lab.app.settings import CONTROL_BY_RULE, CONTROLS

TEXTS = topic("app")
HAN = r"[\u4e00-\u9fff]"


def test_chinese_has_full_width_punctuation() -> None:
    wrong = {
        key: text.zh
        for key, text in TEXTS.items()
        if re.search(rf"{HAN}\s*[,;:!?(]|[,;:!?)]\s*{HAN}|{HAN}\.", re.sub(r"`[^`]*`|\{[^}]*\}", "", text.zh))
    }
    assert wrong == {}


def test_chinese_is_chinese_and_english_is_english() -> None:
    assert [key for key, text in TEXTS.items() if re.search(HAN, text.en)] == ["page.language"]
    assert all(re.fullmatch(r"[\w\s/√().α+²-]*", text.zh) for text in TEXTS.values() if text.zh == text.en)


def test_all_that_can_be_chosen_has_a_name() -> None:
    assert {f"control.{name}" for name in CONTROLS} <= TEXTS.keys()
    assert {f"offered_rule.{name}" for name in CONTROL_BY_RULE} <= TEXTS.keys()
    assert {f"parameter.{name}" for name, control in CONTROL_BY_RULE.items() if control is not None} <= TEXTS.keys()
    assert {f"{table}.{name}" for table in ("figure", "caption") for name in EXPLORER_FIGURES} <= TEXTS.keys()
    assert {f"offered_overlay.{name}" for name in CONTROLS["overlay"].offered} <= TEXTS.keys()
    assert {f"offered_components.{name}" for name in CONTROLS["components"].offered} <= TEXTS.keys()


@pytest.mark.parametrize(("accepted", "language"), [("zh-CN,zh;q=0.9", "zh"), ("ZH", "zh"), ("fr,zh", "en")])
def test_the_readers_first_language_counts(accepted: str, language: str) -> None:
    assert language_of(accepted) == language
