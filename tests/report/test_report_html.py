import dataclasses
import json
import math
import re

import pytest

from html_page import HtmlPage, check_alone, check_policy
from sample_report import EVIL, head_stats, healthy, hostile, judged, leaking, sick, static, unjudged
from sqrtdk.audit.records import CheckReport
from sqrtdk.report.html import to_html
from sqrtdk.report.payload import STATISTICS, payload
from sqrtdk.report.plain import plain
from sqrtdk.stats.heads import HeadStats
from sqrtdk.theory.gaussian import expected_entropy_nats

REPORTS = {"healthy": healthy, "static": static, "sick": sick, "hostile": hostile, "unjudged": unjudged}


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_needs_nothing_else(name: str) -> None:
    check_alone(HtmlPage(to_html(REPORTS[name]())))


@pytest.mark.parametrize("name", REPORTS)
def test_the_policy_names_what_stands_there(name: str) -> None:
    check_policy(HtmlPage(to_html(REPORTS[name]())))


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
    data = payload(report)
    rows = [row for group in data["groups"] for row in group["rows"]]
    assert [item["key"] for item in data["statistics"]] == [key for key, *_ in STATISTICS]
    assert sum(len(row["logits"]) for row in rows) == sum(j.call.heads for j in report.calls if j.call.stats)
    (row,) = [row for row in rows if row["site"] == "decoder.h.4.attn"]
    stats = report.calls[4].call.stats
    assert isinstance(stats, HeadStats)
    for key, *_ in STATISTICS:
        assert len(row["values"][key]) == 8
    assert row["values"]["max_logit"][0] == "Infinity"
    assert row["values"]["max_logit"][5] is None
    assert row["logits"][5] is None
    assert row["expected"][5] is None
    assert row["values"]["peak"][0] == pytest.approx(stats.peak[0], rel=1e-4)
    assert row["logits"][0]["counts"] == list(stats.logit_histogram[0].counts)


def test_the_prediction_is_of_the_heads_own_spread() -> None:
    stats = head_stats(3, 1.4)
    (row,) = payload(_one(stats))["groups"][0]["rows"]
    wanted = [expected_entropy_nats(n, sigma) for n, sigma in zip(stats.keys, stats.std_logit, strict=True)]
    assert row["expected"] == pytest.approx(wanted, rel=1e-4)


def test_maps_are_by_module_and_rows_by_layer() -> None:
    data = payload(sick())
    assert [(group["title"], [row["label"] for row in group["rows"]]) for group in data["groups"]] == [
        ("decoder.h.*.attn (sdpa)", ["0", "1", "2"]),
        ("decoder.h.*.attn (eager)", ["3", "4", "5", "6"]),
        ("encoder.cross_attention_with_a_rather_long_name.attention.inner (sdpa)", [""]),
        ("(root) (sdpa)", [""]),
        ("vision.blocks.*.attn #1 (sdpa)", ["0"]),
    ]


def test_a_layer_that_ran_twice_has_two_rows() -> None:
    report = dataclasses.replace(healthy(1, 1), calls=healthy(1, 1).calls * 2)
    assert [row["label"] for row in payload(report)["groups"][0]["rows"]] == ["0·0", "0·1"]


def test_static_reports_say_why_there_are_no_figures() -> None:
    text = to_html(static())
    assert "No statistics: no weights: static mode." in text
    assert json.loads(HtmlPage(text).inside["script"][0])["groups"] == []


def test_a_call_with_a_failing_finding_is_nowhere_green() -> None:
    for report in (leaking(), dataclasses.replace(leaking(), fail_on="never")):
        page = HtmlPage(to_html(report))
        classes = [attributes.get("class") or "" for _, attributes in page.elements]
        assert "tile good" not in classes
        assert "tile bad" in classes
        # the bar and its key, and of the folds: dial, verdict, health
        assert sum("v-exact" in name for name in classes) == 2 + 3
        assert sum("v-failing" in name for name in classes) == 2
        assert classes.count("badge s-critical") == 2  # of the finding, and of the call's health


@pytest.mark.parametrize(
    ("report", "word", "tone"),
    [
        (healthy(), "Passed", "good"),
        (leaking(), "Failed", "bad"),
        (dataclasses.replace(leaking(), fail_on="never"), "Findings", "bad"),
        (unjudged(), "Incomplete", "doubtful"),
        (dataclasses.replace(unjudged(), fail_on="unmeasured"), "Failed", "bad"),
    ],
)
def test_the_word_for_the_whole(report: CheckReport, word: str, tone: str) -> None:
    text = to_html(report)
    assert f'<section class="tile {tone}" aria-label="Result">\n      <p class="big">{word}</p>' in text
    assert ("Everything that ran was measured" in text) == (not report.unjudged)


def test_five_thousand_heads_fit() -> None:
    report = healthy(layers=80, heads=64)
    text = to_html(report)
    assert len(text) < 5_000_000
    assert len(payload(report)["groups"][0]["rows"]) == 80


def test_numbers_are_finite_or_named() -> None:
    assert math.isfinite(len(json.dumps(payload(sick()), allow_nan=False)))


def _one(stats: HeadStats):  # type: ignore[no-untyped-def]
    return dataclasses.replace(healthy(1, 1), calls=(judged("h.0", stats=stats),))
