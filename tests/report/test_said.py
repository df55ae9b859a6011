"""The Chinese of rules, alarms, comparisons and claims, as people read it."""

from __future__ import annotations

import dataclasses
import html
import re

import pytest

import sqrtdk
from sqrtdk.audit.baseline import compare_with_baseline, ledger_of
from sqrtdk.audit.declared import BASE_FIELDS, BASE_SWITCHES
from sqrtdk.audit.families import FAMILIES, by_family
from sqrtdk.audit.multipliers import by_config
from sqrtdk.compare.causes import CAUSES
from sqrtdk.messages import Message, joined, said
from sqrtdk.messages._catalogue import topic, unfilled
from sqrtdk.report.check import baseline
from sqrtdk.report.check.markdown import to_markdown
from sqrtdk.report.diff.fold import cause_name
from sqrtdk.report.diff.terminal import to_text as diff_text
from sqrtdk.report.terminal import summary_line, to_text

CHINESE = re.compile(r"[\u4e00-\u9fff]")


def test_every_cause_has_a_name_in_chinese() -> None:
    for name in (*CAUSES, "input", "unknown"):
        shown = cause_name(name)
        assert CHINESE.search(shown.zh), name
        assert shown.zh.endswith(f"（{name}）")
        assert shown.en == name


@pytest.mark.parametrize("b", ["demo:unscaled", pytest.param("demo:twice", marks=pytest.mark.full)])
def test_a_comparison_in_chinese_has_the_sizes_and_no_english_words(b: str) -> None:
    report = sqrtdk.diff("demo", b, seq_len=16)
    (cause,) = (cause for cause in report.pairs[0].causes if cause.name == "scale")
    chinese = diff_text(report, width=200, language="zh")
    sizes = re.search(r"\((\S+) in place of (\S+)\)", " ".join(report.paragraphs))
    assert sizes is not None
    assert f"（A：{sizes[2]}，B：{sizes[1]}）" in re.sub(r"\n *", "", chinese)
    assert f"缩放因子（scale）{cause.a:.4g} -> {cause.b:.4g}" in chinese
    words = ("attention,", "rounding", "in place of", "differ", "has other", "leaves out", "allows", " none")
    assert [word for word in words if word in chinese] == ["differ"]  # fail-on: different


def test_every_family_and_field_that_declares_a_scale_is_said_in_chinese() -> None:
    families = [by_family(name, rule) for name, rule in FAMILIES.items()]
    fields = [by_config(path, "2", source) for path, _, source in BASE_FIELDS]
    switches = [by_config(path, "False", source) for path, _, _, source in BASE_SWITCHES]
    for text in (*families, *fields, *switches):
        chinese = said(text, "zh")
        assert chinese != text, text
        assert not re.search(
            r"\b(the|of|a|with|is|are|scale|gain|learned|no)\b(?! =)", chinese.replace("scale=", "")
        ), chinese
    first = by_config("attention_multiplier", "2", "sources.field.granite")
    second = Message("sources.declared.mscale", field="rope_scaling", mscale="2", square="1.3")
    both = Message("sources.declared.and", first=first, second=second)
    assert both == "config.attention_multiplier = 2 (Granite: the scale itself) and config.rope_scaling: mscale 2: x1.3"
    assert said(both, "zh") == (
        "config.attention_multiplier = 2（Granite：就是缩放因子本身），以及 config.rope_scaling：mscale 2：x1.3"
    )


ONE_FORM = (
    "fix", "found", "source", "site", "verdict", "health", "seed", "saturated", "max logit", "peak", "formula",
    "declared by", "no reason given", "model run", "ok", "exact", "declared", "unexplained", "unmeasured",
)  # fmt: skip


def test_the_terminal_and_the_page_have_one_chinese_word_for_one_thing() -> None:
    tables = (topic("words"), topic("terminal"), topic("pages"), unfilled("diff.terminal"))
    for english in ONE_FORM:
        forms = {
            re.sub(r"\{\w+\}|[：。 ]", "", text.zh)
            for table in tables
            for text in table.values()
            if "{count}" not in text.en and re.sub(r"\{\w+\}|[:.]", "", text.en).strip().lower() == english
        }
        assert len(forms) == 1 or (english == "unmeasured" and forms == {"未测量"}), (english, forms)
    assert topic("terminal")["mode.static"].zh == topic("pages")["mode.static"].zh


