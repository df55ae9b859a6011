import dataclasses
import json
import re
from collections.abc import Callable

import pytest

from sqrtdk._language import Choice
from sqrtdk.audit.records import CheckReport
from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message
from sqrtdk.report.check.payload import UNIT_BY_STATISTIC, check_page_data
from sqrtdk.report.html import to_html
from sqrtdk.report.plain import plain
from sqrtdk.stats.heads import HeadStats
from sqrtdk.theory.gaussian import expected_entropy_nats
from tests.report.html_page import HtmlPage
from tests.report.sample_report import (
    EVIL,
    head_stats,
    healthy,
    hostile,
    judged,
    lawless,
    leaking,
    sick,
    static,
    unjudged,
)


def test_hostile_texts_are_texts() -> None:
    text = to_html(hostile())
    page = HtmlPage(text)
    assert not any("owned" in script for script in page.inside["script"][1:])
    assert "<script>document" not in text
    assert sum(plain(EVIL) in part for part in page.texts) > 15
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u2028\u2029\x00-\x08\x0b-\x1f\x7f]", text)
    block = page.inside["script"][0]
    assert not set("<>&\u2028\u2029") & set(block)
    data = json.loads(block)
    assert data["groups"][0]["rows"][0]["formula"] == f"softmax({plain(EVIL)})"


def test_every_number_of_a_head_is_there() -> None:
    report = sick()
    data = check_page_data(report)
    json.dumps(data, allow_nan=False)
    rows = [row for group in data["groups"] for row in group["rows"]]
    assert [item["key"] for item in data["statistics"]] == list(UNIT_BY_STATISTIC)
    assert sum(len(row["logits"]) for row in rows) == sum(j.call.heads for j in report.calls if j.call.stats)
    (row,) = [row for row in rows if row["site"] == "decoder.h.4.attn"]
    stats = report.calls[4].call.stats
    assert isinstance(stats, HeadStats)
    for key in UNIT_BY_STATISTIC:
        assert len(row["values"][key]) == 8
    assert row["values"]["max_logit"][0] == "Infinity"
    assert row["values"]["max_logit"][5] is None
    assert row["logits"][5] is None
    assert row["expected"][5] is None
    assert row["values"]["peak"][0] == pytest.approx(stats.peak[0], rel=1e-4)
    assert row["logits"][0]["counts"] == list(stats.logit_histogram[0].counts)


def test_the_prediction_is_of_the_heads_own_spread() -> None:
    stats = head_stats(3, 1.4)
    (row,) = check_page_data(_one(stats))["groups"][0]["rows"]
    wanted = [expected_entropy_nats(n, sigma) for n, sigma in zip(stats.keys, stats.std_logit, strict=True)]
    assert row["expected"] == pytest.approx(wanted, rel=1e-4)


def test_maps_are_by_module_and_rows_by_layer() -> None:
    data = check_page_data(sick())
    assert [(group["title"], [row["label"] for row in group["rows"]]) for group in data["groups"]] == [
        ("decoder.h.*.attn (sdpa)", ["0", "1", "2"]),
        ("decoder.h.*.attn (eager)", ["3", "4", "5", "6"]),
        ("encoder.cross_attention_with_a_rather_long_name.attention.inner (sdpa)", [""]),
        ("(root) (sdpa)", [""]),
        ("vision.blocks.*.attn #1 (sdpa)", ["0"]),
    ]


def test_a_layer_that_ran_twice_has_two_rows() -> None:
    report = dataclasses.replace(healthy(1, 1), calls=healthy(1, 1).calls * 2)
    assert [row["label"] for row in check_page_data(report)["groups"][0]["rows"]] == ["0·0", "0·1"]


def test_static_reports_say_why_there_are_no_figures() -> None:
    text = to_html(static())
    assert "没有统计量</span></b> no weights: static mode</p>" in text
    assert json.loads(HtmlPage(text).inside["script"][0])["groups"] == []


def test_a_call_with_a_failing_finding_is_nowhere_green() -> None:
    for report in (leaking(), dataclasses.replace(leaking(), fail_on="never")):
        page = HtmlPage(to_html(report))
        classes = [attributes.get("class") or "" for _, attributes in page.elements]
        assert "outcome good" not in classes
        assert "outcome bad" in classes
        # the bar and its key, and of the folds: dial, verdict, health
        assert sum("v-exact" in name for name in classes) == 2 + 3
        assert sum("v-failing" in name for name in classes) == 2
        assert classes.count("badge s-critical") == 2  # of the finding, and of the call's health


def test_the_laws_are_a_table_in_both_languages() -> None:
    report = lawless()
    why = dataclasses.replace(report.laws[-1], reason=Message("laws.documents.one_document"))
    text = to_html(dataclasses.replace(report, laws=(*report.laws[:-1], why)))
    page = HtmlPage(text)
    classes = [attributes.get("class") for name, attributes in page.elements if name == "rect"]
    assert (classes.count("still"), classes.count("moved")) == (28, 36)
    for english, chinese in (
        ("broken: critical", "不成立：严重"),
        ("2 not asked: samples, documents", "2 条未检验：样本（samples）、文档（documents）"),
        ("every row is one document: no position_ids restart", "每一行都是一个文档：没有重新开始的 position_ids"),
    ):
        assert f'<span class="en" lang="en">{english}</span><span class="zh" lang="zh-CN">{chinese}</span>' in text
    assert 'href="#laws"' in text
    assert 'id="laws"' not in to_html(leaking())


