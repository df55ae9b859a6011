"""What the pages say themselves: Chinese that is Chinese, and no word outside the catalogue."""

from __future__ import annotations

import re

import pytest

from sqrtdk.audit.mistakes import MISTAKES
from sqrtdk.compare.inside.suspect import STAGES
from sqrtdk.messages._catalogue import topic, unfilled
from sqrtdk.report import html
from sqrtdk.report.check.headline import OUTCOME_TONES
from sqrtdk.report.check.payload import UNIT_BY_STATISTIC
from sqrtdk.report.diff.fold import STAGE_MARKS
from tests.report import sample_report
from tests.report.html_page import HtmlPage, template

CHINESE = re.compile("[\u3000-\u9fff\uff00-\uffef]")
HAN = re.compile("[\u4e00-\u9fff]")
SAME = ("dropout", "logit", "log n = {value}", "nat")  # in both languages
OWN = {  # names, signs and nothing to translate
    "report.html report_parts.html kv_cache.html laws.html": {"sqrtdk", "check", "English", "中文", "softmax", "R²"},
    "diff.html": {"sqrtdk", "diff", "English", "中文"},
}


@pytest.mark.parametrize("name", ["words", "pages", "diff", "stages"])
def test_chinese_is_chinese(name: str) -> None:
    for key, text in topic(name).items():
        if re.search("[A-Za-z]{2}", re.sub(r"{\w+}", "", text.en)):
            assert CHINESE.search(text.zh) or text.zh in SAME or "dropout" in text.zh, key
        assert not HAN.search(text.en), key


def test_other_tables_are_complete_and_used() -> None:
    assert {f"{name}.{part}" for name in UNIT_BY_STATISTIC for part in ("name", "mean")} == set(
        unfilled("pages.statistics")
    )
    assert set(unfilled("pages.unit")) == set(filter(None, UNIT_BY_STATISTIC.values()))
    script = template("report.js") + template("report_sites.js")
    assert [key for key in unfilled("pages.script") if f'"{key}"' not in script and f".{key}" not in script] == []
    assert set(unfilled("pages.result")) == set(unfilled("terminal.outcome")) == set(OUTCOME_TONES)
    assert set(STAGES) <= {text.en for key, text in topic("stages").items() if "." not in key}
    assert {text.en for text in unfilled("diff.outcome").values()} == set(STAGE_MARKS)
    assert unfilled("diff.outcome").keys() == unfilled("diff.means").keys()


def test_every_mistake_has_a_name_in_both_languages() -> None:
    names = unfilled("words.mistake")
    assert {key: text.en for key, text in names.items()} == {name: name for name in MISTAKES}
    assert all(re.fullmatch(f"{HAN.pattern}+", text.zh) for text in names.values())


def test_steps_are_named_in_chinese_too() -> None:
    page = html.to_html(sample_report.healthy(1, 1))
    for name, chinese in (("dot", "点积"), ("causal", "因果"), ("implicit", "由参数给出"), ("op", "内核")):
        assert f'lang="en">{name}</span><span class="zh" lang="zh-CN">{chinese}<' in page


def test_the_script_of_a_run_says_words_of_the_catalogue_and_all_of_them() -> None:
    script = template("watch.js") + template("watch_parts.js")
    words = unfilled("watch.script")
    said = {*re.findall(r'say\("(\w+)"', script)}
    assert said <= set(words)
    made = [f"{start}\\w+{end}" for start, end in re.findall(r"say\(`(\w*)\$\{[^}]+\}(\w*)`", script)]
    assert [key for key in words if f'"{key}"' not in script and not any(re.fullmatch(m, key) for m in made)] == []
    assert not re.search("[\u4e00-\u9fff]", script)


@pytest.mark.parametrize("names", OWN)
def test_no_words_outside_the_tables(names: str) -> None:
    for name in names.split():
        text = re.sub(r"{%.*?%}|{{.*?}}|{#.*?#}", "", template(name), flags=re.DOTALL)
        texts = {text.strip() for text in HtmlPage(text).texts} - {""}
        words = {word for text in texts for word in re.findall(r"\w\w+", text)}
        assert words <= OWN[names], name
