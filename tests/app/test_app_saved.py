"""Saved reports: each kind is drawn in both languages; what is none, damaged or hostile is refused or shown as text."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

import sqrtdk
from sqrtdk._language import Language
from sqrtdk.app import claims, rebuilt, saved
from sqrtdk.app.catalogue import LANGUAGES, words
from sqrtdk.app.settings import RefusedValueError
from sqrtdk.audit.records import SEVERITIES
from sqrtdk.compare.records import Cause, DiffReport, PairDiff, SideInfo
from sqrtdk.compare.words import told as merged
from sqrtdk.lab import record
from sqrtdk.lab.claim import spelled
from sqrtdk.lab.register import CLAIMS
from sqrtdk.lab.text import say
from sqrtdk.monitor.reading import read_run
from sqrtdk.report import diff_json, watch_json
from sqrtdk.report import json as check_json
from sqrtdk.report.diff_chinese import paragraphs
from sqrtdk.report.diff_fold import DIFFERS, change, fold_pairs, outcome
from sqrtdk.report.diff_words import TERMINAL
from sqrtdk.report.fold import expected, fold_calls, values
from sqrtdk.report.headline import consequences, headline
from sqrtdk.report.plain import plain
from sqrtdk.report.said import said
from sqrtdk.report.terminal_words import word
from sqrtdk.report.watch_compare import compare
from sqrtdk.report.watch_summary import summarise
from tests.monitor import watched_runs
from tests.report import sample_diff, sample_report
from tests.report.html_page import HtmlPage
from tests.report.sample_lab import hostile, records
from tests.report.sample_report import EVIL

CHECKS = ("healthy", "static", "sick", "lawless", "leaking", "unjudged")
PASSED = {
    "healthy": "passed",
    "static": "scales",
    "sick": "failed",
    "lawless": "failed",
    "leaking": "failed",
    "unjudged": "incomplete",
}


@pytest.fixture(scope="module")
def sick_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return watch_json.to_json(summarise(read_run(watched_runs.write_sick(tmp_path_factory.mktemp("run") / "sick"))))


def draw(document: str, kind: str, language: str = "en") -> str:
    return str(saved.to_html(document.encode(), kind, words(language)))  # type: ignore[arg-type]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_is_shown(name: str, language: Language) -> None:
    """The headline in words, and equal sites once with how many they are."""
    report = getattr(sample_report, name)()
    page = HtmlPage(draw(check_json.to_json(report), "check", language))
    assert words(language)(f"result.{PASSED[name]}") in page.texts
    assert any(plain(say(headline(report), language)) in text for text in page.texts)
    shown = {row[0] for row in page.rows}
    for folded in fold_calls(report.calls):
        assert any(
            row.startswith(folded.site) and (len(folded.calls) == 1 or str(len(folded.calls)) in row) for row in shown
        )


@pytest.mark.parametrize("name", [*CHECKS, "hostile"])
def test_a_check_is_rebuilt_of_its_document(name: str) -> None:
    report = getattr(sample_report, name)()
    found = rebuilt.check_report(json.loads(check_json.to_json(report)))
    assert headline(found) == headline(report)
    told = [
        [(one.cause.site, *(each.site for each in one.consequences)) for one in consequences(of.findings)]
        for of in (found, report)
    ]
    assert told[0] == told[1]
    assert json.loads(check_json.to_json(found))["calls"] == json.loads(check_json.to_json(report))["calls"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_was_found_is_told_in_the_pages_language(language: Language) -> None:
    """A finding of each kind, under the scale that leads to it; what was found and what was expected."""
    model = sqrtdk.check("demo:unscaled")
    drawn = draw(check_json.to_json(model), "check", language)
    caused = consequences(model.findings)
    told = {said(folded.first.message, language) for one in caused for folded in (one.cause, *one.consequences)}
    assert told <= set(HtmlPage(drawn).texts)
    (scale,) = (one for one in caused if one.consequences)
    nested = drawn.split(plain(word("leads to", language)))[1].split("</ul>")[0]
    assert all(str(escape(said(folded.first.message, language))) in nested for folded in scale.consequences)
    number = word("expected", language, value=expected(scale.cause).en)
    assert (
        f"{word('found', language, value=say(values(scale.cause), language))}{word('comma', language)}{number}" in drawn
    )


@pytest.mark.parametrize(("language", "counts"), [("en", "1 exact, 1 unmeasured"), ("zh", "1 次相符，1 次未测量")])
def test_what_was_not_judged_is_told_in_the_pages_language(language: Language, counts: str) -> None:
    report = sample_report.unjudged()
    page = HtmlPage(draw(check_json.to_json(report), "check", language))
    assert any(counts in text for text in page.texts), page.texts
    (idle,) = report.not_measured
    assert (idle.site, said(idle.reason, language)) in {tuple(row) for row in page.rows}
    assert (said(idle.reason, language) == idle.reason) == (language == "en")


def test_a_check_of_very_many_findings_shows_the_worst() -> None:
    document = json.loads(check_json.to_json(sample_report.sick()))
    worst = max(document["findings"], key=lambda one: SEVERITIES.index(one["severity"]))
    many = [worst | {"site": f"{'x' * (place % 50)}.{place}", "rule": f"r{place}"} for place in range(5000)]
    texts = " ".join(HtmlPage(draw(json.dumps(document | {"findings": many}), "check")).texts)
    assert "5000 findings" in texts
    assert words("en")("saved.left", count=5000 - 400) in texts


def test_a_check_without_calls_is_not_passed() -> None:
    document = json.loads(check_json.to_json(sample_report.healthy(1, 1))) | {"calls": []}
    assert words("en")("result.incomplete") in HtmlPage(draw(json.dumps(document), "check")).texts


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", [name for name in sample_diff.REPORTS if name != "hostile"])
def test_a_comparison_is_shown(name: str, language: Language) -> None:
    """What there is to say in the page's language, and each fold of pairs with its causes, as the terminal has them."""
    report = sample_diff.REPORTS[name]()
    page = HtmlPage(draw(diff_json.to_json(report), "diff", language))
    word = {True: "same", False: "different", None: "unjudged"}[report.same]
    assert words(language)(f"result.{word}") in page.texts
    told = report.paragraphs if language == "en" else paragraphs(report)
    assert set(map(plain, told)) <= set(page.texts)
    folds = fold_pairs(report.pairs)
    assert len(page.rows) == 1 + len(folds)
    for folded, row in zip(folds, page.rows[1:], strict=True):
        assert row[0] == folded.site
        if outcome(folded.first) == DIFFERS and folded.first.causes:
            changes = [change(cause, language) for cause in merged(folded.first.causes)]
            assert row[2] == TERMINAL["semicolon"].zh.join(changes) if language == "zh" else "; ".join(changes)


