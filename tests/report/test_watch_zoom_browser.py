"""Several runs over one another on a page in a real browser, smoothing, and the zoom that all drawings share."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sqrtdk.cli.watch_live import LOOPBACK, LivePage, PageServer
from sqrtdk.monitor.folder import RunWriter
from sqrtdk.monitor.reading import read_run
from sqrtdk.report.watch.html import to_html
from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN
from sqrtdk.report.watch.summary import summarise
from tests.monitor.watched_runs import STEPS, head_row, step_row
from tests.support.pages import settle
from tests.support.playwright_here import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.full]

Opener = Callable[..., Page]


@pytest.fixture
def show(opened: Opener, runs: dict[str, Path], tmp_path: Path) -> Opener:
    def open_runs(*names: str, width: int = 1280, language: str = "en") -> Page:
        path = tmp_path / "page.html"
        path.write_text(to_html([summarise(read_run(runs[name])) for name in names]), encoding="utf-8")
        return opened(path, f"#{language}", width=width)

    return open_runs


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """TensorBoard's line chart, `resmoothDataset`."""
    last, count, found = 0.0, 0, []
    for value in values:
        if not math.isfinite(value):
            found.append(value)
            continue
        last, count = last * weight + (1 - weight) * value, count + 1
        found.append(last / (1 - weight**count))
    return found


def points(page: Page, line: str) -> list[tuple[float, float]]:
    path = page.locator(line).get_attribute("d") or ""
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


def steps_shown(page: Page) -> list[int]:
    return [int(page.locator(name).input_value()) for name in ("#from", "#to")]


def drag(page: Page, place: str, start: float, end: float) -> None:
    """From one share of the width of a drawing to another."""
    page.locator(place).scroll_into_view_if_needed()
    box = page.locator(place).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + start * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + (start + end) / 2 * box["width"], box["y"] + 60)
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 60)
    page.mouse.up()


def set_smoothing(page: Page, weight: float) -> None:
    page.locator("#smooth").evaluate(
        "(slider, weight) => { slider.value = weight; slider.dispatchEvent(new Event('input')); }", weight
    )
    settle(page)


@pytest.mark.parametrize("weight", [0.0, 0.6, 0.99])
def test_smoothing_is_that_of_tensorboard(show: Opener, weight: float) -> None:
    page = show("healthy")
    values: list[Any] = [3.0, 1.0, 4.0, None, 1.0, 5.0, 9.0]
    numbers = [math.nan if value is None else value for value in values]
    found = page.evaluate(
        "([values, weight]) => viewing.smoothed(values.map((one) => one ?? NaN), weight)", [values, weight]
    )
    assert found == pytest.approx(smoothed(numbers, weight), nan_ok=True)


def test_the_slider_smooths_every_line_and_leaves_the_raw_one_behind_it(show: Opener, runs: dict[str, Path]) -> None:
    page = show("unscaled")
    raw = points(page, ".panel .line-loss")
    assert page.locator(".raw").count() == 0
    set_smoothing(page, 0.8)
    assert points(page, ".panel .raw.of-loss") == raw
    losses = smoothed(summarise(read_run(runs["unscaled"])).losses.tolist(), 0.8)
    smooth = points(page, ".panel .line-loss")
    low, high = raw.index(max(raw, key=lambda one: one[1])), raw.index(min(raw, key=lambda one: one[1]))
    values = summarise(read_run(runs["unscaled"])).losses
    pixels = (raw[low][1] - raw[high][1]) / (values[high] - values[low])
    expected = [raw[high][1] + (values[high] - loss) * pixels for loss in losses]
    assert [y for _, y in smooth] == pytest.approx(expected, abs=0.2)
    assert page.locator("#weight").inner_text() == "0.80"
    assert page.locator(".panel .raw.of-head").count() == 1


def test_every_run_is_a_line_and_its_name_hides_it_everywhere(show: Opener) -> None:
    page = show("healthy", "unscaled", "sick")
    lines = page.locator("#overlay > .drawing svg").first.locator("path.line-run")
    assert lines.count() == 3
    colours = {line.evaluate("(line) => getComputedStyle(line).stroke") for line in lines.all()}
    assert len(colours) == 3
    assert "not in this run" in page.locator("#overlay .runs li").nth(2).inner_text()
    assert page.locator("#maps figure").count() == len(STATISTIC_BY_COLUMN)
    page.wait_for_function("document.querySelectorAll('#maps figure path.line-run').length > 60")
    highest = page.locator("#overlay > .drawing svg").nth(2).locator("text").all_text_contents()
    button = page.locator("#overlay .runs button").nth(1)
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert lines.count() == 2
    assert page.locator(".panel:visible").count() == 2
    assert page.locator("#overlay > .drawing svg").nth(2).locator("text").all_text_contents() != highest, (
        "its own scale"
    )
    page.keyboard.press("Enter")
    assert lines.count() == 3
    assert page.locator(".panel:visible").count() == 3


