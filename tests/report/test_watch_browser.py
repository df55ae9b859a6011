"""The page of a run in a real browser, opened from disk."""

from __future__ import annotations

import dataclasses
import itertools
import math
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
from tests.monitor.watched_runs import EVERY, EVIL, STEPS, alarms_of, head_row, step_row
from tests.support.pages import settle
from tests.support.playwright_here import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.full]

Opener = Callable[..., Page]
KINDS = ("0.SelfAttention", "1.EncDecAttention")


def page_of(runs: dict[str, Path], *names: str) -> str:
    told = [summarise(read_run(runs[name])) for name in names]
    return to_html(told, compare_runs(*told) if len(told) == 2 else None)


@pytest.fixture
def show(opened: Opener, runs: dict[str, Path], tmp_path: Path) -> Opener:
    """Open the page of one run or of two."""

    def open_runs(*names: str, width: int = 1280, scheme: str = "light", language: str = "en") -> Page:
        path = tmp_path / f"{'-'.join(names)}.html"
        path.write_text(page_of(runs, *names), encoding="utf-8")
        return opened(path, f"#{language}", width=width, scheme=scheme)

    return open_runs


def pixel(page: Page, x: float, y: float, panel: int = 0) -> list[int]:
    """Colour of the large map at shares of its width and height."""
    canvas = page.locator(".panel canvas").nth(panel)
    colour: list[int] = canvas.evaluate(
        """(canvas, at) => {
            const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
            pen.drawImage(canvas, -canvas.width * at[0], -canvas.height * at[1]);
            return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
        }""",
        [x, y],
    )
    return colour


def test_loss_alarms_map_and_trend_share_a_time_line(show: Opener) -> None:
    page = show("unscaled")
    assert page.locator(".panel .line-loss").count() == 1
    marked = page.evaluate("[...document.querySelectorAll('.panel .alarm')].flatMap((mark) => mark.alarms).length")
    assert marked == page.locator("#alarms li").count() >= 2
    assert page.locator("#maps figure").count() == len(STATISTIC_BY_COLUMN)
    assert pixel(page, 0.97, 0.2)[1] > 100 > pixel(page, 0.01, 0.2)[1]  # logits grow, and viridis greener with them
    page.locator(".alarm").last.hover()
    assert " at step " in page.locator("#tip").inner_text()
    assert "step" in page.locator(".told").inner_text()


def test_another_statistic_and_another_head_draw_another_trend(show: Opener) -> None:
    page = show("unscaled")
    trend, colour = page.locator(".panel .line-head").get_attribute("d"), pixel(page, 0.97, 0.2)
    page.select_option("#statistic", "entropy_fraction")
    other = page.locator(".panel .line-head").get_attribute("d")
    assert other != trend
    assert pixel(page, 0.97, 0.2) != colour
    assert "%" in page.locator("#legend").inner_text()
    page.select_option("#head", "1")
    assert page.locator(".panel .line-head").get_attribute("d") != other
    for name in STATISTIC_BY_COLUMN:
        page.select_option("#statistic", name)
        assert "NaN" not in page.locator("#panels").inner_html().replace("Rows with NaN", "")
        assert page.locator(".help:visible").count() == 1


def test_a_click_on_a_cell_or_an_alarm_shows_its_head(show: Opener) -> None:
    page = show("unscaled")
    page.select_option("#site", "blocks.0.1")
    page.evaluate("document.getElementById('panels').scrollIntoView({ behavior: 'instant' })")
    box = page.locator(".panel canvas").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.75)
    assert page.locator("#site").input_value() == "blocks.1.1"
    assert page.locator("#head").input_value() in ("0", "1", "2")
    page.select_option("#statistic", "peak")
    page.locator("#alarms li", has_text="has a logit of").first.locator("button").click()
    assert page.locator("#statistic").input_value() == "max_logit"
    assert page.locator(".cursor").get_attribute("visibility") == "visible"