def test_other_weights_are_one_cause() -> None:
    """Of a softmax without its scale and with other projections: three names of one cause, and the scale."""
    text = "has another weight for {0}, h.0.{0}.weight: 8 of 8 rows differ, by 0.5 of its size in all"
    causes = [Cause("weights", x, x, 0.5, text.format(x), "query") for x in "qkv"]
    causes.append(Cause("scale", 0.125, 1.0, 0.9, "leaves out the scale", "scale"))
    pair = PairDiff("h.0", "h.0", 0, 0, False, "query", None, tuple(causes), 1e-7, 1e-6, 0.5, 1.0)
    side = SideInfo("demo", "model", dtype="float32")
    rows = HtmlPage(draw(diff_json.to_json(DiffReport(side, side, (pair,), (), (), ())), "diff")).rows
    assert rows[1][2] == "weights q, k, v; scale 0.125 -> 1"


@pytest.mark.full
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_run_is_shown(sick_run: str, language: str) -> None:
    page = HtmlPage(draw(sick_run, "watch", language))
    assert words(language)("result.failed") in page.texts
    assert page.tags.count("svg") == 4
    sites = {site["site"] for site in json.loads(sick_run)["sites"]}
    assert {plain(site) for site in sites} <= {row[0] for row in page.rows}


@pytest.mark.full
def test_two_runs_are_shown_one_by_one(tmp_path: Path) -> None:
    one = summarise(read_run(watched_runs.write_sick(tmp_path / "sick")))
    document = watch_json.comparison_json(one, one, compare(one, one))
    assert HtmlPage(draw(document, "watch")).tags.count("svg") == 8
    assert HtmlPage(draw(watch_json.series_json({}, [one]), "watch")).tags.count("svg") == 4


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b"", "error.no_json"),
        (b"\xff\xfe{}", "error.no_json"),
        (b"\x89PNG\r\n", "error.no_json"),
        (b"<!doctype html><html></html>", "error.page"),
        (b"NaN", "error.no_json"),
        (b'{"tool": NaN}', "error.no_json"),
        (b'{"tool": ' + b"9" * 5000 + b"}", "error.no_json"),
        (b"[" * 200_000, "error.no_json"),
        (b"[]", "error.no_report"),
        (b"{}", "error.no_report"),
        (b'{"tool": "sqrtdk"}', "error.no_report"),
        (b'{"tool": {"name": "other"}, "calls": [], "findings": [], "not_measured": []}', "error.no_report"),
        (b'{"tool": {"name": "sqrtdk"}, "x": ' + b"[" * 100 + b"]" * 100 + b"}", "error.no_report"),
        (b'{"tool": {"name": "sqrtdk"}, "calls": [], "findings": [], "not_measured": []}', "error.version"),
        (b" " * (saved.LARGEST + 1), "error.large"),
    ],
    ids=lambda value: value[:20].decode("latin-1") if isinstance(value, bytes) else value,
)
def test_what_is_no_report_is_refused(content: bytes, key: str) -> None:
    with pytest.raises(RefusedValueError) as caught:
        saved.to_html(content, "check", words("en"))
    assert caught.value.key == key


