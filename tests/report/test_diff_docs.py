"""docs/en/diff.md, and the part of docs/en/start.md on it, say what the code does."""

import json
import re
from pathlib import Path

from sqrtdk.compare.causes import CAUSES, MODULE_CAUSE_ROWS
from sqrtdk.compare.inside.suspect import STAGES
from sqrtdk.compare.records import DIFF_FAIL_ON
from sqrtdk.report.diff.fold import has_words

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "en" / "diff.md").read_text(encoding="utf-8")
SCHEMA = json.loads((ROOT / "docs" / "diff.schema.json").read_text(encoding="utf-8"))
START = (ROOT / "docs" / "en" / "start.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """First cells of the tables under a heading, their code alone."""
    section = DOCS.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [re.findall(r"`([^`]+)`", line.split(" | ")[0]) for line in section.splitlines() if line.startswith("| `")]


def test_every_cause_is_listed_once_and_none_that_is_not_asked() -> None:
    names = [name for (name,) in rows("The causes")]
    assert len(set(names)) == len(names)
    assert set(names) == set(CAUSES) | {"input", "unknown"}
    assert all(map(has_words, names))
    assert f"there are {len(names) - 1} names" in START  # what is unknown has none


def test_every_cause_outside_attention_is_listed_in_the_order_of_the_table() -> None:
    names = [*dict.fromkeys(row.name for row in MODULE_CAUSE_ROWS), "unknown"]
    assert [name for (name, *_) in rows("Causes outside attention")] == names
    assert SCHEMA["$defs"]["module_cause"]["properties"]["name"]["enum"] == names


def test_the_causes_of_the_schema_are_those_of_the_table() -> None:
    assert set(SCHEMA["$defs"]["cause"]["properties"]["name"]["enum"]) == set(CAUSES) | {"input", "unknown"}


def test_the_stages_stand_in_their_order() -> None:
    (sentence,) = re.findall(r"Then the stages, in this order: (.*?)\. A's", DOCS, re.DOTALL)
    assert tuple(re.findall(r"`([^`]+)`", sentence)) == STAGES


def test_every_key_of_the_document_is_told() -> None:
    told = [name for cells in rows("The JSON") for name in cells]
    assert sorted(told) == sorted(SCHEMA["properties"])
    (line,) = [line for line in DOCS.splitlines() if line.startswith("| `pairs`")]
    assert set(re.findall(r"`([^`]+)`", line)) - {"pairs"} == {
        *SCHEMA["$defs"]["pair"]["properties"],
        *SCHEMA["$defs"]["cause"]["properties"],
    }
    (line,) = [line for line in DOCS.splitlines() if line.startswith("| `module_causes`")]
    assert set(re.findall(r"`([^`]+)`", line)) - {"module_causes"} == {*SCHEMA["$defs"]["module_cause"]["properties"]}


def test_the_bars_are_those_of_the_verb() -> None:
    (option,) = re.findall(r"`--fail-on ([^`]+)`", DOCS)
    assert tuple(option.split("\\|")) == DIFF_FAIL_ON