def test_the_keyboard_goes_over_the_map_and_chooses_a_head(show: Opener) -> None:
    page = show("unscaled")
    page.select_option("#site", "blocks.0.1")
    page.locator(".drawing").focus()
    page.keyboard.press("End")
    newest = page.locator(".told").inner_text()
    assert newest.startswith(f"blocks.0.1 · step {STEPS} · head ")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".told").inner_text().startswith(f"blocks.0.1 · step {STEPS - EVERY} · head ")
    page.keyboard.press("ArrowDown")
    told = page.locator(".told").inner_text()
    assert told.startswith(f"blocks.1.1 · step {STEPS - EVERY} · head ")
    assert page.locator(".cell").get_attribute("visibility") == "visible"
    page.keyboard.press("Enter")
    assert page.locator("#site").input_value() == "blocks.1.1"
    assert page.locator("#head").input_value() == told.split("head ")[1].split(":")[0]
    page.keyboard.press("Tab")
    assert page.locator(".cell").get_attribute("visibility") == "hidden"


def test_a_small_map_is_chosen_by_its_name(show: Opener) -> None:
    page = show("unscaled")
    button = page.locator("#maps button", has_text="Effective keys (keys)")
    button.focus()
    page.keyboard.press("Enter")
    assert page.locator("#statistic").input_value() == "effective_keys"
    assert "the worst head has the least value" in page.locator("#legend").inner_text()
    page.wait_for_function(f"document.querySelectorAll('#maps figure > canvas').length === {len(STATISTIC_BY_COLUMN)}")


def test_a_head_has_the_values_of_its_records(show: Opener, runs: dict[str, Path]) -> None:
    page = show("unscaled")
    page.select_option("#site", "blocks.1.1")
    page.select_option("#head", "1")
    site = summarise(read_run(runs["unscaled"])).sites[1]
    for name in ("max_logit", "query_grad_max", "entropy_nats"):
        page.select_option("#statistic", name)
        values = site.values[name][:, list(site.heads).index(1)].tolist()
        path = (page.locator(".panel .line-head").get_attribute("d") or "").replace("M", "L").split("L")[1:]
        heights = [-float(point.split()[1]) for point in path]
        assert len(heights) == len(values)
        apart = max(abs(one - other) for one in heights for other in heights) / 50  # pixels are rounded
        for at in range(len(values) - 1):
            if abs(heights[at + 1] - heights[at]) > apart:
                assert (heights[at + 1] > heights[at]) == (values[at + 1] > values[at]), name


def test_an_alarm_of_another_name_shows_its_statistic(show: Opener) -> None:
    page = show("sick")
    page.locator("button.show", has_text="step 45").click()
    assert page.locator("#statistic").input_value() == "nan_rows"
    assert page.locator("#head").input_value() == "0"


@pytest.mark.parametrize("width", [1280, 400])
def test_short_names_of_attentions_differ(show: Opener, runs: dict[str, Path], tmp_path: Path, width: int) -> None:
    page = show("healthy", width=width)
    run = summarise(read_run(runs["healthy"]))
    names = [f"{side}.block.{at}.layer.{kind}" for side in ("encoder", "decoder") for at in (0, 1) for kind in KINDS]
    sites = tuple(dataclasses.replace(run.sites[0], site=name) for name in names)
    (tmp_path / "t5.html").write_text(to_html([dataclasses.replace(run, sites=sites)]), encoding="utf-8")
    page.goto((tmp_path / "t5.html").as_uri() + "#en")
    shown = page.locator(".drawing div svg text").all_text_contents()
    assert len(set(shown)) == len(names)


def test_an_infinity_is_no_colour_of_the_scale(show: Opener, runs: dict[str, Path], tmp_path: Path) -> None:
    page = show("unscaled")
    assert page.locator(".infinite").is_hidden()
    run = summarise(read_run(runs["unscaled"]))
    for site in run.sites:
        site.values["max_product"][-1] = math.inf
    (tmp_path / "infinite.html").write_text(to_html([run]), encoding="utf-8")
    page.goto((tmp_path / "infinite.html").as_uri() + "#en")
    page.select_option("#statistic", "max_product")
    assert page.locator(".infinite").is_visible()
    colours = {tuple(pixel(page, 0.985 + shift / 1000, 0.2)) for shift in range(10)}
    assert colours >= {(255, 255, 255), (23, 28, 38)}  # chequered
    assert "∞" not in page.locator("#legend").inner_text()


