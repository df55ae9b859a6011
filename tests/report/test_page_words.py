"""What the pages say themselves: every fixed word in two languages, with a use, and no word outside the tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sqrtdk.report
from sqrtdk.compare.suspect import STAGES
from sqrtdk.messages import Text
from sqrtdk.messages._catalogue import topic
from sqrtdk.report import check_words, lab_words
from sqrtdk.report.diff_fold import MARKS
from tests.report.html_page import HtmlPage, template

CHINESE = re.compile("[\u3000-\u9fff\uff00-\uffef]")
HAN = re.compile("[\u4e00-\u9fff]")
SOURCE = Path(sqrtdk.report.__file__).parent
SAME = ("dropout", "logit", "log n = {value}")  # in both languages


def section(name: str, within: str) -> dict[str, Text]:
    """The texts of a section of a topic, by the rest of their keys."""
    return {key.removeprefix(within): text for key, text in topic(name).items() if key.startswith(within)}


DIFF = section("diff", "page.")
TABLES = {
    "check": (
        check_words.WORDS, check_words.SCRIPT_WORDS, check_words.VERDICT_WORDS, check_words.MODES, check_words.STEPS,
    ),
    "diff": (
        DIFF, section("diff", "outcome."), section("diff", "means."), section("diff", "result."),
        section("diff", "terminal."), section("stages", ""),
    ),
    "lab": (
        lab_words.WORDS, lab_words.ANSWERS, lab_words.ANSWERS_MEAN, lab_words.MET, lab_words.TALLY, lab_words.TERMINAL,
    ),
}  # fmt: skip
USERS = {  # of the words of the page: templates and the module that fills them
    "check": (check_words.WORDS, "report.html report_parts.html kv_cache.html laws.html languages.js", "html.py"),
    "diff": (DIFF, "diff.html diff_parts.html notebook/diff.html", "diff_html.py"),
    "lab": (lab_words.WORDS, "lab.html lab_parts.html", "lab_page.py"),
}
OWN = {  # names, signs and nothing to translate
    "report.html report_parts.html kv_cache.html laws.html": {"sqrtdk", "check", "English", "中文", "softmax", "R²"},
    "diff.html": {"sqrtdk", "diff", "English", "中文"},
    "lab.html": {"sqrtdk", "lab", "English", "中文"},
}


@pytest.mark.parametrize("page", TABLES)
def test_every_fixed_word_has_two_languages_and_a_use(page: str) -> None:
    for table in TABLES[page]:
        for key, words in table.items():
            assert CHINESE.search(words.zh) or words.zh in SAME or "dropout" in words.zh, key
            assert words.en, key
            assert not HAN.search(words.en), key
            assert set(re.findall(r"{\w+}", words.en)) == set(re.findall(r"{\w+}", words.zh)), key
    table, templates, module = USERS[page]
    source = "".join(map(template, templates.split())) + (SOURCE / module).read_text()
    assert [key for key in table if f'"{key}"' not in source] == []


def test_other_tables_are_complete_and_used() -> None:
    for name, unit, meaning in check_words.STATISTICS.values():
        assert HAN.search(meaning.zh)
        assert HAN.search(name.zh) or "logit" in name.zh
        assert bool(unit.en) == bool(unit.zh)
    script = template("report.js") + template("report_sites.js")
    assert [key for key in check_words.SCRIPT_WORDS if f'"{key}"' not in script and f".{key}" not in script] == []
    assert set(STAGES) <= {text.en for key, text in topic("stages").items() if "." not in key}
    assert {text.en for text in section("diff", "outcome.").values()} == set(MARKS)
    assert section("diff", "outcome.").keys() == section("diff", "means.").keys()
    terminal = (SOURCE / "lab.py").read_text().replace('f"control_{record.doubt}"', '"control_same"')
    assert [key for key in lab_words.TERMINAL if f'"{key}"' not in terminal] == ["control_undecided"]


@pytest.mark.parametrize("names", OWN)
def test_no_words_outside_the_tables(names: str) -> None:
    for name in names.split():
        text = re.sub(r"{%.*?%}|{{.*?}}|{#.*?#}", "", template(name), flags=re.DOTALL)
        texts = {text.strip() for text in HtmlPage(text).texts} - {""}
        words = {word for text in texts for word in re.findall(r"\w\w+", text)}
        assert words <= OWN[names], name
