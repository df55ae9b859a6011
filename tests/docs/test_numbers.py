"""The page of the statistics has every one of them, and the thresholds of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from sqrtdk.audit.rules import statistics
from sqrtdk.audit.rules.numbers import BF16_OFFSET, FP16_MAX
from sqrtdk.audit.tolerance import SCALE_TOLERANCE
from sqrtdk.monitor.columns import HEAD_COLUMNS
from sqrtdk.stats.heads import SATURATED, CallStats, HeadStats
from sqrtdk.stats.request import AuxOutput

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / language / "numbers.md" for language in ("en", "zh")]
AS_ROWS = ("step", "site", "index", "head")  # what a record is of, not a statistic


def _rows(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_statistic_is_on_the_page(page: Path) -> None:
    named = {name for row in _rows(page) for cell in row for name in re.findall(r"`(\w+)`", cell)}
    wanted = {*AuxOutput._fields, *(column.name for column in HEAD_COLUMNS if column.name not in AS_ROWS)}
    wanted |= {field.name for kind in (HeadStats, CallStats) for field in fields(kind)} - {"heads"}
    assert wanted - named == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_thresholds_are_those_of_the_code(page: Path) -> None:
    numbers = {}
    for row in _rows(page):
        if len(row) == 8:
            numbers.setdefault(row[0].strip("`"), []).append([re.split("[,，]", cell)[0] for cell in row[3:7]])
    levels = {name: f"{bar:.0f}" for name, bar, _ in statistics.MAX_LOGIT_BARS}
    product, offset = f"{FP16_MAX:.0f}", f"{BF16_OFFSET:.0f}"
    assert numbers == {
        "scale_ledger": [["", f"{SCALE_TOLERANCE:.0%}", f"{SCALE_TOLERANCE:.0%}", ""]],
        "max_logit": [[levels[name] for name in ("note", "warn", "fail", "critical")]],
        "range_forecast": [["", product, product, ""], [offset, offset, "", ""]],
        "entropy": [[f"{statistics.NOTE_FRACTION}", f"{statistics.WARN_FRACTION}", "", ""]],
        "saturation": [[f"{statistics.SATURATED_ROWS}", f"{statistics.SATURATED_HEADS}", "", ""]],
        "flat": [[f"{statistics.FLAT_FRACTION}", "0", "", ""]],
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_other_bars_are_named(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert statistics.LEAST_KEYS_JUDGED == 16
    assert " 16 " in text
    assert f"{statistics.FLAT_STD}" in text
    assert f"{SATURATED}" in text