def test_a_report_of_another_kind_is_named() -> None:
    with pytest.raises(RefusedValueError) as caught:
        draw(diff_json.to_json(sample_diff.softcap()), "check")
    assert (caught.value.key, caught.value.parts) == ("error.other_kind", {"found": "tab.diff"})


def _damaged(value: Any, rng: random.Random) -> Any:
    """The document with one value, anywhere in it, made another type or left out."""
    while isinstance(value, (dict, list)) and value:
        parent, at = value, rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = parent[at]
        if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
            if rng.random() < 0.3:
                del parent[at]
            else:
                parent[at] = rng.choice(["x", -1, None, True, [], {}, [1], {"a": []}, "Infinity", 1e308, 10**29])
            return parent
    return value


@pytest.mark.parametrize("kind", ["check", "diff"])
def test_a_damaged_report_is_shown_or_refused(kind: str) -> None:
    check, diff = check_json.to_json(sample_report.sick()), diff_json.to_json(sample_diff.two_causes())
    text, refused = check if kind == "check" else diff, 0
    for seed in range(60):
        document = json.loads(text)
        _damaged(document, random.Random(seed))
        try:
            draw(json.dumps(document), kind)
        except RefusedValueError:
            refused += 1
    assert refused > 8


def test_hostile_texts_stay_texts(sick_run: str) -> None:
    documents = {
        "check": check_json.to_json(sample_report.hostile()),
        "diff": diff_json.to_json(sample_diff.hostile()),
        "watch": sick_run.replace("h.0.attn", json.dumps(EVIL)[1:-1]),
    }
    for kind, document in documents.items():
        for language in LANGUAGES:
            drawn = draw(document, kind, language)
            page = HtmlPage(drawn)
            assert not {"script", "img", "iframe", "style", "a"} & set(page.tags)
            assert plain(EVIL) in "".join(page.texts)
            assert "\u202e" not in drawn


@pytest.mark.sampled(1)
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_record_is_shown_and_one_that_is_none_refused(language: str) -> None:
    for one in (*records(), hostile()):
        drawn = str(claims.record_html(claims.read_record(record.to_json(one).encode()), words(language)))  # type: ignore[arg-type]
        page = HtmlPage(drawn)
        assert not {"script", "img", "iframe", "style", "a"} & set(page.tags)
        assert page.tags.count("svg") == len(one.plots)
    for content in (b"", b"{}", b"[1]"):
        with pytest.raises(RefusedValueError, match="no_record"):
            claims.read_record(content)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_verdict_that_depends_says_on_what(language: Language) -> None:
    """Of every claim whose full run has that verdict."""
    measured = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "lab.json").read_text())
    depending = [one["id"] for one in measured["claims"] if one["full"]["verdict"] == "depends"]
    assert depending
    one = next(one for one in records() if one.outcome.verdict.answer == "depends")
    for name in depending:
        condition = CLAIMS[name].condition
        assert condition is not None
        shown = HtmlPage(str(claims.record_html(replace(one, id=name, condition=condition), words(language)))).texts
        texts = [text.strip() for text in shown]
        assert texts.index(words(language)("claim.condition")) == texts.index(name) + 1  # right under the headline
        assert texts[texts.index(name) + 2] == words(language).of(condition)


def test_a_verdict_that_does_not_depend_has_no_condition() -> None:
    one = next(one for one in records() if one.condition is None)
    assert words("en")("claim.condition") not in str(claims.record_html(one, words("en")))


def test_every_claim_is_described_in_both_languages() -> None:
    for language in LANGUAGES:
        assert [name for _, name in claims.options(words(language))] == list(CLAIMS)
        for (label, _), claim in zip(claims.options(words(language)), CLAIMS.values(), strict=True):
            begins = words(language).of(claim.statement)[:20]
            assert label.startswith(f"{claim.id} · {begins}")
            assert len(label) < 120
        for name, claim in CLAIMS.items():
            page = HtmlPage(str(claims.claim_html(name, words(language))))
            assert name in page.texts
            assert claim.statement.zh in page.texts or language == "en"
            seen = "".join(page.texts)
            assert all(words(language).of(spelled(source)) in seen for source in claim.sources)
    with pytest.raises(RefusedValueError, match=r"error\.claim"):
        claims.claim_html("no such claim", words("en"))