def test_the_ends_of_a_scale_are_the_numbers_of_the_alarms(show: Opener, runs: dict[str, Path], tmp_path: Path) -> None:
    """Not the three digits of the map."""
    page = show("unscaled")
    run = summarise(read_run(runs["unscaled"]))
    run.sites[0].values["max_logit"][-1] = 8192.0
    (tmp_path / "ends.html").write_text(to_html([run]), encoding="utf-8")
    page.goto((tmp_path / "ends.html").as_uri() + "#en")
    assert page.locator("#legend .beyond-above").inner_text() == "above the scale, up to 8192"


def test_one_spike_does_not_flatten_the_colours_and_is_marked_above_them(
    show: Opener, runs: dict[str, Path], tmp_path: Path
) -> None:
    page = show("healthy")
    run = summarise(read_run(runs["healthy"]))
    assert page.locator("#legend [class^=beyond-]").count() == 0
    without = [pixel(page, x, 0.2) for x in (0.02, 0.98)]
    spike = run.samples[5]
    run.sites[0].values["max_logit"][run.sites[0].steps == spike] = 5e4
    run.sites[0].values["min_logit"][run.sites[0].steps == spike] = -5e4
    (tmp_path / "spike.html").write_text(to_html([run]), encoding="utf-8")
    page.goto((tmp_path / "spike.html").as_uri() + "#en")
    page.select_option("#site", "blocks.1.1")
    assert [pixel(page, x, 0.2) for x in (0.02, 0.98)] == without, "all other cells keep their colours"
    assert page.locator("#legend .beyond-above").inner_text() == "above the scale, up to 50000"
    at = (int(spike) - 1) / (STEPS - 1)
    colours = {tuple(pixel(page, at + shift / 2000, 0.2)) for shift in range(-8, 8)}
    assert colours >= {(253, 231, 37), (23, 28, 38)}  # striped: the end of the scale and ink
    page.select_option("#statistic", "min_logit")
    assert page.locator("#legend .beyond-below").inner_text() == "below the scale, down to −50000"
    assert page.locator("#maps .beyond-above").first.get_attribute("title") == "above the scale, up to 50000"


def test_marks_of_alarms_do_not_lie_on_each_other(show: Opener) -> None:
    page = show("unscaled", width=390)
    boxes = [mark.bounding_box() for mark in page.locator(".panel .alarm").all()]
    ends = sorted((box["x"], box["x"] + box["width"]) for box in boxes if box is not None)
    assert len(ends) > 1
    assert all(left > right for (_, right), (left, _) in itertools.pairwise(ends))


@pytest.mark.parametrize("values", [(0.1, 120.0), (4.0, 101.0), (4.0, 20000.0), (60.0, 90.0), (40.0, 54.0)])
def test_names_of_bars_are_not_written_over(
    show: Opener, runs: dict[str, Path], tmp_path: Path, values: tuple[float, float]
) -> None:
    page = show("unscaled")
    run = summarise(read_run(runs["unscaled"]))
    for site in run.sites:
        site.values["max_logit"][:] = values[0]
        site.values["max_logit"][-1] = values[1]
    (tmp_path / "bars.html").write_text(to_html([run]), encoding="utf-8")
    page.goto((tmp_path / "bars.html").as_uri() + "#en")
    trend = page.locator(".panel svg", has=page.locator(".line-head"))
    bases = sorted(float(one.get_attribute("y") or "nan") for one in trend.locator(".bar-name, .title").all())
    lines = [float(one.get_attribute("y1") or "nan") for one in trend.locator(".bar-line").all()]
    spans = [(base - 8, base + 2) for base in bases]  # letters of 11 pixels
    assert all(above[1] < below[0] for above, below in itertools.pairwise(spans))
    assert not [line for line in lines for top, bottom in spans if top < line < bottom]
    assert trend.locator(".bar-name").count() >= min(1, len(lines))


