"""Several runs in one report: a line each, what is wrong in which, and the attentions that not all have."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.cells import cell_len

from sqrtdk.errors import InvalidValueError
from sqrtdk.monitor.folder import RunWriter
from sqrtdk.monitor.reading import read_run
from sqrtdk.report.plain import plain
from sqrtdk.report.watch.html import to_html
from sqrtdk.report.watch.json import several_json, to_json
from sqrtdk.report.watch.several import newest_worst, partly_shared, several_text, shared_sentence
from sqrtdk.report.watch.summary import Summary, summarise
from tests.monitor.watched_runs import EVIL
from tests.report.html_page import HtmlPage
from tests.support.optional import jsonschema

COLUMNS = ["max_logit", "entropy_fraction"]
NAMES = ("healthy", "unscaled", "sick")


@pytest.fixture(scope="module")
def told(runs: dict[str, Path]) -> list[Summary]:
    return [dataclasses.replace(summarise(read_run(runs[name])), name=f"runs/{name}") for name in NAMES]


def test_a_run_is_a_line_and_only_what_is_wrong_is_told(told: list[Summary]) -> None:
    text = several_text(told, COLUMNS, width=120)
    assert text.startswith("Something is wrong in 2 of 3 runs: B, C.\n")
    lines = {line[0]: line.split() for line in text.splitlines() if line[1:3] == "  " and "runs/" in line}
    assert [lines[letter][1] for letter in "ABC"] == [f"runs/{name}" for name in NAMES]
    assert lines["A"][2:4] == ["1-48", f"{told[0].losses[-1]:.4g}"]
    assert lines["B"][5] == f"{max(site.worst('max_logit')[0][-1] for site in told[1].sites):.4g}"
    assert lines["C"][3] == "NaN"
    assert "\nB  blocks.0.1: scale " in text
    assert "\nC  The loss is NaN from step 45 on." in text
    assert "\nA  Nothing is wrong" not in text
    assert "Nothing is wrong in 2 runs." in several_text([told[0], told[0]], COLUMNS)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_it_fits_and_obeys_nobody(told: list[Summary], width: int, language: str) -> None:
    text = several_text(told, COLUMNS, width=width, language=language)  # type: ignore[arg-type]
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert text.replace("\n", "").isprintable()
    assert ("有问题" in text) == (language == "zh")


def test_attentions_that_not_all_have_are_named_by_who_has_them(told: list[Summary], tmp_path: Path) -> None:
    groups = partly_shared(told)
    assert [group.letters for group in groups] == [("A", "B"), ("C",)]
    assert groups[0].sites == ("blocks.0.1", "blocks.1.1")
    assert groups[1].runs == ("runs/sick",)
    assert f"Only in C: h.0.attn, model.decoder.transformer.layers.11.self_attention.inner, {plain(EVIL)}" == str(
        shared_sentence(groups[1])
    )
    RunWriter(tmp_path / "empty", model={}, settings={}).close()
    empty = summarise(read_run(tmp_path / "empty"))
    assert partly_shared([told[0], told[1], empty]) == (), "a run without an attention lacks none"
    assert "Not measured" in several_text([told[0], empty], COLUMNS, width=120)
    assert newest_worst(empty, "max_logit") != newest_worst(empty, "max_logit")  # NaN


def test_the_document_has_each_run_as_it_is_alone(told: list[Summary]) -> None:
    schema = json.loads((Path(__file__).parents[2] / "docs" / "watch.schema.json").read_text())
    document = json.loads(several_json(told))
    jsonschema.Draft202012Validator(schema).validate(document)
    assert document["runs"] == [json.loads(to_json(run)) for run in told]
    assert [one["runs"] for one in document["only_in"]] == [["runs/healthy", "runs/unscaled"], ["runs/sick"]]


def test_the_page_has_a_table_of_the_runs(told: list[Summary]) -> None:
    page = HtmlPage(to_html(told))
    rows = [row for row in page.rows if any(cell.endswith(run.name) for run in told for cell in row)]
    assert [row[0].split()[0] for row in rows] == ["A", "B", "C"]
    assert "1 critical, 1 fail, 1 warn, 1 note" in rows[2][1]
    assert sum(attributes.get("id") == "overlay" for _, attributes in page.elements) == 1
    words = "".join(page.texts)
    assert "No alarm was raised in A." in words
    assert "Only in A, B: blocks.0.1, blocks.1.1" in words
    assert HtmlPage(to_html(told[:1])).tags.count("figure") == 1, "one run has nothing to lie over"


def test_more_runs_than_letters_are_refused(told: list[Summary]) -> None:
    with pytest.raises(InvalidValueError, match="at most 26 runs; got 27"):
        to_html([told[0]] * 27)
