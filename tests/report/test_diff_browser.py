"""The page of a comparison in a real browser, opened from disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from sqrtdk.compare.inside.suspect import STAGES
from sqrtdk.compare.records import DiffReport
from sqrtdk.report.diff.html import to_html
from sqrtdk.report.plain import plain
from tests.report.sample_diff import EVIL, hostile, not_finite, softcap, two_causes
from tests.support.pages import open_fold
from tests.support.playwright_here import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.full]

Opener = Callable[..., Page]


@pytest.fixture
def show(opened: Opener, tmp_path: Path) -> Opener:
    """Open a report's page."""

    def open_report(report: DiffReport, width: int = 1280, scheme: str = "light", language: str = "en") -> Page:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.html"
        path.write_text(to_html(report), encoding="utf-8")
        return opened(path, f"#{language}", width=width, scheme=scheme)

    return open_report


def test_the_logits_are_drawn_when_a_line_is_opened(show: Opener) -> None:
    page = show(two_causes())
    assert page.locator("circle.off, circle.on").count() == 2 * 2  # the legends alone
    open_fold(page, 1)
    chart = page.locator(".scatter").nth(0)
    assert chart.locator(".drawing circle").count() == 220
    assert "NaN" not in chart.inner_html()
    assert chart.is_visible()
    assert not page.locator(".masks").nth(0).is_visible()
    on, off = (int(chart.locator(f".count-{name}").inner_text()) for name in ("on", "off"))
    assert on + off == 220
    assert off > 50


def test_another_head_and_another_site_draw_other_points(show: Opener) -> None:
    page = show(softcap())
    open_fold(page, 0)
    chart = page.locator(".scatter .drawing")
    before = chart.inner_html()
    page.locator(".pick-head select").select_option(index=1)
    other = chart.inner_html()
    assert other != before
    page.locator(".pick-site select").select_option(index=7)
    assert chart.inner_html() not in (before, other)
    assert page.locator(".pick-site option").nth(7).inner_text() == "model.layers.7.self_attn"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_phone_shows_the_name_of_every_stage(show: Opener, language: str) -> None:
    page = show(two_causes(), width=390, language=language)
    names = page.locator(".fold").first.locator(".strip .name")
    assert names.count() == len(STAGES)
    assert all(name.is_visible() and name.inner_text().strip() for name in names.all())
    boxes = [name.bounding_box() or {} for name in names.all()]
    assert all(left["x"] + left["width"] <= right["x"] + 1 for left, right in itertools.pairwise(boxes))
    assert not show(two_causes(), language=language).locator(".fold .strip .name").first.is_visible()


def test_the_masks_are_drawn_cell_by_cell(show: Opener) -> None:
    page = show(two_causes())
    open_fold(page, 2)
    masks = page.locator(".masks").nth(1)
    assert masks.locator(".drawing .cell-b").count() == 15
    assert masks.locator(".drawing .cell-both").count() == 136
    assert masks.locator(".drawing .cell-a").count() == 0
    assert masks.locator(".count-b").inner_text() == "15"
    masks.locator(".drawing .cell-b").first.hover()
    assert page.locator("#tip").inner_text() == "i = 48, j = 49: B"


def test_the_keyboard_does_it_all(show: Opener) -> None:
    page = show(two_causes())
    page.locator("details.fold > summary").nth(2).focus()
    page.keyboard.press("Enter")
    page.locator(".scatter .drawing svg").focus()
    told = page.locator(".scatter .told").nth(1)
    page.keyboard.press("ArrowRight")
    first = told.inner_text()
    page.keyboard.press("ArrowRight")
    assert first.startswith("i = ")
    assert told.inner_text() != first
    page.keyboard.press("Tab")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.locator(".masks .told").nth(1).inner_text() == "i = 49, j = 49: A, B"
    assert page.locator(".masks .cursor rect").count() == 1


def test_a_point_is_named_under_the_pointer(show: Opener) -> None:
    page = show(softcap())
    open_fold(page, 0)
    assert page.locator("#tip").is_hidden()
    page.locator(".scatter .drawing circle").last.hover()
    assert page.locator("#tip").inner_text().startswith("i = ")


def test_values_that_are_not_finite_are_counted_and_not_drawn(show: Opener) -> None:
    page = show(not_finite())
    open_fold(page, 1)
    chart = page.locator(".scatter")
    assert chart.locator(".drawing circle").count() == 1
    assert chart.locator(".dropped").is_visible()
    assert chart.locator(".count-dropped").inner_text() == "2"


def test_the_language_is_chosen(show: Opener) -> None:
    page = show(two_causes())
    assert page.locator("#found div.en").is_visible()
    assert not page.locator("#found div.zh").is_visible()
    page.locator("button[data-language='zh-CN']").click()
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    assert "结论" in page.locator("#found").inner_text()
    assert page.url.endswith("#zh")
    assert "与 A 的不同在于" in show(two_causes(), language="zh").locator("#found").inner_text()


def test_without_scripts_it_is_a_plain_english_page(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(to_html(two_causes()), encoding="utf-8")
    context = browser.new_context(java_script_enabled=False, locale="zh-CN")
    page = context.new_page()
    page.goto(path.as_uri())
    assert "B shows each row the key after its own" in page.locator("#found").inner_text()
    assert not page.locator(".languages").is_visible()
    page.locator("details.fold > summary").nth(2).click()
    assert page.locator(".formula mark").last.is_visible()
    assert not page.locator(".scatter").nth(1).is_visible()
    assert "switched off" in page.locator("noscript").inner_text()
    context.close()


def test_hostile_texts_are_shown_and_run_nothing(show: Opener) -> None:
    page = show(hostile())
    assert page.title().endswith("sqrtdk diff")
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    for place in ("h1", "#found", "#pairs", "#alone", "#run", ".sides"):
        assert plain(EVIL) in page.locator(place).inner_text(), place
