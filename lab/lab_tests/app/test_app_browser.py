"""The explorer in a real browser. The fixture `visit` fails on an error of the console and on a request that leaves."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from sqrtdk.messages import word
from sqrtdk_lab.app.figures import EXPLORER_FIGURES
from sqrtdk_lab.app.settings import CONTROLS
from tests.report.contrast import LEAST, contrasts
from tests.support.playwright_here import Locator, Page, expect

pytestmark = pytest.mark.browser

Visitor = Callable[..., Page]
MOVED = {  # a value for each control, and a figure that it moves
    "d_k": ("100", "logits"),
    "keys": ("64", "weights"),
    "components": ("Laplace", "logits"),
    "query_variance": ("4", "entropy"),
    "key_variance": ("0.5", "peak"),  # not 0.25: times 4 that is the variance before both
    "rule": ("1 / (2 √d_k)", "jacobian"),
    "overlay": ("nothing", "peak"),
    "temperature": ("0.7", "gradient"),  # and not 0.5, which gives back the scale before the rule
    "softcap": ("5", "logits"),
    "dtype": ("bfloat16", "weights"),
    "seed": ("1", "gradient"),
}


def _input(page: Page, name: str) -> Locator:
    """The field of a control, where a slider's value stands as well."""
    return page.locator(f"#control-{name} input:not([type=range])")


def choose(page: Page, name: str, value: str) -> None:
    """Type a value, or take it from the list where none can be typed."""
    field = _input(page, name)
    if CONTROLS[name].low is None:
        field.click()
        page.get_by_role("option", name=value, exact=True).click()
    else:
        field.fill(value)
        field.press("Enter")


def drawing(page: Page, figure: str) -> str:
    return page.locator(f"#slot-{figure} svg").inner_html()


def moved(page: Page, figure: str, before: str) -> None:
    page.wait_for_function(
        "([slot, before]) => { const svg = document.querySelector(slot); return svg && svg.innerHTML !== before; }",
        arg=[f"#slot-{figure} svg", before],
    )


def notice(page: Page, place: str) -> str:
    message = page.locator(f"#{place} .notice")
    message.wait_for()
    return message.inner_text()


@pytest.mark.full
def test_settings_live_in_the_address(visit: Visitor) -> None:
    """A reload keeps them, the other language takes them along, and both languages are whole."""
    page = visit("/en/?d_k=128&rule=fixed&parameter=0.5")
    assert [_input(page, name).input_value() for name in ("d_k", "parameter")] == ["128", "0.5"]
    assert page.evaluate("document.documentElement.lang") == "en"
    expect(page.locator("#figures svg")).to_have_count(len(EXPLORER_FIGURES))
    before = drawing(page, "logits")
    choose(page, "temperature", "2")
    moved(page, "logits", before)
    page.wait_for_function("location.search.includes('temperature=2')")
    page.reload(wait_until="domcontentloaded")
    page.wait_for_selector("#ranges table")
    assert [_input(page, name).input_value() for name in ("d_k", "temperature")] == ["128", "2"]
    page.wait_for_function("document.querySelector('a.language').search.includes('temperature=2')")
    page.locator("a.language").click()
    page.wait_for_url("**/zh/**")
    page.wait_for_selector("#ranges table")
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    assert [_input(page, name).input_value() for name in ("d_k", "temperature")] == ["128", "2"]
    told = page.locator("body").inner_text()
    for key in ("page.lead", "figure.gradient", "caption.weights", "control.keys", "parameter.fixed", "row.peak"):
        assert word(f"app.{key}", "zh") in told
    assert not re.search(r"\b(measured|weights|scale|Head|rows)\b", told)


@pytest.mark.full
def test_malformed_values_give_one_message(visit: Visitor) -> None:
    page = visit("/en/?keys=none&rule=__class__")
    assert "address was not understood" in notice(page, "note")
    assert _input(page, "keys").input_value() == "256"
    for value in ("abc", "<img src=x onerror=alert(1)>", "9" * 5000):
        choose(page, "d_k", value)
        page.wait_for_function(
            "got => new RegExp(`got .?${got}`).test(document.querySelector('#message .notice')?.innerText)",
            arg=re.escape(value[:12]),  # the whole sentence has a 0 of its own: "from 1 to 1024"
        )
        expect(page.locator("#message .notice")).to_contain_text("a whole number from 1 to 1024 is wanted")
        expect(page.locator("#figures svg")).to_have_count(0)
    choose(page, "d_k", "32")
    page.wait_for_selector("#slot-logits svg")
    expect(page.locator("#message .notice")).to_have_count(0)


@pytest.mark.full
def test_two_users_see_their_own(visit: Visitor) -> None:
    one, other = visit("/en/?seed=7", ready=False), visit("/zh/?seed=7&rule=none", ready=False)
    for page in (one, other):
        page.wait_for_selector("#ranges table")
    assert drawing(one, "logits") != drawing(other, "logits")
    ratios = [page.locator("#numbers tbody tr").nth(1).locator("td").first.inner_text() for page in (one, other)]
    assert ratios == ["1.000", "8.000"]
    kept = drawing(one, "logits")
    before = drawing(other, "logits")
    choose(other, "d_k", "16")
    moved(other, "logits", before)
    assert drawing(one, "logits") == kept


def test_the_page_opens_no_file(visit: Visitor) -> None:
    page = visit(ready=False)
    expect(page.get_by_role("tab")).to_have_text(["Explore", "Claims"])
    assert page.locator("input[type=file]").count() == 0


