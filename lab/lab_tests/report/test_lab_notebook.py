"""Claims in a notebook."""

from __future__ import annotations

from lab_tests.report import sample_lab
from sqrtdk.report.plain import plain
from sqrtdk_lab.runner import Done
from tests.report.sample_report import EVIL
from tests.report.test_notebook import Elements, check_table


def test_each_claim_is_a_table_that_is_all_there() -> None:
    claims = [*sample_lab.records(), sample_lab.hostile(), sample_lab.unsound(sample_lab.records()[0])]
    for record in (*claims, Done(claims[0], False, None)):
        check_table(record)


def test_names_of_a_stranger_are_text() -> None:
    html = sample_lab.hostile()._repr_html_()
    assert "<script" not in html
    assert not set(html) & {"\x1b", "\u202e", "\u2028"}
    assert plain(EVIL) in Elements(html).text
