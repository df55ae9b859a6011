"""The page in a real browser, opened from disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sqrtdk.audit.records import CheckReport
from sqrtdk.report.html import to_html
from sqrtdk.report.plain import plain
from tests.report.sample_report import EVIL, healthy, hostile, lawless, sick
from tests.support.playwright_here import Page

pytestmark = [pytest.mark.browser, pytest.mark.full]

Opener = Callable[..., Page]


@pytest.fixture
def show(opened: Opener, tmp_path: Path) -> Opener:
    """Open a report's page."""

    def open_report(report: CheckReport, width: int = 1280, scheme: str = "light") -> Page:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.html"
        path.write_text(to_html(report), encoding="utf-8")
        return opened(path, width=width, scheme=scheme)

    return open_report


def _unfold(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.evaluate("document.querySelectorAll('.opens').forEach(button => button.click())")


def _fills(page: Page) -> list[str | None]:
    fills: list[str | None] = page.evaluate("[...document.querySelectorAll('.cell')].map(c => c.getAttribute('fill'))")
    return fills


def test_every_head_has_a_cell(show: Opener) -> None:
    page = show(sick())
    heads = sum(judged.call.heads for judged in sick().calls if judged.call.stats)
    assert page.locator("#maps .cell").count() == heads
    assert page.locator("#maps .cell.nothing").count() == 1
    assert len(set(_fills(page))) > 10


def test_another_statistic_paints_another_map(show: Opener) -> None:
    page = show(healthy(4, 6))
    before, legend = _fills(page), page.locator("#legend").inner_text()
    page.select_option("#statistic", "entropy_nats")
    assert _fills(page) != before
    assert page.locator("#legend").inner_text() != legend
    assert "entropy of a row" in page.locator("#help").inner_text()
    label = page.locator("#maps .cell").first.get_attribute("aria-label")
    assert label is not None
    assert label.startswith("model.layers.0.self_attn, head 0: Entropy")
    by_value = _fills(page)
    page.select_option("#spread", "rank")
    assert _fills(page) != by_value


def test_every_statistic_can_be_painted(show: Opener) -> None:
    page = show(sick())
    for key in page.evaluate("[...document.getElementById('statistic').options].map(o => o.value)"):
        page.select_option("#statistic", key)
        assert "NaN" not in page.locator("#legend").inner_text()
        assert not any("NaN" in (fill or "") for fill in _fills(page))


def test_it_opens_with_the_worst_head_and_a_click_shows_another(show: Opener) -> None:
    page = show(healthy(3, 4))
    view = page.locator("#head-view")
    stats = [judged.call.stats for judged in healthy(3, 4).calls]
    worst = max((value, layer, head) for layer, s in enumerate(stats) if s for head, value in enumerate(s.max_logit))
    assert view.locator("h3").inner_text() == f"model.layers.{worst[1]}.self_attn · head {worst[2]}"
    page.locator("#maps .cell").nth(5).click()
    assert view.locator("h3").inner_text() == "model.layers.1.self_attn · head 1"
    assert view.locator(".chart").count() == 2
    assert view.locator(".chart .bin").count() > 30
    assert view.locator(".chart path.normal").count() == 2  # the curve and its key
    assert view.locator("line.expected").count() == 2
    assert page.locator(".ring.chosen").count() == 2  # a dark line in a bright one
    assert "NaN" not in view.locator(".charts").inner_html()


def test_a_head_of_nan_says_so(show: Opener) -> None:
    page = show(sick())
    page.locator("#maps .cell.nothing").click()
    view = page.locator("#head-view")
    assert view.locator("h3").inner_text() == "decoder.h.4.attn · head 5"
    assert view.locator(".empty").count() == 2
    assert "512 rows" in view.inner_text()


def test_the_keyboard_does_it_all(show: Opener) -> None:
    page = show(healthy(3, 4))
    page.locator("#maps .cell").nth(0).click()
    page.locator("#spread").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.locator("#tip").is_visible()
    page.keyboard.press("Enter")
    assert page.locator("#head-view h3").inner_text() == "model.layers.2.self_attn · head 1"
    page.locator(".opens").first.focus()
    page.keyboard.press("Enter")
    assert page.locator(".opens[aria-expanded='true']").count() == 1
    assert page.locator(".inside").is_visible()


def test_a_tooltip_names_the_head(show: Opener) -> None:
    page = show(healthy(3, 4))
    assert page.locator("#tip").is_hidden()
    page.locator("#maps .cell").nth(6).hover()
    assert page.locator("#tip").inner_text().startswith("model.layers.1.self_attn, head 2: Max logit")


@pytest.mark.parametrize("width", [390, 320])
def test_the_name_of_a_rule_stays_whole(show: Opener, width: int) -> None:
    page = show(sick(), width=width)
    _unfold(page)
    names = page.locator(".c-rule code")
    assert names.count() > 3
    assert [one.inner_text() for one in names.all() if one.evaluate("one => one.getClientRects().length") > 1] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("report", [lawless, hostile])
def test_the_laws_fit(show: Opener, report: Callable[[], CheckReport], width: int) -> None:
    """Every square of a picture is seen, filled or empty, at any width."""
    page = show(report(), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.locator("#laws rect").evaluate_all(
        "all => all.map(one => [one.className.baseVal, one.getBoundingClientRect().right, getComputedStyle(one).fill])"
    )
    assert len(boxes) == sum(min(len(answer.moved), 64) for answer in report().laws)
    assert max(right for _, right, _ in boxes) <= width
    assert all((fill == "none") is (kind == "still") for kind, _, fill in boxes)


@pytest.mark.parametrize("width", [390, 1400])
def test_layers_that_a_box_cuts_off_are_seen_to_be(show: Opener, width: int) -> None:
    page = show(healthy(40), width)
    _unfold(page)
    box, line = page.locator(".scroll:has(.members)"), page.locator(".scroll:has(.members) + .below")
    rows = box.locator("tbody tr")
    assert rows.count() == 40
    page.wait_for_selector(".scroll.cut-bottom + .below", state="visible")
    bottom = box.evaluate("box => box.getBoundingClientRect().bottom")
    below = rows.evaluate_all(f"rows => rows.filter(row => row.getBoundingClientRect().bottom > {bottom} + 1).length")
    assert line.inner_text() == f"↓ {below} more"
    box.evaluate("box => box.scrollTo(0, box.scrollHeight)")
    page.wait_for_selector(".scroll:not(.cut-bottom):has(.members) + .below", state="hidden")


def test_hostile_texts_are_shown_and_run_nothing(show: Opener) -> None:
    page = show(hostile())
    assert page.title().endswith("sqrtdk check")
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    shown = plain(EVIL)
    _unfold(page)
    page.locator("#maps .cell").nth(1).click()
    assert shown in page.locator("h1").inner_text()
    for place in ("#findings", "#sites", "#head-view", "#aside", "#run"):
        assert shown in page.locator(place).inner_text(), place
    title = page.locator("#maps h3").inner_text()  # its integers are starred
    assert "<script>document.title='owned'</script></script>" in title
    assert r"\u202e" in title


def test_five_thousand_heads_stay_usable(show: Opener) -> None:
    page = show(healthy(80, 64))
    assert page.locator("#maps .cell").count() == 5120
    page.select_option("#statistic", "peak")
    page.locator("#maps .cell").nth(5119).click()
    assert page.locator("#head-view h3").inner_text() == "model.layers.79.self_attn · head 63"