HALF_WIDTH = re.compile(r"[\u4e00-\u9fff] ?[,;:!?(]|[,;:!?] ?[\u4e00-\u9fff]")


SEPARATED = re.compile(r".*[\w)%][,;] .*")
NO_MEASURE_WORD = re.compile(r"\d (?:相符|已声明|未声明|未测量|提示|警告|错误|严重)")


WORDS = ("attention calls", "Exit code", "fail-on:", "finding", "found ", "expected ", "fix:", "leads to", "Figures of")


@pytest.mark.parametrize("model", ["demo", "demo:unscaled", "demo:twice", "demo:inverted"])
def test_a_check_is_all_in_chinese_with_chinese_punctuation(model: str) -> None:
    report = sqrtdk.check(model, seq_len=32)
    assert report.findings or model == "demo"
    for finding in report.findings:
        assert all(said(text, "zh") != text for text in (finding.message, finding.fix)), finding
    placed = tuple(dataclasses.replace(finding, at="a.py:3, b.py:14") for finding in report.findings)
    report = dataclasses.replace(report, findings=placed)
    for text in (*(to_text(report, width=width, language="zh") for width in (60, 400)), to_markdown(report, "zh")):
        assert [word for word in WORDS if word in text] == []
        assert HALF_WIDTH.findall(text) == []
        assert SEPARATED.findall(html.unescape(text)) == []
        assert NO_MEASURE_WORD.findall(text) == []
        assert ("a.py:3、b.py:14" in text) is bool(placed)
        assert f"退出码{report.exit_code}（fail-on：fail）。" in "".join(text.split())
    assert summary_line(report, "zh").endswith(to_text(report, width=400, language="zh").splitlines()[-1])


def test_a_baseline_in_chinese_says_the_same() -> None:
    kept = ledger_of(sqrtdk.check("demo", seq_len=16))
    comparison = compare_with_baseline(kept, sqrtdk.check("demo:unscaled", seq_len=16), "baseline.json")
    assert comparison.exit_code == 1
    chinese = baseline.to_text(comparison, width=200, language="zh")
    assert "- 判定：相符" in chinese
    assert "+ 判定：未声明：缺少缩放" in chinese
    assert "3 次相符" in baseline.ledger_line(kept, "zh")
    for text in (chinese, baseline.baseline_markdown(comparison, "zh")):
        assert SEPARATED.findall(html.unescape(text)) == []
        assert baseline.baseline_summary_line(comparison, "zh").partition("。")[0] in text
        for word in (" changed", " against ", "fails", "Exit code", "attentions", "review", "new finding:", "before"):
            assert word not in text, word
    numbers = [re.findall(r"\d+", baseline.baseline_summary_line(comparison, language)) for language in ("en", "zh")]
    assert numbers[0] == numbers[1]
    assert "会因此失败" in baseline.ledger_line(kept, "zh")


def test_what_stands_in_a_sentence_is_put_over_too() -> None:
    lost = Message("rules.unmeasured.scale", reason=Message("rules.verdict.not_read"))
    seen = Message("rules.joined.seen", text=lost, formula="softmax(q)")
    message = Message("rules.joined.call", text=seen, number=2, total=3)
    assert message == (
        "the scale could not be judged: the scale could not be read; seen up to there: softmax(q) (call 2 of 3 here)"
    )
    assert (
        said(message, "zh")
        == "无法判定缩放因子：无法读出缩放因子；到此为止看到的公式：softmax(q)（此处共 3 次调用，这是第 2 次）"
    )
    assert said(message, "en") == message


def test_two_sentences_stay_two() -> None:
    happened = Message("rules.mistakes.twice.two_factors.happened")
    mistake = Message("rules.mistakes.named", mistake="twice", happened=happened)
    message = joined([mistake, Message("rules.alike.factors", number=2, dims=64)])
    assert message == "twice, it is 1/head_dim, 1/sqrt(head_dim) applied twice; 2 factors of 64^-1/2 along the lineage"
    assert said(message, "zh") == (
        "实际为 1/head_dim，即 1/sqrt(head_dim) 用了两次（twice）；计算路径上有 2 个 64^-1/2 因子"
    )
