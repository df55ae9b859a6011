"""A module of one's own whose port has another scale: the result, the report in both languages, the command."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from sqrtdk.answers import AnswersReport, Function, diff_answers
from sqrtdk.models.load import resolve_model
from sqrtdk.report.answers.html import to_html
from sqrtdk.report.answers.terminal import to_text
from tests.support.optional import jsonschema
from tests.support.program import called

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "answers.schema.json").read_text())
PORT = """
import torch
from sqrtdk.models.load import resolve_model
model = resolve_model("demo").module
for block in model.blocks:
    block.attention.variant = "demo:twice"
def logits(ids):
    return model(torch.tensor([ids])).detach()
"""


@cache
def report_of(variant: str) -> AnswersReport:
    port = resolve_model("demo").module
    for block in port.blocks:  # type: ignore[union-attr]
        block.attention.variant = variant  # type: ignore[union-attr]
    return diff_answers("demo", Function(lambda ids: port(torch.tensor([ids])), "<b>port"), command="sqrtdk diff")


def test_the_same_model_has_no_fault() -> None:
    report = report_of("demo")
    assert (report.verdict, report.same, report.exit_code, report.causes) == ("no fault", True, 0, ())
    assert report.difference < report.least
    assert (report.prompts, report.tokens, report.rows) == (3, 480, 480)
    assert any("eps" in text for text in report.hidden)


def test_a_port_that_scales_twice_is_named() -> None:
    report = report_of("demo:twice")
    (cause,) = report.causes
    assert (report.verdict, cause.name, cause.a, cause.b) == ("proven", "scale", 0.125, 1 / 64)
    assert (report.same, report.exit_code) == (False, 1)
    assert report.residue < 1e-4 < report.difference
    assert max(report.places.after) < 1e-4 < min(report.places.before)


def test_the_report_in_both_languages() -> None:
    report = report_of("demo:twice")
    english, chinese = to_text(report, width=120), to_text(report, width=120, language="zh")
    assert "Proven: scale (factor on the product of q and k: 0.125 in A, 0.015625 in B)" in english
    assert "已证明：scale（q 与 k 的点积所乘的缩放因子：A 为 0.125，B 为 0.015625）" in chinese
    assert "Exit code 1" in english
    page = to_html(report)
    assert "&lt;b&gt;port" in page
    assert "<b>port" not in page
    assert page.count('class="residue"') > 5
    assert page.count("<polyline") == 2
    assert "<table" in report._repr_html_()
    jsonschema.validate(json.loads(report.to_json()), SCHEMA)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_port_of_the_demo.py").write_text(PORT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = called("diff", "demo", "a_port_of_the_demo:logits", "--answers", "--json", "--html", tmp_path / "page.html")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    jsonschema.validate(document, SCHEMA)
    assert [cause["name"] for cause in document["causes"]] == ["scale"]
    assert "Proven. Exit code 1" in done.stderr
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_a_side_that_is_none_is_said(tmp_path: Path) -> None:
    done = called("diff", "demo", "demo", "--answers")
    assert done.returncode == 2
    assert "names nothing that answers" in done.stderr