@pytest.mark.slow
def test_a_claim_is_described_and_measured(visit: Visitor) -> None:
    page = visit("/zh/", ready=False)
    page.get_by_role("tab", name="说法").click()
    first = page.locator("#claim-shown").inner_text()
    page.locator("#claim input").click()
    page.get_by_role("option", name=re.compile("^v-scaling ·")).click()
    page.wait_for_function("before => document.querySelector('#claim-shown').innerText !== before", arg=first)
    expect(page.locator("#claim-shown math")).to_have_count(1)
    page.locator("#claim-run").click()
    expect(page.locator("#claim-shown .result b")).to_have_text("成立")
    expect(page.locator("#claim-shown .result span")).to_have_text("v-scaling")


@pytest.mark.slow
def test_every_control_moves_its_figure(visit: Visitor) -> None:
    page = visit()
    assert {*MOVED, "parameter"} == {*CONTROLS}
    for name, (value, figure) in MOVED.items():
        before = drawing(page, figure)
        choose(page, name, value)
        moved(page, figure, before)
        page.wait_for_function("name => location.search.includes(name + '=')", arg=name)
    before = drawing(page, "logits")
    choose(page, "rule", "a fixed number")
    moved(page, "logits", before)
    page.wait_for_function("location.search.includes('rule=fixed')")
    before = drawing(page, "logits")
    choose(page, "parameter", "0.7")
    moved(page, "logits", before)


@pytest.mark.full
def test_a_slider_moves_by_the_keyboard(visit: Visitor) -> None:
    """A step of d_k is a factor of two; the field beside it says the value, and so does what a screen reader reads."""
    page = visit()
    slider = page.get_by_role("slider", name=word("app.control.d_k", "en"), exact=True)
    before = drawing(page, "entropy")
    slider.focus()
    slider.press("ArrowRight")
    assert _input(page, "d_k").input_value() == slider.get_attribute("aria-valuetext") == "128"
    moved(page, "entropy", before)
    page.wait_for_function("location.search.includes('d_k=128')")
    assert len(page.get_by_role("slider").all()) == sum(one.low is not None for one in CONTROLS.values()) - 1


@pytest.mark.full
def test_each_entry_of_a_legend_has_a_line_of_its_own(visit: Visitor) -> None:
    page = visit()
    expect(page.locator("#figures svg")).to_have_count(len(EXPLORER_FIGURES))
    tops = "all => all.map(list => [...list.children].map(one => one.getBoundingClientRect().top))"
    for lines in page.locator(".legend").evaluate_all(tops):
        assert len({*lines}) == len(lines) > 1


@pytest.mark.full
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_narrow_screen_begins_with_a_figure(visit: Visitor, language: str) -> None:
    """The controls stand closed above it; by the side of the figures, where there is room, they are always open."""
    page = visit(f"/{language}/", width=390)
    summary, field = page.locator("#controls summary"), _input(page, "d_k")
    assert summary.inner_text() == word("app.page.controls", language)
    assert not field.is_visible()
    box = page.locator(".plot").first.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 700
    summary.press("Enter")
    expect(field).to_be_visible()
    before = drawing(page, "logits")
    choose(page, "d_k", "100")
    moved(page, "logits", before)
    expect(field).to_be_visible()
    for width, closed in ((767, True), (768, False)):
        page.set_viewport_size({"width": width, "height": 900})
        expect(summary).to_be_visible(visible=closed)
    assert page.locator("#controls").evaluate("one => one.getBoundingClientRect().right") < 400
    summary.evaluate("one => one.click()")  # what is closed on a narrow screen is there on a wide one
    expect(field).to_be_visible()


@pytest.mark.full
def test_what_a_control_does_is_seen_at_once(visit: Visitor) -> None:
    """On a wide screen the numbers stand above the figures, and the controls stay where they are on the screen."""
    page = visit()
    expect(page.locator("#figures svg")).to_have_count(len(EXPLORER_FIGURES))
    numbers, figures = (page.locator(place).bounding_box() for place in ("#numbers table", "#figures"))
    assert numbers is not None
    assert figures is not None
    assert numbers["y"] + numbers["height"] < figures["y"] < 900
    page.evaluate("scrollTo(0, 1000)")
    box = page.locator("#controls").bounding_box()
    assert box is not None
    assert box["y"] == 0
    assert box["height"] <= 900
    before = drawing(page, "entropy")
    choose(page, "keys", "64")  # of a list that is not cut off
    moved(page, "entropy", before)
    assert page.evaluate("scrollY") == 1000


@pytest.mark.full
@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_cell_of_a_table_is_off_a_narrow_screen(visit: Visitor, language: str) -> None:
    page = visit(f"/{language}/?query_variance=1000000&key_variance=1000000&rule=none&dtype=float16", width=390)
    for place in ("#numbers", "#ranges"):
        right = page.locator(f"{place} td").evaluate_all("all => all.map(td => td.getBoundingClientRect().right)")
        assert right
        assert max(right) <= 390
        assert page.locator(f"{place} .wide").evaluate("one => one.scrollWidth <= one.clientWidth")


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_nothing_overflows_and_texts_stand_out(visit: Visitor, language: str, width: int, scheme: str) -> None:
    page = visit(f"/{language}/", width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    told = contrasts(page)
    assert len(told) > 50
    assert [one for one in told if one[0] < LEAST] == []
