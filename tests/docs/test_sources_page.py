"""The page of sources is what the two files say, they are whole in both languages, and records and code agree."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import sources_page
from tests.docs.pages import ROOT
from tests.docs.test_links import places

SOURCES, TABLES = sources_page.sources(), sources_page.large_models()
LANGUAGES = ("en", "zh")
HAN = re.compile(r"[\u3400-\u9fff]")
FAMILIES = json.loads((ROOT / "benchmarks" / "results" / "families.json").read_text(encoding="utf-8"))["families"]


def test_the_pages_are_as_written() -> None:
    for path, text in sources_page.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python scripts/sources_page.py"


def untranslated(texts: Any) -> bool:
    """Whether a text lacks one of the languages, or has one in the place of the other; code alone has no language."""
    if not isinstance(texts, dict) or not all(texts.get(language, "").strip() for language in LANGUAGES):
        return True
    has_words = re.search("[A-Za-z]", re.sub("`[^`]*`", "", texts["en"])) is not None
    return HAN.search(texts["en"]) is not None or (has_words and HAN.search(texts["zh"]) is None)


def faults(source: dict[str, Any]) -> set[str]:
    """The fields of a source that are missing, or are not what they should be."""
    kinds = {"title": str, "authors": str, "year": int, "where": str, "read": bool}
    wrong = {name for name, kind in kinds.items() if type(source.get(name)) is not kind or source[name] == ""}
    wrong |= {name for name in ("section", "says") if untranslated(source.get(name))}
    if source.get("read") is False and untranslated(source.get("unread")):
        wrong.add("unread")
    if source.get("read") is True and "unread" in source:
        wrong.add("unread")
    return wrong


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_is_whole_and_has_its_anchor(name: str) -> None:
    assert faults(SOURCES[name]) == set()
    assert re.fullmatch(r"[a-z][a-z0-9-]*", name)
    for language in LANGUAGES:
        assert name in places(ROOT / "docs" / language / "sources.md")


WHOLE = SOURCES["vaswani2017"]
BROKEN: dict[str, dict[str, Any]] = {
    "title": {"title": ""},
    "year": {"year": "2017"},
    "read": {"read": "yes"},
    "section": {"section": {"en": "3.2.1"}},
    "says": {"says": {"en": WHOLE["says"]["en"], "zh": "No Chinese."}},
    "unread": {"read": False},
}


@pytest.mark.parametrize("field", BROKEN)
def test_a_source_that_is_not_whole_is_found_out(field: str) -> None:
    assert faults(WHOLE) == set()
    assert faults({**WHOLE, **BROKEN[field]}) == {field}


def test_every_cell_of_the_tables_has_a_source_and_both_languages() -> None:
    for model in TABLES["model"]:
        assert {model["does"]["source"], model["formula"]["source"]} <= SOURCES.keys(), model["name"]
        assert model["formula"]["tex"]
        assert not untranslated(model["does"]), model["name"]
        assert not untranslated(model["means"]), model["name"]
    for row in TABLES["growth"]:
        assert row["source"] in SOURCES
        assert row["kind"] in sources_page.WORDS
        assert not untranslated(row)
    for bar in TABLES["bar"]:
        assert set(bar["sources"]) <= SOURCES.keys()
        assert not untranslated(bar)
    assert [bar["value"] for bar in TABLES["bar"]] == [100, 1000, 10000]


def test_every_source_that_the_tables_name_as_unread_is_told_of_as_such() -> None:
    for language, mark in (("en", "**Not read at this place**"), ("zh", "**未读原处**")):
        text = (ROOT / "docs" / language / "sources.md").read_text(encoding="utf-8")
        assert text.count(mark) == sum(not source["read"] for source in SOURCES.values()) > 0


def disagreements(model: dict[str, Any], calls: list[dict[str, Any]]) -> set[str]:
    """Where a row of the table says something else than what `sqrtdk check` read off a run of this family."""
    tex = model["formula"]["tex"]
    cap = re.search(r"(\d+)\\, \\tanh", tex)
    wrong = set()
    if (r"\hat q" in tex) != any(call["norm"] for call in calls) and r"\hat q" in tex:
        wrong.add("norm")
    for call in calls:
        d_k = call["head_dim"]
        # Gemma 3 divides by the root of a number of its own, d_0, which is d_k in this configuration.
        ends = {r"/ \sqrt{d_k}": d_k**-0.5, r"/ \sqrt{d_0}": d_k**-0.5, "/ d_k": 1 / d_k, r"\hat k": 1.0}
        known = next((scale for end, scale in ends.items() if tex.endswith(end)), None)
        if known is not None and "g" not in tex and call["scale"] != pytest.approx(known):
            wrong.add("scale")
        if call["softcap"] != (float(cap[1]) if cap else None):
            wrong.add("softcap")
        if call["sinks"] != ("e^b" in tex):
            wrong.add("sinks")
    return wrong


MEASURED = {model["family"]: model for model in TABLES["model"] if "family" in model}


@pytest.mark.parametrize("family", MEASURED)
def test_the_table_agrees_with_what_was_read_off_a_run(family: str) -> None:
    (calls,) = (entry["calls"] for entry in FAMILIES if entry["model_type"] == family)
    assert calls
    assert disagreements(MEASURED[family], calls) == set()


def test_a_row_that_disagrees_is_found_out() -> None:
    calls = {entry["model_type"]: entry["calls"] for entry in FAMILIES}
    assert disagreements(MEASURED["gemma4_text"], calls["qwen3"]) == {"scale"}
    assert disagreements(MEASURED["qwen3"], calls["ministral3"]) == {"norm"}
    assert disagreements(MEASURED["gemma2"], calls["gemma3_text"]) == {"softcap"}
    assert disagreements(MEASURED["gpt_oss"], calls["qwen3"]) == {"sinks"}


CODE = {name: source for name, source in SOURCES.items() if source["where"].startswith("transformers ")}


@pytest.mark.parametrize("name", CODE)
def test_the_code_that_is_cited_is_there(name: str) -> None:
    """The file, and the classes and functions that the section names."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    version, files = CODE[name]["where"].removeprefix("transformers ").split(": ")
    pinned = re.search(r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    assert version == pinned[1]
    first, *others = (Path(file) for file in files.split(", "))
    paths = [first, *(first.parent / other for other in others)]
    code = "\n".join((Path(spec.origin).parent / path).read_text(encoding="utf-8") for path in paths)
    assert [named for named in re.findall("`([^`]+)`", CODE[name]["section"]["en"]) if named not in code] == []


def test_the_lesson_is_filled_between_the_comments_alone() -> None:
    text = "Before.\n\n<!-- large-models -->\nold\n<!-- /large-models -->\n\nAfter.\n"
    filled = sources_page.lesson(text, "en")
    assert filled.startswith("Before.\n\n<!-- large-models -->\n\n| Model |")
    assert filled.endswith("<!-- /large-models -->\n\nAfter.\n")
    assert "old" not in filled
    assert sources_page.lesson(filled, "en") == filled
    assert sources_page.lesson("No comments.\n", "en") == "No comments.\n"


def test_an_edited_page_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    edited = {path: text.replace("50000", "5000") for path, text in sources_page.pages().items()}
    monkeypatch.setattr(sources_page, "pages", lambda: edited)
    monkeypatch.setattr(sys, "argv", ["scripts/sources_page.py", "--check"])
    with pytest.raises(SystemExit, match=r"docs/zh/sources\.md.*: run python scripts/sources_page\.py"):
        sources_page.main()