def test_a_step_is_the_same_place_in_all_runs_and_has_the_values_of_all(show: Opener, runs: dict[str, Path]) -> None:
    page = show("healthy", "unscaled")
    place = page.locator("#overlay > .drawing")
    place.focus()
    page.keyboard.press("Home")
    told = page.locator("#overlay .told").inner_text()
    assert told.startswith("step 1 · Loss: A ")
    for name, letter in (("healthy", "A"), ("unscaled", "B")):
        assert f"{letter} {summarise(read_run(runs[name])).losses[0]:.4g}" in told
    page.keyboard.press("ArrowRight")
    assert page.locator("#overlay .told").inner_text().startswith("step 2 · ")
    box = place.bounding_box()
    assert box is not None
    place.hover(position={"x": box["width"] / 2, "y": 60})  # wherever the page was scrolled to
    rows = page.locator("#tip .row").all_inner_texts()
    assert [row.split()[0] for row in rows[1:]] == ["A", "B"]
    place.hover(position={"x": box["width"] / 2, "y": 300})
    assert "Max logit" in page.locator("#tip .row").first.inner_text()
    first = [points(page, f"#overlay .drawing > svg:first-child [data-run='{run}']")[0][0] for run in (0, 1)]
    assert first[0] == first[1]


def test_a_drag_enlarges_the_same_steps_in_every_drawing(show: Opener) -> None:
    page = show("healthy", "unscaled")
    assert page.locator("#whole").is_disabled()
    whole = points(page, ".panel[data-run='0'] .line-loss")
    drag(page, "#overlay > .drawing", 0.4, 0.7)
    low, high = steps_shown(page)
    assert 10 < low < 25 < high < 40
    ticks = page.locator("#time .drawing text[text-anchor=middle]").all_text_contents()
    assert len(ticks) > 8
    assert all(low <= int(tick) <= high for tick in ticks)
    assert points(page, ".panel[data-run='0'] .line-loss") != whole
    page.locator("#overlay > .drawing").dblclick(position={"x": 300, "y": 60})
    assert steps_shown(page) == [1, STEPS]
    assert points(page, ".panel[data-run='0'] .line-loss") == whole
    page.select_option("#site", "blocks.0.1")
    drag(page, ".panel[data-run='1'] .drawing", 0.5, 0.9)
    assert steps_shown(page) != [1, STEPS]
    assert page.locator("#site").input_value() == "blocks.0.1", "a drag chooses nothing"
    page.locator("#whole").click()
    assert steps_shown(page) == [1, STEPS]


def test_keys_and_fields_enlarge_too(show: Opener) -> None:
    page = show("unscaled")
    page.locator(".drawing").focus()
    page.keyboard.press("+")
    low, high = steps_shown(page)
    assert high - low < STEPS / 1.8
    page.keyboard.press("Home")
    assert steps_shown(page)[0] == 1, "an arrow key brings its step into view"
    page.keyboard.press("0")
    assert steps_shown(page) == [1, STEPS]
    page.fill("#from", "20")
    page.locator("#from").press("Tab")
    page.fill("#to", "9000")
    page.locator("#to").press("Tab")
    assert steps_shown(page) == [20, STEPS]
    inside = [x for x, _ in points(page, ".panel .line-head")]
    box = page.locator(".panel .drawing svg svg").first
    left, width = (float(box.get_attribute(name) or "nan") for name in ("x", "width"))
    assert sum(left <= x <= left + width for x in inside) < len(inside)
    page.locator("button.show", has_text="step 8").first.click()  # an alarm before these steps
    assert steps_shown(page)[0] <= 8


def test_a_map_shows_the_samples_of_the_steps_alone(show: Opener, runs: dict[str, Path]) -> None:
    """The colour of each sample is that of the whole map."""
    page = show("unscaled")
    colour = """(canvas, at) => {
        const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
        pen.drawImage(canvas, -canvas.width * at, -canvas.height * 0.2);
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
    }"""
    whole = [page.locator(".panel canvas").evaluate(colour, share) for share in (0.01, 0.98)]
    page.fill("#from", str(STEPS - 1))
    page.locator("#from").press("Tab")
    assert [page.locator(".panel canvas").evaluate(colour, share) for share in (0.05, 0.95)] == [whole[1]] * 2
    page.fill("#to", "2")
    page.locator("#to").press("Tab")
    assert steps_shown(page) == [2, STEPS - 1]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_nothing_scrolls_sideways_on_a_telephone(show: Opener, language: str) -> None:
    page = show("healthy", "unscaled", "sick", width=390, language=language)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    settle(page)
    wide = page.evaluate(
        "[...document.querySelectorAll('*')].filter((one) => one.scrollWidth > one.clientWidth + 1"
        " && ['auto', 'scroll'].includes(getComputedStyle(one).overflowX)).map((one) => one.className)"
    )
    assert wide == []
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_served_page_keeps_its_smoothing_and_zoom(browser: Browser, tmp_path: Path) -> None:
    page = browser.new_page()
    with RunWriter(tmp_path, model={}, settings={}) as writer:
        writer.write([head_row(10, "h", 0)], [step_row(step, 0) for step in range(1, 11)], [])
        with PageServer((LOOPBACK, 0), LivePage(tmp_path, "en")) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            page.goto(f"http://{LOOPBACK}:{server.server_address[1]}/#en")
            settle(page)
            set_smoothing(page, 0.5)
            page.fill("#from", "4")
            page.locator("#from").press("Tab")
            writer.write([head_row(20, "h", 0)], [step_row(step, 0) for step in range(11, 21)], [])
            page.locator(".tile", has_text="(1–20)").wait_for()
            page.wait_for_function("document.getElementById('weight').textContent === '0.50'")
            assert steps_shown(page) == [4, 20], "the end goes on with the run"
            server.shutdown()
    page.close()
