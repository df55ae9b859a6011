"""The page of a run in a real browser, opened from disk."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sqrtdk.monitor.folder import RunWriter
from sqrtdk.monitor.reading import read_run
from sqrtdk.report.watch.html import to_html
from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN
from sqrtdk.report.watch.summary import summarise
from tests.monitor.watched_runs import EVERY, STEPS
from tests.report.watch_pages import page_of, pixel
from tests.support.playwright_here import Page

pytestmark = [pytest.mark.browser, pytest.mark.full]

Opener = Callable[..., Page]
KINDS = ("0.SelfAttention", "1.EncDecAttention")


def test_loss_alarms_map_and_trend_share_a_time_line(show_runs: Opener) -> None:
    page = show_runs("unscaled")
    assert page.locator(".panel .line-loss").count() == 1
    marked = page.evaluate("[...document.querySelectorAll('.panel .alarm')].flatMap((mark) => mark.alarms).length")
    assert marked == page.locator("#alarms li").count() >= 2
    assert page.locator("#maps figure").count() == len(STATISTIC_BY_COLUMN)
    assert pixel(page, 0.97, 0.2)[1] > 100 > pixel(page, 0.01, 0.2)[1]  # logits grow, and viridis greener with them
    page.locator(".alarm").last.hover()
    assert " at step " in page.locator("#tip").inner_text()
    assert "step" in page.locator(".told").inner_text()


def test_another_statistic_and_another_head_draw_another_trend(show_runs: Opener) -> None:
    page = show_runs("unscaled")
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


def test_a_click_on_a_cell_or_an_alarm_shows_its_head(show_runs: Opener) -> None:
    page = show_runs("unscaled")
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


def test_the_keyboard_goes_over_the_map_and_chooses_a_head(show_runs: Opener) -> None:
    page = show_runs("unscaled")
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


def test_a_small_map_is_chosen_by_its_name(show_runs: Opener) -> None:
    page = show_runs("unscaled")
    button = page.locator("#maps button", has_text="Effective keys (keys)")
    button.focus()
    page.keyboard.press("Enter")
    assert page.locator("#statistic").input_value() == "effective_keys"
    assert "the worst head has the least value" in page.locator("#legend").inner_text()
    page.wait_for_function(f"document.querySelectorAll('#maps figure > canvas').length === {len(STATISTIC_BY_COLUMN)}")


def test_a_head_has_the_values_of_its_records(show_runs: Opener, runs: dict[str, Path]) -> None:
    page = show_runs("unscaled")
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


def test_an_alarm_of_another_name_shows_its_statistic(show_runs: Opener) -> None:
    page = show_runs("sick")
    page.locator("button.show", has_text="step 45").click()
    assert page.locator("#statistic").input_value() == "nan_rows"
    assert page.locator("#head").input_value() == "0"


@pytest.mark.parametrize("width", [1280, 400])
def test_short_names_of_attentions_differ(show_runs: Opener, runs: dict[str, Path], tmp_path: Path, width: int) -> None:
    page = show_runs("healthy", width=width)
    run = summarise(read_run(runs["healthy"]))
    names = [f"{side}.block.{at}.layer.{kind}" for side in ("encoder", "decoder") for at in (0, 1) for kind in KINDS]
    sites = tuple(dataclasses.replace(run.sites[0], site=name) for name in names)
    (tmp_path / "t5.html").write_text(to_html([dataclasses.replace(run, sites=sites)]), encoding="utf-8")
    page.goto((tmp_path / "t5.html").as_uri() + "#en")
    shown = page.locator(".drawing div svg text").all_text_contents()
    assert len(set(shown)) == len(names)


def test_an_infinity_is_no_colour_of_the_scale(show_runs: Opener, runs: dict[str, Path], tmp_path: Path) -> None:
    page = show_runs("unscaled")
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


def test_the_ends_of_a_scale_are_the_numbers_of_the_alarms(
    show_runs: Opener, runs: dict[str, Path], tmp_path: Path
) -> None:
    """Not the three digits of the map."""
    page = show_runs("unscaled")
    run = summarise(read_run(runs["unscaled"]))
    run.sites[0].values["max_logit"][-1] = 8192.0
    (tmp_path / "ends.html").write_text(to_html([run]), encoding="utf-8")
    page.goto((tmp_path / "ends.html").as_uri() + "#en")
    assert page.locator("#legend .beyond-above").inner_text() == "above the scale, up to 8192"


def test_one_spike_does_not_flatten_the_colours_and_is_marked_above_them(
    show_runs: Opener, runs: dict[str, Path], tmp_path: Path
) -> None:
    page = show_runs("healthy")
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


def test_marks_of_alarms_do_not_lie_on_each_other(show_runs: Opener) -> None:
    page = show_runs("unscaled", width=390)
    boxes = [mark.bounding_box() for mark in page.locator(".panel .alarm").all()]
    ends = sorted((box["x"], box["x"] + box["width"]) for box in boxes if box is not None)
    assert len(ends) > 1
    assert all(left > right for (_, right), (left, _) in itertools.pairwise(ends))


@pytest.mark.parametrize("values", [(0.1, 120.0), (4.0, 101.0), (4.0, 20000.0), (60.0, 90.0), (40.0, 54.0)])
def test_names_of_bars_are_not_written_over(
    show_runs: Opener, runs: dict[str, Path], tmp_path: Path, values: tuple[float, float]
) -> None:
    page = show_runs("unscaled")
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


def test_checkpoints_without_a_loss_have_no_axis_of_it(
    show_runs: Opener, runs: dict[str, Path], tmp_path: Path
) -> None:
    page = show_runs("unscaled")
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
def test_a_run_without_a_step_says_so(show_runs: Opener, tmp_path: Path, language: str) -> None:
    page = show_runs("healthy")
    RunWriter(tmp_path / "empty", model={}, settings={}).close()
    (tmp_path / "empty.html").write_text(page_of({"empty": tmp_path / "empty"}, "empty"), encoding="utf-8")
    page.goto(f"{(tmp_path / 'empty.html').as_uri()}#{language}")
    words = {"en": "nothing to draw", "zh": "没有可画的内容"}
    assert words[language] in page.locator("#time").inner_text()
    assert page.locator(".controls, #maps, #newest").locator("visible=true").count() == 0
