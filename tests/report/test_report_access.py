"""The page for a keyboard, a screen reader, a printer, a phone, and eyes that need contrast, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sqrtdk.audit.records import CheckReport
from sqrtdk.report.html import to_html
from tests.report.contrast import LEAST, contrasts
from tests.report.sample_report import lawless, leaking, sick, static
from tests.support.playwright_here import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.full]

Opener = Callable[..., Page]
REPORTS: dict[str, Callable[[], CheckReport]] = {
    "sick": sick, "static": static, "leaking": leaking, "lawless": lawless,
}  # fmt: skip


@pytest.fixture
def show(opened: Opener, tmp_path: Path) -> Opener:
    """Open a report's page."""

    def open_report(report: CheckReport, place: str = "#en", language: str = "auto", **more: Any) -> Page:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.html"
        path.write_text(to_html(report, language), encoding="utf-8")
        return opened(path, place, **more)

    return open_report


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One page of a sick model, for tests that leave it as it was."""
    path = tmp_path_factory.mktemp("page") / "sick.html"
    path.write_text(to_html(sick()), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(path.as_uri() + "#en")
    yield page
    page.close()


def test_the_sites_are_a_table_to_a_screen_reader(page: Page) -> None:
    for width in (1280, 390):  # on a phone the table is drawn as blocks
        page.set_viewport_size({"width": width, "height": 844})
        told = page.locator("#site-list").aria_snapshot()
        assert told.startswith('- table "Sites":')
        for column in ("site", "formula", "scale ratio", "verdict", "health", "max logit", "entropy", "saturated"):
            assert f'columnheader "{column}"' in told
        assert len(re.findall(r"- '?rowheader ", told)) == page.locator(".site").count() == 7
        assert '- button "decoder.h.3,5-6.attn"' in told
        assert told.count('- cell "unexplained missing"') == 2
        assert "scale ratio 8.000" not in told  # the label of a phone's cell is not said twice
    page.set_viewport_size({"width": 1280, "height": 900})


def test_a_line_opens_by_its_button_and_says_so(page: Page) -> None:
    button = page.get_by_role("button", name="decoder.h.3,5-6.attn")
    inside = page.locator("#" + str(button.get_attribute("aria-controls")))
    assert (button.get_attribute("aria-expanded"), inside.is_visible()) == ("false", False)
    button.press("Enter")
    assert (button.get_attribute("aria-expanded"), inside.is_visible()) == ("true", True)
    page.locator(".site", has=button).locator(".c-formula").click()  # anywhere in the line
    assert (button.get_attribute("aria-expanded"), inside.is_visible()) == ("false", False)


@pytest.mark.parametrize(
    ("typed", "lines", "sites"),
    [
        ("h.4", 1, 1),
        ("missing", 2, 4),
        ("未声明", 3, 5),
        ("declared VISION", 1, 1),
        ("fft_rfft", 1, 1),
        ("nowhere", 0, 0),
    ],
)
def test_the_filter_keeps_the_lines_that_fit_and_says_how_many(page: Page, typed: str, lines: int, sites: int) -> None:
    field = page.get_by_role("searchbox", name="Filter by site, formula, file or verdict")
    assert page.get_by_role("status").inner_text() == ""
    field.fill(typed)
    assert page.locator(".site:visible").count() == lines
    assert page.get_by_role("status").inner_text() == f"{sites} of 10 sites shown"
    field.fill("")
    assert page.locator(".site:visible").count() == 7


def test_a_filter_finds_a_file(show: Opener) -> None:
    first, *rest = leaking().calls
    written = replace(first, call=replace(first.call, product_at="port/model.py:12"))
    page = show(replace(leaking(), calls=(written, *rest)))
    assert page.locator(".site .place").inner_text() == "port/model.py:12"
    page.locator("#filter").fill("model.py")
    assert page.locator(".site:visible").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", REPORTS)
def test_every_text_can_be_read(show: Opener, name: str, scheme: str) -> None:
    page = show(REPORTS[name](), scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.evaluate("document.querySelectorAll('.opens').forEach(button => button.click())")
    page.locator(".site").first.hover()
    page.wait_for_timeout(200)
    told = contrasts(page)
    assert len(told) > 50
    assert [one for one in told if one[0] < LEAST] == []


def test_the_focus_is_seen_on_every_colour(page: Page) -> None:
    """A dark line (over 4.5 on light grounds) between bright ones (over 4.5 on dark grounds)."""
    page.locator("#filter").focus()
    page.keyboard.press("Tab")
    style = page.evaluate(
        "(s => [s.outlineStyle, s.outlineWidth, s.outlineColor, s.boxShadow])(getComputedStyle(document.activeElement))"
    )
    assert style[:3] == ["solid", "2px", "rgb(23, 28, 38)"]
    assert style[3].count("rgb(255, 255, 255)") == 2
    page.locator("#maps .cell").first.click()
    page.locator("#spread").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    for rings, count in ((".ring.focus", 2), (".ring.chosen", 2)):
        strokes = page.locator(rings).evaluate_all("rects => rects.map(r => getComputedStyle(r).stroke)")
        assert sorted(strokes) == ["rgb(23, 28, 38)", "rgb(255, 255, 255)"], count
    page.keyboard.press("Shift+Tab")
    assert page.locator(".ring.focus").count() == 0


def test_all_that_is_folded_is_on_paper(show: Opener) -> None:
    page = show(sick())
    page.locator(".opens").first.click()
    folded, lines = page.locator("details:not([open])").count(), page.locator(".inside:visible").count()
    assert (folded > 2, lines) == (True, 1)
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.locator(".inside:visible").count() == 7
    page.emulate_media(media="print")
    assert page.locator("#filter").is_hidden()
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert page.locator("details:not([open])").count() == folded
    assert page.locator(".inside:visible").count() == 1


@pytest.mark.parametrize("place", ["#en", "#zh"])
def test_a_phone_shows_the_verdict_first(show: Opener, place: str) -> None:
    page = show(sick(), place, width=390)
    page.set_viewport_size({"width": 390, "height": 844})
    for part in (".outcome .word", ".outcome .headline"):
        box = page.locator(part).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < 844
    told = page.locator(".outcome").bounding_box()
    tiles = page.locator(".tiles").bounding_box()
    assert told is not None
    assert tiles is not None
    assert told["y"] + told["height"] <= tiles["y"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_both_languages(show: Opener) -> None:
    page = show(sick())
    assert page.locator(".outcome .word").inner_text() == "Failed"
    label = page.locator("#maps .cell").first.get_attribute("aria-label")
    assert label == "decoder.h.0.attn, head 0: Max logit " + str(label).rpartition(" ")[2]
    assert page.locator("#statistic option").nth(1).inner_text() == "Scale ratio"
    page.locator("#filter").fill("h.4")
    page.locator("#maps .cell").first.click()
    page.get_by_role("button", name="中文").click()
    assert page.locator(".outcome .word").inner_text() == "未通过"
    assert (
        page.locator(".outcome .headline").inner_text().startswith("10 次注意力调用中有 4 次的缩放因子是应有值的 8 倍")
    )
    assert page.locator("#statistic option").nth(1).inner_text() == "缩放比"
    assert page.get_by_role("status").inner_text() == "显示 10 个调用位置中的 1 个"
    chinese = page.locator("#maps .cell").first.get_attribute("aria-label")
    assert str(chinese).startswith("decoder.h.0.attn，头 0：最大 logit ")
    assert "正态曲线" in page.locator("#head-view").inner_text()
    assert page.locator("#site-list").aria_snapshot().startswith('- table "调用位置":')


def test_it_opens_in_the_language_that_was_asked_for(show: Opener) -> None:
    assert show(leaking(), "", "zh-CN").evaluate("document.documentElement.lang") == "zh-CN"
    assert show(leaking(), "", "en", locale="zh-CN").evaluate("document.documentElement.lang") == "en"
    assert show(leaking(), "", "auto", locale="zh-CN").evaluate("document.documentElement.lang") == "zh-CN"
    assert show(leaking(), "#en", "zh-CN").evaluate("document.documentElement.lang") == "en"


def test_the_map_opens_at_a_head_that_fails(show: Opener) -> None:
    page = show(leaking())
    assert page.locator("#head-view h3").inner_text().startswith("h.1.attn")
    assert page.locator("#maps .fails").all_text_contents() == ["1"]
    assert "(fails)" in str(page.locator("#maps .cell").nth(4).get_attribute("aria-label"))
    page.select_option("#statistic", "scale_ratio")
    assert "1 is the textbook value" in page.locator("#help").inner_text()


def test_without_scripts_everything_is_open(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(to_html(leaking(), "zh-CN"), encoding="utf-8")
    page = browser.new_page(java_script_enabled=False)
    page.goto(path.as_uri())
    assert page.locator(".inside").first.is_visible()
    assert page.locator("#filter").is_hidden()
    assert page.locator(".outcome .word").inner_text() == "未通过"
    page.close()
