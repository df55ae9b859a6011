"""The table of the families is that of the record, and the record that of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import port_table
import sqrtdk
from tests.hf.small import build, small_config

ROOT = Path(__file__).parents[2]
LEAST_FAMILIES = 250
SAMPLE = ("gemma2", "granite", "gpt_oss", "t5", "xlnet", "zamba2")


RECORD: dict[str, Any] = json.loads(port_table.RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("language", [0, 1], ids=["en", "zh"])
def test_the_page_is_what_the_record_says(language: int) -> None:
    page = (ROOT / "docs" / ("en", "zh")[language] / "port.md").read_text(encoding="utf-8")
    assert port_table.filled(page, port_table.table(RECORD, language)) == page


def test_another_record_gives_another_page() -> None:
    page = (ROOT / "docs" / "en" / "port.md").read_text(encoding="utf-8")
    fewer = RECORD | {"families": RECORD["families"][1:]}
    assert port_table.filled(page, port_table.table(fewer, 0)) != page


def test_every_family_was_run_and_its_scale_read_twice() -> None:
    shown = port_table.shown(RECORD)
    assert len(shown) >= LEAST_FAMILIES
    assert all((entry["run"]["apart"] or 0.0) < 1e-3 for entry in shown)
    gains = [call["declared_by"] for entry in shown if entry["run"]["apart"] is None for call in entry["calls"]]
    assert all("learned" in by for by in gains)  # each head its own: there is no one distance


@pytest.mark.parametrize("language", [0, 1], ids=["en", "zh"])
def test_what_is_not_in_the_table_is_named_with_its_reason(language: int) -> None:
    without = port_table.left_out(RECORD, language)
    shown = {entry["model_type"] for entry in port_table.shown(RECORD)}
    assert shown | set(without) == {entry["model_type"] for entry in RECORD["families"]} | set(RECORD["failed"])
    assert shown.isdisjoint(without)
    assert all(without.values())
    assert "longformer" in without
    text = port_table.table(RECORD, language)
    assert f"{len(without)} " in text
    assert all(f"| `{name}` | {why} |" in text for name, why in without.items())


def test_a_call_that_was_not_judged_leaves_its_family_out() -> None:
    one = RECORD["families"][0]
    unread = one | {"calls": [one["calls"][0] | {"verdict": "unmeasured", "formula": "softmax(unknown(q).k)"}]}
    record = RECORD | {"families": [unread, *RECORD["families"][1:]]}
    assert port_table.left_out(record, 0)[one["model_type"]] == "`softmax(unknown(q).k)`"
    assert len(port_table.shown(record)) == len(port_table.shown(RECORD)) - 1


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_run_of_today_gives_the_declaration_of_the_record(model_type: str) -> None:
    (entry,) = (entry for entry in RECORD["families"] if entry["model_type"] == model_type)
    report = sqrtdk.check(build(small_config(model_type), "eager"), static=True)
    assert {judged.call.softcap for judged in report.calls} == {call["softcap"] for call in entry["calls"]}
    assert {judged.call.norm for judged in report.calls} == {call["norm"] for call in entry["calls"]}
    assert {judged.call.rope for judged in report.calls} == {call["rope"] for call in entry["calls"]}
    declared = {call.declared_by.split(" ")[0] if call.declared_by else None for call in report.calls}
    assert declared == {call["declared_by"].split(" ")[0] if call["declared_by"] else None for call in entry["calls"]}
