"""The page of a run on paper, of two runs, of damaged records, and served, in a real browser."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sqrtdk.cli.watch_live import LOOPBACK, LivePage, PageServer
from sqrtdk.monitor.folder import RunWriter
from sqrtdk.monitor.reading import read_run
from sqrtdk.report.plain import plain
from sqrtdk.report.watch.compare import compare_runs
from sqrtdk.report.watch.html import to_html
from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN
from sqrtdk.report.watch.summary import summarise
from tests.monitor.watched_runs import EVIL, alarms_of, head_row, step_row
from tests.report.watch_pages import pixel
from tests.support.pages import settle
from tests.support.playwright_here import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.full]

Opener = Callable[..., Page]


def test_on_paper_all_maps_are_there_and_light(show_runs: Opener) -> None:
    page = show_runs("unscaled", scheme="dark")
    page.emulate_media(media="print")
    page.wait_for_function(f"document.querySelectorAll('#maps figure > canvas').length === {len(STATISTIC_BY_COLUMN)}")
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--card').trim()") == "#ffffff"
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    assert all(controls.is_hidden() for controls in page.locator(".controls").all())


def test_on_paper_tables_are_whole_and_notes_unfolded(show_runs: Opener) -> None:
    page = show_runs("healthy", "sick", width=700)
    page.evaluate(
        """const fold = document.createElement("details");
        fold.id = "folded";
        document.querySelector("#alarms").append(fold)"""
    )
    page.emulate_media(media="print")
    page.locator("#folded[open]").wait_for(state="attached")
    for table in page.locator(".wide").all():
        assert table.evaluate("(box) => box.scrollWidth <= box.clientWidth")
    page.emulate_media(media="screen")
    page.locator("#folded:not([open])").wait_for(state="attached")


def test_nothing_of_the_page_itself_is_left_in_english(show_runs: Opener, runs: dict[str, Path]) -> None:
    """But for names of the model, texts of alarms and sources, which are as they were recorded, and terms."""
    page = show_runs("healthy", "unscaled", language="zh")
    page.evaluate(
        "for (const one of document.querySelectorAll('[lang=en], code, h1, h3, figcaption > b')) one.remove()"
    )
    text = page.locator("body").inner_text()
    labels = page.evaluate(
        "[...document.querySelectorAll('[aria-label]')].map((one) => one.getAttribute('aria-label')).join(' ')"
    )
    words = set(re.findall(r"[A-Za-z]{3,}", text + labels))
    terms = {
        "sqrtdk", "English", "logit", "nat", "NaN", "std", "log", "softmax", "Frobenius", "diag", "sqrt", "blocks",
        "float", "Decoder", "bfloat",
    }  # fmt: skip
    papers = {"Vaswani", "Xiao", "Kimi"}
    code = {"scaled", "False", "tests", "monitor", "watched"}  # the attribute and the file of a wrong scale
    folders = f"{runs['healthy']} {runs['unscaled']} {page.url}"
    names = papers | code | set(re.findall(r"[A-Za-z]+", folders))
    assert words - terms - names == set()


def test_two_runs_have_the_same_scales(show_runs: Opener) -> None:
    page = show_runs("healthy", "unscaled")
    assert page.locator(".panel").count() == 2
    healthy, unscaled = (pixel(page, 0.97, 0.2, panel) for panel in (0, 1))
    assert unscaled[1] > healthy[1]  # viridis grows greener
    axes = [panel.locator("svg").nth(0).locator("text").all_text_contents() for panel in page.locator(".panel").all()]
    assert axes[0] == axes[1]
    assert page.locator("#differences tbody tr").count() == len(STATISTIC_BY_COLUMN)
    assert "2 / 2" in page.locator("#differences tbody tr").first.inner_text()


def test_runs_of_other_names_are_matched_in_order(show_runs: Opener, runs: dict[str, Path], tmp_path: Path) -> None:
    page = show_runs("healthy")
    a, b = (summarise(read_run(runs[name])) for name in ("healthy", "unscaled"))
    b = dataclasses.replace(b, sites=tuple(dataclasses.replace(one, site=f"other.{one.site}") for one in b.sites))
    (tmp_path / "order.html").write_text(to_html([a, b], compare_runs(a, b)), encoding="utf-8")
    page.goto((tmp_path / "order.html").as_uri() + "#en")
    assert "stands beside the first of B" in page.locator("#differences").inner_text()
    for site in ("blocks.1.1", "other.blocks.1.1"):
        page.select_option("#site", site)
        assert page.locator(".panel .line-head").count() == 2
        titles = [panel.locator("svg .title").last.inner_html() for panel in page.locator(".panel").all()]
        assert ["blocks.1.1" in titles[0], "other.blocks.1.1" in titles[1]] == [True, True]
        assert page.locator(".drawing div svg .title").all_text_contents() == ["blocks.1.1", "other.blocks.1.1"]


def test_what_is_missing_is_said_and_drawn(show_runs: Opener) -> None:
    page = show_runs("sick")
    text = page.locator("#missing").inner_text()
    for words in ("31 to 40", "51 to 60", "no attention ran", "steps without a loss"):
        assert words in text
    assert page.locator(".panel .gap").count() == 4  # a gap and a damaged part, above and below the map
    assert page.locator(".panel .lost").count() == 6  # losses of NaN
    assert page.locator(".tile.bad").count() == 1
    measured, absent = pixel(page, 0.9, 0.2), pixel(page, 0.9, 0.9)  # step 45 of the first and of the last site
    assert measured != absent
    assert pixel(page, 0.99, 0.2) == absent  # step 50 was not measured
    assert pixel(page, 0.7, 0.2) == pixel(page, 0.7, 0.9) != measured  # never recorded
    assert (page.locator(".panel .line-head").get_attribute("d") or "").count("M") == 2
    page.select_option("#statistic", "query_grad_max")
    assert "not measured" in page.locator("#legend").inner_text()


def test_hostile_texts_are_shown_and_run_nothing(show_runs: Opener) -> None:
    page = show_runs("sick")
    assert "owned" not in page.title()
    shown = plain(EVIL)
    for place in ("#alarms", "#newest", "#missing", "#run"):
        assert shown in page.locator(place).inner_text(), place
    page.select_option("#site", shown)
    assert page.evaluate("document.querySelectorAll('script').length") == 2


def test_the_language_reaches_what_is_drawn(show_runs: Opener) -> None:
    page = show_runs("unscaled")
    page.locator("button", has_text="中文").click()
    assert page.locator("#time h2 .zh").is_visible()
    assert "损失" in "".join(page.locator(".panel svg text").all_text_contents())
    assert "最大 logit" in page.locator("#legend").inner_text()


def test_a_served_page_loads_itself_again_and_stays_as_it_was_left(browser: Browser, tmp_path: Path) -> None:
    """While a part lands, when the writer ends, and when the server does."""
    page = browser.new_page(viewport={"width": 390, "height": 800})
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    with RunWriter(tmp_path, model={}, settings={}) as writer:
        writer.write([head_row(10, "h", 0)], [step_row(step, 0) for step in range(1, 11)], alarms_of(1))
        with PageServer((LOOPBACK, 0), LivePage(tmp_path, "en")) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            page.goto(f"http://{LOOPBACK}:{server.server_address[1]}/#en")
            page.locator("#live span[data-writer=writing]").wait_for(state="visible")
            page.select_option("#statistic", "peak")
            page.evaluate("window.scrollTo({ top: 900, behavior: 'instant' })")
            writer.write([head_row(20, "h", 0)], [step_row(step, 0) for step in range(11, 21)], [])
            page.locator(".tile", has_text="(1–20)").wait_for()
            page.locator("html[data-drawn=yes]").wait_for(state="attached")
            settle(page)
            assert page.locator("#statistic").input_value() == "peak"
            assert abs(page.evaluate("window.scrollY") - 900) < 200  # what stands above may have grown by a line
            writer.close()
            page.locator("#live span[data-writer=ended]").wait_for(state="visible")
            assert page.locator("#live").inner_text() == "The writer has ended at step 20."
            server.shutdown()
    page.locator("#live span[data-writer=gone]").wait_for(state="visible")
    page.close()
    assert not complaints
