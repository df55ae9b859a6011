"""A model's ledger in a file, and what counts as a change of it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from sqrtdk.audit.baseline import Ledger, compare_with_baseline, ledger_of, same_formula
from sqrtdk.audit.baseline_file import from_document, read_baseline
from sqrtdk.audit.records import FAIL_ON, SEVERITIES, CheckReport, Finding
from sqrtdk.errors import BaselineError
from sqrtdk.report.check.baseline import baseline_markdown, to_file, to_json, to_text
from tests.attentions.each import each
from tests.report.sample_report import healthy, hostile, judged, leaking, sick, static, unjudged
from tests.support.optional import jsonschema

REPORTS = (healthy, static, sick, hostile, leaking, unjudged)
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "baseline.schema.json").read_text())


def kept(report: CheckReport) -> Ledger:
    """The ledger, written and read again."""
    document = json.loads(to_file(ledger_of(report)))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    return from_document(document, "the baseline")


def scaled(report: CheckReport, site: int, ratio: float, **changes: Any) -> CheckReport:
    """The report with another ratio, and more, at one call."""
    call = report.calls[site].call
    call = dataclasses.replace(call, scale=dataclasses.replace(call.scale, ratio=ratio), **changes)
    calls = list(report.calls)
    calls[site] = dataclasses.replace(calls[site], call=call)
    return dataclasses.replace(report, calls=tuple(calls))


@pytest.mark.parametrize("make", REPORTS)
def test_a_file_says_what_the_ledger_says_and_nothing_changed(make) -> None:  # type: ignore[no-untyped-def]
    report = make()
    assert kept(report) == ledger_of(report)
    held = compare_with_baseline(kept(report), dataclasses.replace(report, fail_on="note"), "b.json")
    assert held.changes == ()
    assert held.exit_code == 0
    assert held.unchanged >= len(report.calls)


def test_one_line_an_attention_layers_in_their_order() -> None:
    lines = to_file(ledger_of(healthy(12))).splitlines()
    sites = [json.loads(line.strip(" ,"))["site"] for line in lines if '"site"' in line]
    assert sites == [f"model.layers.{layer}.self_attn" for layer in range(12)]


def test_what_was_not_read_has_a_line_too() -> None:
    lines = {line.site: line for line in kept(unjudged()).lines}
    assert lines["vision.attn"].verdict == lines["h.1.attn"].verdict == "unmeasured"
    assert lines["vision.attn"].findings == ("note unmeasured",)
    assert compare_with_baseline(kept(unjudged()), unjudged(), "b").unjudged == 2


@each(
    "ratio, changes, what",
    [
        (8.0, {}, ["ratio"]),
        (1.005, {}, []),
        (1.02, {}, ["ratio"]),
        (math.inf, {}, ["ratio"]),
        (1.0, {"formula": "softmax(0.125 * rope(q).rope(k))"}, ["formula"]),
        (1.0, {"formula": "softmax(0.1253 * rope(q).rope(k) + causal)"}, []),
        (1.0, {"formula": "softmax(0.13 * rope(q).rope(k) + causal)"}, ["formula"]),
    ],
)
def test_a_changed_ledger_fails(ratio: float, changes: dict[str, Any], what: list[str]) -> None:
    held = compare_with_baseline(kept(healthy(3)), scaled(healthy(3), 1, ratio, **changes), "b")
    assert [change.what for change in held.changes] == what
    assert held.exit_code == bool(what)
    assert held.unchanged == 3 - bool(what)
    never = compare_with_baseline(
        kept(healthy(3)), scaled(dataclasses.replace(healthy(3), fail_on="never"), 1, ratio, **changes), "b"
    )
    assert (len(never.changes), never.exit_code) == (len(what), 0)


def test_nothing_is_the_same_as_an_infinity() -> None:
    """A number beyond all floats reads as one."""
    held = compare_with_baseline(kept(scaled(healthy(2), 1, math.inf, formula="softmax(1e999 * q.k)")), healthy(2), "b")
    assert [change.what for change in held.changes] == ["formula", "ratio"]
    both = scaled(healthy(2), 1, math.inf)
    assert compare_with_baseline(kept(both), both, "b").exit_code == 0
    assert not same_formula("softmax(1e999 * q.k)", "softmax(0.125 * q.k)")


def test_what_is_added_and_what_is_gone_fails() -> None:
    for before, now, kind in ((healthy(2), healthy(3), "added"), (healthy(3), healthy(2), "removed")):
        held = compare_with_baseline(kept(before), now, "b")
        assert [(change.kind, change.site) for change in held.changes] == [(kind, "model.layers.2.self_attn")]
        assert held.exit_code == 1
        assert held.unchanged == 2


def test_an_attention_that_can_no_longer_be_judged_fails() -> None:
    now = unjudged()
    before = dataclasses.replace(
        now, calls=tuple(judged(call.call.site) for call in now.calls), findings=(), not_measured=()
    )
    held = compare_with_baseline(kept(before), now, "b")
    verdicts = [(change.before, change.after) for change in held.changes if change.what == "verdict"]
    assert verdicts == [("exact", "unmeasured")]
    assert held.exit_code == 1


@each("fail_on", FAIL_ON)
@each("severity", SEVERITIES)
def test_a_new_finding_fails_at_the_bar_and_a_known_one_never(severity: str, fail_on: str) -> None:
    finding = Finding("entropy", severity, "model.layers.0.self_attn", 1.0, 1.0, "m", "f", "s")
    now = dataclasses.replace(healthy(2), findings=(finding,), fail_on=fail_on)
    assert compare_with_baseline(kept(healthy(2)), now, "b").exit_code == now.exit_code
    assert compare_with_baseline(kept(now), now, "b").exit_code == 0
    gone = compare_with_baseline(kept(now), dataclasses.replace(healthy(2), fail_on="note"), "b")
    assert ([change.kind for change in gone.changes], gone.exit_code) == (["gone finding"], 0)


def test_formulas_are_compared_number_by_number() -> None:
    assert same_formula(None, None)
    assert not same_formula(None, "softmax(q.k)")
    assert not same_formula("50 * tanh(x / 50)", "50 * tanh(x / 30)")
    assert not same_formula("softmax(1 * q.k)", "softmax(0 * q.k)")


@each("change", ["findings", "texts"])
def test_comparisons_are_drawn_whatever_the_names(change: str) -> None:
    now = hostile() if change == "texts" else sick()
    held = compare_with_baseline(kept(healthy(2)), now, "b\x1b.json")
    assert all("\x1b" not in text for text in (to_text(held), baseline_markdown(held), to_json(held)))
    assert json.loads(to_json(held))["exit_code"] == 1
    assert "<script" not in baseline_markdown(held)
    assert "removed" in to_text(held)


def test_changes_that_do_not_count_are_counted_one_by_one() -> None:
    now = healthy(3)
    for site in range(3):
        now = scaled(now, site, 2.0)
    held = compare_with_baseline(kept(healthy(3)), now, "b")
    held = dataclasses.replace(held, changes=tuple(dataclasses.replace(one, fails=False) for one in held.changes))
    comment = baseline_markdown(held)
    assert "3 more changes, not counted" in comment
    assert comment.count("| ratio changed |") == 1  # layers that changed alike are one row


GOOD = json.loads(to_file(ledger_of(healthy(1))))
LINE = GOOD["attentions"][0]


@each(
    "document, why",
    [
        ([], "no schema_version"),
        ({}, "no schema_version"),
        (GOOD | {"schema_version": 2}, "version '2'; this sqrtdk reads version 1"),
        (GOOD | {"schema_version": True}, "version 'True'"),
        (GOOD | {"more": 1}, "unknown field 'more'"),
        (GOOD | {"mode": "fast"}, "mode is 'fast'; one of static, dynamic"),
        (GOOD | {"attentions": [1]}, r"attentions\[0\] is '1'; expected object"),
        (GOOD | {"attentions": [LINE, LINE]}, "two lines of"),
        (GOOD | {"attentions": [LINE | {"site": 3}]}, "site is '3'; expected str, got int"),
        (GOOD | {"attentions": [LINE | {"ratio": "one"}]}, "ratio is 'one'"),
        (GOOD | {"attentions": [LINE | {"ratio": True}]}, "ratio is 'True'"),
        (GOOD | {"attentions": [LINE | {"ratio": 10**400}]}, "ratio is"),
        (GOOD | {"attentions": [LINE | {"index": -1}]}, "index is '-1'"),
        (GOOD | {"attentions": [LINE | {"verdict": "fine\x1b"}]}, "verdict is"),
        (GOOD | {"attentions": [LINE | {"findings": "bad thing"}]}, "no severity and rule"),
        (GOOD | {"attentions": [{"site": "x"}]}, "lacks 'index'"),
    ],
)
def test_what_is_no_baseline_is_refused_by_name(document: Any, why: str) -> None:
    with pytest.raises(BaselineError, match=why) as caught:
        from_document(document, "the baseline")
    assert caught.value.hint
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"<<<<<<< ours\n", "not JSON"),
        (b'{"a": NaN}', "NaN"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"mode": 1, "mode": 2}', "twice"),
        (b"\xff\xfe", "not JSON"),
        (None, "can't be read"),
    ],
)
def test_what_is_no_json_is_refused(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "b.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BaselineError, match=why) as caught:
        read_baseline(path)
    assert caught.value.hint


def test_a_pipe_and_a_directory_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(BaselineError):
            read_baseline(path)


def test_static_and_dynamic_are_not_compared() -> None:
    with pytest.raises(BaselineError, match="of a static check") as caught:
        compare_with_baseline(kept(static()), healthy(1), "b.json")
    assert "--static" in caught.value.hint