def test_checkpoints_without_a_loss_have_no_axis_of_it(show: Opener, runs: dict[str, Path], tmp_path: Path) -> None:
    page = show("unscaled")
    run = summarise(read_run(runs["unscaled"]))
    settings = {
        "of": "checkpoints",
        "attn": None,
        "seed": 0,
        "trust_remote_code": False,
        "notes": ["random ids", "cut"],
    }
    bare = dataclasses.replace(run, losses=run.losses[:0], loss_steps=run.loss_steps[:0], settings=settings)
    (tmp_path / "bare.html").write_text(to_html([bare]), encoding="utf-8")
    page.goto((tmp_path / "bare.html").as_uri() + "#en")
    above = page.locator(".panel svg").first
    assert above.locator("text").all_text_contents() == ["Loss", "no loss on record", "Alarms"]
    facts = page.locator("#run").inner_text()
    assert "random ids; cut" in facts
    assert not re.search(r"None|False|implementation", facts)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_run_without_a_step_says_so(show: Opener, tmp_path: Path, language: str) -> None:
    page = show("healthy")
    RunWriter(tmp_path / "empty", model={}, settings={}).close()
    (tmp_path / "empty.html").write_text(page_of({"empty": tmp_path / "empty"}, "empty"), encoding="utf-8")
    page.goto(f"{(tmp_path / 'empty.html').as_uri()}#{language}")
    words = {"en": "nothing to draw", "zh": "没有可画的内容"}
    assert words[language] in page.locator("#time").inner_text()
    assert page.locator(".controls, #maps, #newest").locator("visible=true").count() == 0


def test_on_paper_all_maps_are_there_and_light(show: Opener) -> None:
    page = show("unscaled", scheme="dark")
    page.emulate_media(media="print")
    page.wait_for_function(f"document.querySelectorAll('#maps figure > canvas').length === {len(STATISTIC_BY_COLUMN)}")
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--card').trim()") == "#ffffff"
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    assert page.locator(".controls").is_hidden()


def test_on_paper_tables_are_whole_and_notes_unfolded(show: Opener) -> None:
    page = show("healthy", "sick", width=700)
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


def test_nothing_of_the_page_itself_is_left_in_english(show: Opener, runs: dict[str, Path]) -> None:
    """But for names of the model, texts of alarms and sources, which are as they were recorded, and terms."""
    page = show("healthy", "unscaled", language="zh")
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
    folders = f"{runs['healthy']} {runs['unscaled']} {page.url}"
    names = papers | set(re.findall(r"[A-Za-z]+", folders))
    assert words - terms - names == set()


def test_two_runs_have_the_same_scales(show: Opener) -> None:
    page = show("healthy", "unscaled")
    assert page.locator(".panel").count() == 2
    healthy, unscaled = (pixel(page, 0.97, 0.2, panel) for panel in (0, 1))
    assert unscaled[1] > healthy[1]  # viridis grows greener
    axes = [panel.locator("svg").nth(0).locator("text").all_text_contents() for panel in page.locator(".panel").all()]
    assert axes[0] == axes[1]
    assert page.locator("#differences tbody tr").count() == len(STATISTIC_BY_COLUMN)
    assert "2 / 2" in page.locator("#differences tbody tr").first.inner_text()


def test_runs_of_other_names_are_matched_in_order(show: Opener, runs: dict[str, Path], tmp_path: Path) -> None:
    page = show("healthy")
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


def test_what_is_missing_is_said_and_drawn(show: Opener) -> None:
    page = show("sick")
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


def test_hostile_texts_are_shown_and_run_nothing(show: Opener) -> None:
    page = show("sick")
    assert "owned" not in page.title()
    shown = plain(EVIL)
    for place in ("#alarms", "#newest", "#missing", "#run"):
        assert shown in page.locator(place).inner_text(), place
    page.select_option("#site", shown)
    assert page.evaluate("document.querySelectorAll('script').length") == 2


def test_the_language_reaches_what_is_drawn(show: Opener) -> None:
    page = show("unscaled")
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
