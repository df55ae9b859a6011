"""The table of public kernels is that of its record, in both languages."""

from __future__ import annotations

import json

import pytest

import public_kernels_page as page

RECORD = json.loads(page.RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("language", [0, 1], ids=["en", "zh"])
def test_the_page_is_what_the_record_says(language: int) -> None:
    text = (page.ROOT / "docs" / ("en", "zh")[language] / "gradients.md").read_text(encoding="utf-8")
    assert page.filled(text, page.table(RECORD, language)) == text
    fewer = RECORD | {"kernels": RECORD["kernels"][1:]}
    assert page.filled(text, page.table(fewer, language)) != text


def test_five_packages_were_asked_and_what_is_wrong_is_said() -> None:
    rows = RECORD["kernels"]
    assert len({row["package"] for row in rows}) >= 5
    assert all(bool(row["said"]) == bool(row["wrong"]) for row in rows)
    assert all(row["cases"] for row in rows)
