"""The claims on the page: each described in both languages, and its record drawn with every text as text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lab_tests.report.sample_lab import hostile, records
from sqrtdk._language import Language
from sqrtdk.messages import in_language, said, word
from sqrtdk.report.plain import plain
from sqrtdk_lab.app import claims
from sqrtdk_lab.app.page import LANGUAGE_CHOICES
from sqrtdk_lab.app.settings import RefusedValueError
from sqrtdk_lab.claim import spelled
from sqrtdk_lab.register import CLAIMS
from tests.report.html_page import HtmlPage
from tests.report.sample_report import EVIL


@pytest.mark.full
@pytest.mark.parametrize("language", LANGUAGE_CHOICES)
def test_a_record_is_drawn_and_what_it_says_is_text(language: Language) -> None:
    for one in (*records(), hostile()):
        drawn = str(claims.record_html(one, language))
        page = HtmlPage(drawn)
        assert not {"script", "img", "iframe", "style", "a"} & set(page.tags)
        assert page.tags.count("svg") == len(one.plots)
        assert word("app.claim.run", language, seed=one.seed, seconds="{}").split("{}")[0] in " ".join(page.texts)
    assert plain(EVIL) in "".join(page.texts)
    assert "\u202e" not in drawn


@pytest.mark.parametrize("language", LANGUAGE_CHOICES)
def test_a_verdict_that_depends_says_on_what(language: Language) -> None:
    """Of every claim whose full run has that verdict."""
    measured = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "lab.json").read_text())
    depending = [one["id"] for one in measured["claims"] if one["full"]["verdict"] == "depends"]
    assert depending
    one = next(one for one in records() if one.outcome.verdict.answer == "depends")
    for name in depending:
        condition = CLAIMS[name].condition
        assert condition is not None
        shown = HtmlPage(str(claims.record_html(replace(one, id=name, condition=condition), language))).texts
        texts = [text.strip() for text in shown]
        assert texts.index(word("app.claim.condition", language)) == texts.index(name) + 1  # right under the headline
        assert texts[texts.index(name) + 2] == in_language(condition, language)


def test_a_verdict_that_does_not_depend_has_no_condition() -> None:
    one = next(one for one in records() if one.condition is None)
    assert word("app.claim.condition", "en") not in str(claims.record_html(one, "en"))


def test_every_claim_is_described_in_both_languages() -> None:
    for language in LANGUAGE_CHOICES:
        assert [name for _, name in claims.claim_choices(language)] == list(CLAIMS)
        for (label, _), claim in zip(claims.claim_choices(language), CLAIMS.values(), strict=True):
            begins = in_language(claim.statement, language)[:20]
            assert label.startswith(f"{claim.id} · {begins}")
            assert len(label) < 120
        for name, claim in CLAIMS.items():
            page = HtmlPage(str(claims.claim_html(name, language)))
            assert name in page.texts
            assert claim.statement.zh in page.texts or language == "en"
            seen = "".join(page.texts)
            assert all(said(spelled(source), language) in seen for source in claim.sources)
    with pytest.raises(RefusedValueError, match="There is no claim 'no such claim'"):
        claims.claim_html("no such claim", "en")