@pytest.mark.parametrize(
    ("make", "fail_on", "word", "chinese", "tone"),
    [
        (healthy, "fail", "Passed", "通过", "good"),
        (leaking, "fail", "Failed", "未通过", "bad"),
        (leaking, "never", "Findings", "有问题", "bad"),
        (unjudged, "fail", "Incomplete", "不完整", "doubtful"),
        (unjudged, "unmeasured", "Failed", "未通过", "bad"),
    ],
)
def test_the_word_for_the_whole(
    make: Callable[[], CheckReport], fail_on: str, word: str, chinese: str, tone: str
) -> None:
    report = dataclasses.replace(make(), fail_on=fail_on)
    text = to_html(report)
    said = f'<span class="en" lang="en">{word}</span><span class="zh" lang="zh-CN">{chinese}</span>'
    assert f'<section class="outcome {tone}">\n    <p class="word">{said}</p>' in text
    assert ("Everything that ran was measured" in text) == (not report.unjudged)


@pytest.mark.full
def test_five_thousand_heads_fit() -> None:
    report = healthy(layers=80, heads=64)
    assert len(to_html(report)) < 5_000_000
    assert len(check_page_data(report)["groups"][0]["rows"]) == 80


def test_findings_are_told_in_both_languages() -> None:
    message = Message("rules.max_logit.above_mean", head=3, value="61.5")
    finding = dataclasses.replace(leaking().findings[0], message=message, fix="use tril")
    text = to_html(dataclasses.replace(leaking(), findings=(finding,)))
    chinese = "头 3 的最大 logit 比该行均值高 61.5"
    assert f'<span class="en" lang="en">{finding.message}</span><span class="zh" lang="zh-CN">{chinese}</span>' in text


def test_it_opens_at_a_head_that_fails() -> None:
    calm, wild = head_stats(4, 0.5), head_stats(4, 3.0, seed=1)
    wrong = dataclasses.replace(judged("h.1", ratio=0.125, verdict="unexplained", stats=calm), health="fail")
    calls = (dataclasses.replace(judged("h.0", stats=wild), health="note"), wrong)
    row, head = check_page_data(dataclasses.replace(healthy(1, 1), calls=calls))["opens"]
    assert (row, head) == (1, max(range(4), key=calm.max_logit.__getitem__))  # not at the largest logit of all
    rows = check_page_data(dataclasses.replace(healthy(1, 1), calls=calls))["groups"][0]["rows"]
    assert [row["fails"] for row in rows] == [False, True]
    both_fail = (dataclasses.replace(judged("h.0", stats=head_stats(4, nan_head=2)), health="critical"), wrong)
    assert check_page_data(dataclasses.replace(healthy(1, 1), calls=both_fail))["opens"] == [0, 2]
    assert check_page_data(static())["opens"] == [0, 0]


def test_the_scale_ratio_is_a_statistic_of_each_head() -> None:
    call = judged("h.0", head_dim=16, stats=head_stats(4)).call
    one = dataclasses.replace(call, scale=dataclasses.replace(call.scale, per_head=(0.25, 0.5, 1.0, 2.0)))
    report = dataclasses.replace(healthy(1, 1), calls=(dataclasses.replace(judged("h.0"), call=one),))
    (row,) = check_page_data(report)["groups"][0]["rows"]
    assert row["values"]["scale_ratio"] == [1.0, 2.0, 4.0, 8.0]
    (row,) = check_page_data(_one(head_stats(3)))["groups"][0]["rows"]
    assert row["values"]["scale_ratio"] == [1.0, 1.0, 1.0]
    unread = dataclasses.replace(healthy(1, 1), calls=(judged("h.0", ratio=None, stats=head_stats(1)),))
    assert check_page_data(unread)["groups"][0]["rows"][0]["values"]["scale_ratio"] == [None]


@pytest.mark.parametrize(
    ("language", "opening"),
    [("auto", 'lang="en"'), ("en", 'lang="en" data-opens="en"'), ("zh-CN", 'lang="zh-CN" data-opens="zh-CN"')],
)
def test_it_opens_in_the_language_that_was_asked_for(language: Choice, opening: str) -> None:
    assert f"<html {opening}>" in to_html(healthy(1, 1), language)


def test_another_language_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="auto, en, zh-CN, not 'de'"):
        to_html(healthy(1, 1), "de")  # type: ignore[arg-type]


def _one(stats: HeadStats):  # type: ignore[no-untyped-def]
    return dataclasses.replace(healthy(1, 1), calls=(judged("h.0", stats=stats),))
