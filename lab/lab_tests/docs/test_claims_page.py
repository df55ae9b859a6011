"""The page of claims and the quotes of the lesson are those of the register, with the verdicts of its full run; their
figures give the same verdicts."""

from __future__ import annotations

import copy
import json
import re
import sys

import pytest

import claims_page
from sqrtdk.messages import word
from sqrtdk_lab.claim import EXPLANATION_IDS
from sqrtdk_lab.register import CLAIMS
from sqrtdk_lab.report.page import PART_STATES
from tests.docs.pages import DOCS, READER, ROOT

TEXTS = ("text", "text_special", "code_inline", "softbreak", "link_open", "link_close")


def test_the_pages_are_as_written() -> None:
    for path, text in claims_page.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python scripts/claims_page.py"


def sections(language: str) -> dict[str, str]:
    text = (DOCS / language / "claims.md").read_text(encoding="utf-8")
    found = re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(found) == len(dict(found))
    return dict(found)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_claim_has_its_verdict_condition_and_command(language: str) -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "lab.json").read_text(encoding="utf-8"))["claims"]
    found = sections(language)
    assert list(found) == list(CLAIMS) == [row["id"] for row in rows]
    for row in rows:
        text = found[row["id"]]
        answer = row["full"]["verdict"]
        assert f"**{word(f'lab.answer.{answer}', language)}**" in text
        assert f"`sqrtdk lab run {row['id']}`" in text


def squeezed(text: str) -> str:
    """Without white space and full stop: where a line breaks does not matter."""
    return re.sub(r"\s+", "", text).rstrip(".。")


def entries(section: str) -> dict[str, str]:
    """A claim's list as Markdown reads it, by its titles; nothing else has become a list, code or emphasis."""
    tokens = READER.parse(section)
    assert [token.type for token in tokens].count("bullet_list_open") == 1
    found = {}
    for token in [token for token in tokens if token.type == "inline"][1:]:
        assert {child.type for child in token.children} <= {*TEXTS, "strong_open", "strong_close"}
        title, text = re.split("[:：]", squeezed("".join(child.content for child in token.children)), maxsplit=1)
        found[title] = text
    return found


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_claim_has_its_parts_by_their_answers_and_says_why(language: str) -> None:
    for name, section in sections(language).items():
        verdict, why = claims_page.judged(CLAIMS[name])
        found = entries(section)
        titles = {state: squeezed(word(f"lab.parts.{state}", language)) for state in PART_STATES}
        for part in verdict.findings:
            assert squeezed(getattr(part.text, language)) in found[titles[part.state]], name
        assert found.keys() & titles.values() == {titles[part.state] for part in verdict.findings}, name
        assert found[word("lab.why", language)] == squeezed(getattr(why, language)), name


def test_every_claim_has_the_same_verdict_with_five_seeds() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "lab.json").read_text(encoding="utf-8"))["claims"]
    if not any("seeds" in row for row in rows):
        pytest.skip("the record has the runs of one seed, and the page says nothing of others")
    for row in rows:
        assert set(row["seeds"]["quick"]) >= set("01234"), row["id"]
        assert {*row["seeds"]["quick"].values(), *row["seeds"]["full"].values()} == {row["full"]["verdict"]}, row["id"]


def test_figures_that_give_another_verdict_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    record = copy.deepcopy(claims_page.figures())
    (one,) = (figure for figure in record["claims"]["range-64"]["figures"] if figure["name"] == "share_within")
    one |= {"value": 0.5, "low": 0.4, "high": 0.6}
    monkeypatch.setattr(claims_page, "figures", lambda: record)
    with pytest.raises(AssertionError, match="range-64: its figures say fails"):
        claims_page.judged(CLAIMS["range-64"])


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_explanation_lists_its_claims(language: str) -> None:
    text = (DOCS / language / "claims.md").read_text(encoding="utf-8")
    for source in EXPLANATION_IDS:
        name = word(f"lab.explanation.{source}.name", language)
        (row,) = re.findall(rf"^\| {name}[^|]*`{source}`[^|]* \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
        assert re.findall(r"\(#([a-z0-9-]+)\)", row) == [one.id for one in CLAIMS.values() if source in one.sources]


def test_an_edited_page_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    edited = {path: text.replace("**视条件而定**", "**成立**") for path, text in claims_page.pages().items()}
    monkeypatch.setattr(claims_page, "pages", lambda: edited)
    monkeypatch.setattr(sys, "argv", ["scripts/claims_page.py", "--check"])
    with pytest.raises(SystemExit, match=r"docs/zh/why-sqrt-dk\.md: run python scripts/claims_page\.py"):
        claims_page.main()
