"""The page of errata: each sentence has the right one in both languages, and no claim that does not hold is missing."""

from __future__ import annotations

import json
import re
import sys
import tomllib

import pytest

import errata_page
import source_examples
from sqrtdk.messages._catalogue import faults
from sqrtdk_lab.claim import EXPLANATION_IDS
from sqrtdk_lab.register import CLAIMS
from tests.docs.pages import DOCS, ROOT

SENTENCES = tomllib.loads(errata_page.SENTENCES.read_text(encoding="utf-8"))["sentence"]
LANGUAGES = ("en", "zh")


def test_the_pages_are_as_written() -> None:
    for path, text in errata_page.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python scripts/errata_page.py"


def test_an_edited_page_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    edited = {path: text.replace("0.8292", "0.995") for path, text in errata_page.pages().items()}
    monkeypatch.setattr(errata_page, "pages", lambda: edited)
    monkeypatch.setattr(sys, "argv", ["scripts/errata_page.py", "--check"])
    with pytest.raises(SystemExit, match=r"docs/en/errata\.md.*: run python scripts/errata_page\.py"):
        errata_page.settle_texts("", errata_page.pages())


def test_every_claim_that_does_not_hold_has_an_erratum_of_each_of_its_sources() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "lab.json").read_text(encoding="utf-8"))["claims"]
    listed = {(sentence["claim"], source) for sentence in SENTENCES for source in sentence["sources"]}
    wanted = {
        (row["id"], source)
        for row in rows
        if row["full"]["verdict"] != "holds" and row["id"] in CLAIMS
        for source in CLAIMS[row["id"]].sources
        if source in EXPLANATION_IDS
    }
    assert wanted - listed == set()


def test_sources_are_those_of_the_claim() -> None:
    for sentence in SENTENCES:
        assert set(sentence["sources"]) <= set(EXPLANATION_IDS), sentence["claim"]
        if sentence["claim"] in CLAIMS:
            assert set(sentence["sources"]) <= set(CLAIMS[sentence["claim"]].sources), sentence["claim"]
    for example in source_examples.EXAMPLES:
        if example.claim in CLAIMS:
            assert example.source in CLAIMS[example.claim].sources, example.claim


def test_every_claim_of_a_sentence_or_an_example_is_in_the_register() -> None:
    named = [sentence["claim"] for sentence in SENTENCES] + [one.claim for one in source_examples.EXAMPLES]
    assert [claim for claim in named if claim not in CLAIMS] == []


def test_sentences_are_whole_in_both_languages() -> None:
    keys = [(sentence["claim"], sentence["says"]["en"]) for sentence in SENTENCES]
    assert len(set(keys)) == len(keys)
    for sentence in SENTENCES:
        assert set(sentence) <= {"claim", "sources", "says", "right", "figures"}, sentence["claim"]
        for text in ("says", "right"):
            assert list(faults(sentence[text])) == [], (sentence["claim"], text)
        placeholders = set(re.findall(r"\{(\w+)\}", sentence["right"]["en"]))
        assert set(sentence.get("figures", {})) <= placeholders, sentence["claim"]
        assert placeholders <= {*sentence.get("figures", {}), *errata_page.NUMBERS}, sentence["claim"]


def test_no_number_of_the_script_is_left_over() -> None:
    used = {name for one in SENTENCES for name in re.findall(r"\{(\w+)\}", one["right"]["en"])}
    assert set(errata_page.NUMBERS) - used == set()


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_sentence_stands_under_its_sources(language: str) -> None:
    text = (DOCS / language / "errata.md").read_text(encoding="utf-8").split("\n## ")[1]
    chapters = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    for source, chapter in zip(EXPLANATION_IDS, chapters, strict=True):
        assert f"`{source}`" in chapter.splitlines()[0]
        wanted = [one["claim"] for one in errata_page.sentences() if source in one["sources"]]
        assert re.findall(r"\(claims\.md#([\w-]+)\) \|$", chapter, re.MULTILINE) == wanted


def test_an_example_prints_the_same_with_the_same_seed() -> None:
    for example in source_examples.EXAMPLES:
        first, again, other = (source_examples.run_once(example, seed) for seed in (3, 3, 4))
        assert list(first) == list(again)
        if example.claim != "seed-prints":  # it prints 1/n with any seed: that is the point
            assert (list(first) != list(other)) == example.random
