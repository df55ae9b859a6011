"""File and line of what a report speaks of: in the terminal, in JSON and on the page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from sqrtdk.audit.records import CheckReport, Finding, JudgedCall
from sqrtdk.report.check.places import places_text, source_lines
from sqrtdk.report.html import to_html
from sqrtdk.report.json import to_json
from sqrtdk.report.terminal import to_text
from sqrtdk.tracing.records import EffectiveScale, Factor
from tests.report.html_page import HtmlPage
from tests.report.sample_report import healthy, judged
from tests.support.optional import jsonschema

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "check.schema.json").read_text())


def written(site: str, product: str = "port.py:3", factor: str = "lib/port.py:5") -> JudgedCall:
    """A call whose scale is a factor on the logits and one of the kernel."""
    entry = judged(site)
    factors = (Factor(0.5, "q", "number", at="port.py:2"), Factor(0.25, "logits", "number", at=factor))
    scale = dataclasses.replace(entry.call.scale, factors=factors)
    return dataclasses.replace(
        entry, call=dataclasses.replace(entry.call, scale=scale, product_at=product, softmax_at="port.py:9")
    )


def report(*calls: JudgedCall, findings: tuple[Finding, ...] = ()) -> CheckReport:
    return dataclasses.replace(healthy(1, 1), calls=calls, findings=findings)


def finding(site: str, at: str | None) -> Finding:
    return Finding("scale_ledger", "fail", site, 8.0, 1.0, "the scale is missing", "scale it", "paper", at)


def test_the_parts_of_a_call() -> None:
    assert source_lines(written("a").call) == {
        "port.py:3": "q.k",
        "port.py:2": "0.5 on q",
        "lib/port.py:5": "0.25 on logits",
        "port.py:9": "softmax",
    }
    fused = dataclasses.replace(
        judged("a").call,
        product_at="a.py:1",
        softmax_at="a.py:1",
        scale=EffectiveScale(0.1, 0.8, 0.1, None, None, (Factor(0.1, "op", "sdpa scale", at="a.py:1"),)),
    )
    assert places_text(fused) == "q.k, 0.1 by the kernel, softmax at a.py:1"
    assert places_text(judged("a").call) == ""


def test_the_terminal_names_them_once_for_all_layers() -> None:
    text = to_text(report(*(written(f"h.{i}.attn") for i in range(3))), width=160)
    line = "* written: q.k at port.py:3; 0.5 on q at port.py:2; 0.25 on logits at lib/port.py:5; softmax at port.py:9"
    assert " ".join(text.split()).count(f"{line} (h.0-2.attn)") == 1


def test_layers_that_are_written_elsewhere_are_told_apart() -> None:
    calls = [written("h.0.attn"), written("h.1.attn"), written("h.2.attn", factor="other.py:5")]
    text = to_text(report(*calls), width=160)
    assert "(h.0-1.attn)" in text
    assert "0.25 on logits at other.py:5" in text


def test_a_finding_names_its_lines() -> None:
    findings = tuple(finding(f"h.{i}.attn", at) for i, at in enumerate(("port.py:3", "port.py:3", "port.py:7")))
    calls = [written(f"h.{i}.attn") for i in range(3)]
    text = to_text(report(*calls, findings=findings), width=120)
    assert "h.0-1.attn (2 sites)  port.py:3  scale_ledger" in text
    assert "h.2.attn  port.py:7  scale_ledger" in text
    assert "None" not in to_text(report(*calls, findings=(finding("h", None),)), width=120)


def test_the_page_shows_steps_and_factors_with_their_lines() -> None:
    page = HtmlPage(to_html(report(written("h.0.attn"), findings=(finding("h.0.attn", "lib/port.py:5"),))))
    codes = [attributes for tag, attributes in page.elements if tag == "code"]
    assert [a["title"] for a in codes if a.get("class") == "line"] == ["port.py:9"]  # of the softmax; steps have none
    assert ["value值0.25", "on乘在logits", "from来自number", "written代码位置lib/port.py:5"] in page.rows
    texts = " ".join(" ".join(page.texts).split())
    assert "h.0.attn lib/port.py:5" in texts
    assert "0.5 on q 0.5 乘在 q 上 port.py:2" in texts


def test_json_holds_them() -> None:
    document = json.loads(to_json(report(written("h"), findings=(finding("h", "port.py:3"),))))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    (call,) = document["calls"]
    assert (call["product_at"], call["softmax_at"]) == ("port.py:3", "port.py:9")
    assert [factor["at"] for factor in call["scale"]["factors"]] == ["port.py:2", "lib/port.py:5"]
    assert document["findings"][0]["at"] == "port.py:3"
