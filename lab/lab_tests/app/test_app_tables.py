"""The tables beside the figures: what is measured, and what the theory says, each in a column of its own."""

from __future__ import annotations

import pytest

from sqrtdk._language import Language
from sqrtdk.messages import word
from sqrtdk.report.figures import format_number
from sqrtdk.theory import expected_entropy_nats, expected_jacobian_norm, expected_peak
from sqrtdk_lab.app import figures, sample, tables
from sqrtdk_lab.app.page import LANGUAGE_CHOICES
from sqrtdk_lab.app.settings import parse_settings
from tests.report.html_page import HtmlPage


def glance(typed: dict[str, str], language: Language = "en") -> dict[str, list[str]]:
    """The cells of each row of the numbers, by the key of its name."""
    rows = HtmlPage(str(tables.at_a_glance(parse_settings(typed), language))).rows[1:]
    keys = ("scale", "ratio", "std", "max", "entropy", "effective", "peak", "saturated", "jacobian", "gradient")
    assert [row[0] for row in rows[:-1]] == [word(f"app.row.{key}", language) for key in keys]
    return dict(zip((*keys, "rounding"), (row[1:] for row in rows), strict=True))


@pytest.mark.parametrize("language", LANGUAGE_CHOICES)
def test_theory_stands_in_a_column_for_each_scale(language: Language) -> None:
    rows = glance({"rule": "none"}, language)
    theory = [
        format_number(of(256, std))
        for of in (expected_entropy_nats, expected_peak, expected_jacobian_norm)
        for std in (8.0, 1.0)
    ]
    assert rows["scale"] == ["1", "1", "0.125"]
    assert rows["ratio"] == ["8.000", "8.000", "1.000"]
    assert rows["std"][1:] == ["8", "1"]
    assert rows["entropy"][1:] + rows["peak"][1:] + rows["jacobian"][1:] == theory


def test_the_textbooks_column_has_the_variances_and_no_temperature() -> None:
    rows = glance({"rule": "none", "temperature": "2", "query_variance": "4"})
    assert rows["scale"] == ["0.5", "0.5", "0.125"]
    assert rows["std"][1:] == ["8", "2"]


def test_of_a_softcap_the_theory_says_nothing() -> None:
    rows = glance({"softcap": "5"})
    assert [rows[key][1] for key in ("std", "entropy", "peak", "jacobian")] == ["-"] * 4
    assert rows["std"][2] == "1"


def test_under_the_textbooks_scale_both_columns_are_one() -> None:
    settings = parse_settings({})
    assert sample.textbook(settings) == sample.distribution(settings)
    assert all(row[1] == row[2] for row in glance({}).values())


OVERFLOWING = {"query_variance": "1000000", "key_variance": "1000000", "rule": "none", "dtype": "float16"}
ZERO = {"rule": "fixed", "parameter": "0"}


@pytest.mark.parametrize("language", LANGUAGE_CHOICES)
@pytest.mark.parametrize(
    ("dtype", "kept", "stored"),
    [("float16", "float32", "float16"), ("float64", "float64", "float16"), ("bfloat16", "float32", "bfloat16")],
)
def test_where_logits_are_kept_is_said(language: Language, dtype: str, kept: str, stored: str) -> None:
    """The largest logit is beyond float16, and the output has no error: both tables speak of one thing only so."""
    page = HtmlPage(str(tables.at_a_glance(parse_settings(OVERFLOWING | {"dtype": dtype}), language)))
    assert word("app.glance.kept", language, kept=kept, stored=stored) in page.texts
    ranges = HtmlPage(str(tables.range_forecast_table(parse_settings(OVERFLOWING | {"dtype": dtype}), language)))
    assert stored in {row[0] for row in ranges.rows}


def test_float64_is_not_held_against_itself() -> None:
    assert glance({"dtype": "float64"})["rounding"] == ["-"] * 3
    assert glance({})["rounding"][0] != "-"


def test_zero_has_no_sign_and_infinity_is_a_sign() -> None:
    assert glance(ZERO)["max"][0] == "0"
    rows = HtmlPage(str(tables.range_forecast_table(parse_settings(ZERO), "zh"))).rows
    assert rows[2][4] == "∞"
    assert not {"inf", "-inf", "nan", "-0"} & {cell for row in rows for cell in row}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("language", LANGUAGE_CHOICES)
def test_a_figure_without_a_value_says_so(language: Language) -> None:
    """No text in English is drawn into it: the page says it."""
    settings = parse_settings({**ZERO, "overlay": "off"})
    drawn = {
        name: str(figures.to_html(name, figures.EXPLORER_FIGURES[name](settings), language))
        for name in figures.EXPLORER_FIGURES
    }
    empty = {name for name, html in drawn.items() if word("app.figure.empty", language) in html}
    assert empty == {"logits", "gradient"} == {name for name, html in drawn.items() if "<svg" not in html}


def test_one_key_that_takes_all_is_a_point_and_is_told() -> None:
    figure = figures.draw_weights(parse_settings(OVERFLOWING))
    assert figure.note == "app.note.one_key"
    assert {series.style for series in figure.plot.series} == {"line"}  # with markers where there are few points
    assert word("app.note.one_key", "zh") in str(figures.to_html("weights", figure, "zh"))
    assert figures.draw_weights(parse_settings({})).note == ""
