"""The lab's page in a real browser, opened from disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lab_tests.report.sample_lab import hostile, records, undecided, unsound
from sqrtdk.report.plain import plain
from sqrtdk_lab.record import Record
from sqrtdk_lab.report.page import to_html
from tests.report.sample_report import EVIL
from tests.support.playwright_here import Browser, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.full]

Opener = Callable[..., Page]
Drawer = Callable[[Sequence[Record]], Path]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Drawer:
    """The page of some records, drawn once."""
    folder = tmp_path_factory.mktemp("pages")

    def drawn(some: Sequence[Record]) -> Path:
        path = folder / f"{abs(hash(tuple(record.id for record in some)))}.html"
        if not path.exists():
            path.write_text(to_html(some), encoding="utf-8")
        return path

    return drawn


@pytest.fixture
def show(opened: Opener, pages: Drawer) -> Opener:
    """Open the page of records."""

    def open_page(
        some: Sequence[Record] = (), *, width: int = 1280, scheme: str = "light", locale: str = "en-US", place: str = ""
    ) -> Page:
        path = pages(some or everything())
        return opened(path, place, width=width, scheme=scheme, locale=locale, reduced_motion="reduce")

    return open_page


def everything() -> tuple[Record, ...]:
    return (*records(), unsound(records()[0]), undecided(records()[1]))


def _claims(page: Page) -> list[str]:
    """Ids of the claims that are to be seen, which are those of the register's rows."""
    visible = "[...document.querySelectorAll('{}')].filter(e => e.offsetHeight).map(e => e.{})"
    seen: list[str] = page.evaluate(visible.format("article", "id"))
    assert seen == page.evaluate(visible.format("tr[data-claim]", "dataset.claim"))
    assert page.locator("#count").text_content() == str(len(seen))
    return seen


@pytest.mark.parametrize("width", [1280, 390])
def test_every_plot_and_formula_is_to_be_seen(show: Opener, width: int) -> None:
    page = show(width=width)
    page.evaluate("all = (places) => [...document.querySelectorAll(places)]")
    boxes = page.evaluate("all('.plot svg, math').map(e => e.getBoundingClientRect().toJSON())")
    plots = sum(len(record.plots) for record in everything())
    assert len(boxes) == plots + len(everything())
    assert all(box["width"] > 20 and box["height"] > 10 for box in boxes)
    drawn = page.evaluate("""all('.plot svg').map(svg => [...svg.querySelectorAll('path, use, rect')]
        .filter(e => !e.closest('defs') && e.getBBox().width > 0).length)""")
    assert all(count > 20 for count in drawn)


def test_fractions_are_stacked(show: Opener) -> None:
    """The browser knows the elements of MathML: a numerator stands above its denominator."""
    tops = show().evaluate("[...document.querySelector('mfrac').children].map(e => e.getBoundingClientRect().top)")
    assert tops[0] < tops[1]


def test_the_language_changes_both_ways(show: Opener) -> None:
    page = show()
    record = records()[0]
    title = page.locator("article#var-linear h3")
    english = title.inner_text()
    assert english.startswith(record.statement.en[:30])
    assert page.evaluate("document.documentElement.lang") == "en"
    page.get_by_role("button", name="中文").click()
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    assert title.inner_text().startswith(record.statement.zh[:8])
    assert "Register" not in page.locator("main").inner_text()
    assert page.get_by_role("button", name="中文").get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="English").click()
    assert title.inner_text() == english
    assert "说法" not in page.locator("main").inner_text()


LANGUAGES = [
    ("zh-CN", "", "zh-CN"),
    ("zh-TW", "", "zh-CN"),
    ("de-DE", "", "en"),
    ("en-US", "#zh", "zh-CN"),
    ("zh-CN", "#en", "en"),
]


@pytest.mark.parametrize(("locale", "place", "language"), LANGUAGES)
def test_the_readers_language_comes_first(show: Opener, locale: str, place: str, language: str) -> None:
    page = show(locale=locale, place=place)
    assert page.evaluate("document.documentElement.lang") == language


def test_the_language_survives_a_reload(show: Opener) -> None:
    page = show()
    page.get_by_role("button", name="中文").click()
    page.reload()
    assert page.evaluate("document.documentElement.lang") == "zh-CN"


def test_what_is_read_stays_in_place_when_the_language_changes(show: Opener) -> None:
    page = show()
    page.evaluate("document.documentElement.style.overflowAnchor = 'none'")  # not every browser does it by itself
    page.evaluate("document.getElementById('minmax-by-dim').scrollIntoView()")
    where = "document.getElementById('minmax-by-dim').getBoundingClientRect().top"
    before = page.evaluate(where)
    page.evaluate("document.querySelector('[data-language=zh-CN]').click()")
    assert page.evaluate(where) == pytest.approx(before, abs=2)


def test_verdicts_filter(show: Opener) -> None:
    page = show()
    every = _claims(page)
    assert len(every) == len(everything())
    for answer in ("holds", "fails", "partly", "depends", "undecided"):
        page.locator(f"button[data-answer={answer}]").click()
        wanted = {record.id for record in everything() if record.outcome.verdict.answer == answer}
        assert set(_claims(page)) == wanted
    page.locator("button[data-answer='']").click()
    assert _claims(page) == every


def test_words_are_found_in_both_languages(show: Opener) -> None:
    page = show()
    for words, wanted in (
        ("minmax", {"minmax-by-dim"}),
        ("variance d_k", {"var-linear", "var-linear-unsound"}),
        ("方差", {"var-linear", "var-linear-unsound"}),
        ("no such words", set()),
    ):
        page.fill("#search", words)
        found = set(_claims(page))
        assert wanted <= found if wanted else not found
        assert len(found) < len(everything())
        assert page.locator("#none").is_visible() == (not wanted)
    page.fill("#search", "var-linear")
    page.locator("button[data-answer=fails]").click()
    assert _claims(page) == []


def test_a_link_to_a_hidden_claim_shows_it(show: Opener) -> None:
    page = show()
    page.fill("#search", "minmax")
    page.evaluate("location.hash = '#onehot-64'")
    page.wait_for_function("document.getElementById('onehot-64').offsetHeight > 0")
    assert len(_claims(page)) == len(everything())


def test_the_keyboard_reaches_all(show: Opener) -> None:
    page = show()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    page.locator("article#var-linear details summary").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("article#var-linear details[open]")).to_have_count(1)


def test_plots_have_names(show: Opener) -> None:
    page = show()
    assert page.get_by_role("img", name=records()[0].plots[0].caption.en[:20]).count() >= 1
    page.get_by_role("button", name="中文").click()
    assert page.get_by_role("img", name=records()[0].plots[0].caption.zh[:5]).count() >= 1


def test_plots_are_drawn_for_light_and_dark(show: Opener) -> None:
    """Ink and paper swap: text of the plot stands out from what is behind it in both."""
    inks = {}
    for scheme in ("light", "dark"):
        page = show(scheme=scheme)
        inks[scheme] = page.evaluate("""() => {
            const style = (place) => getComputedStyle(document.querySelector(place));
            return [style('.plot svg [fill=currentColor]').fill, style('article').backgroundColor,
                    style('.plot [stroke="var(--c0)"]').stroke];
        }""")
    for one, other in zip(inks["light"], inks["dark"], strict=True):
        assert one != other
    for ink, card, _ in inks.values():
        lights = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, card)]
        assert abs(lights[0] - lights[1]) > 400


def test_without_scripts_it_is_a_plain_english_page(
    browser: Browser, pages: Callable[[Sequence[Record]], Path]
) -> None:
    context = browser.new_context(java_script_enabled=False, locale="zh-CN")
    page = context.new_page()
    page.goto(pages(everything()).as_uri())
    assert page.locator("article#var-linear h3").inner_text().startswith(records()[0].statement.en[:30])
    assert not page.locator(".controls").is_visible()
    assert not page.locator(".languages").is_visible()
    assert all(page.locator("article").nth(i).is_visible() for i in range(len(everything())))
    context.close()


def test_hostile_texts_are_shown_and_run_nothing(show: Opener) -> None:
    page = show((records()[0], hostile()))
    assert page.title() == "sqrtdk lab"
    assert page.evaluate("document.querySelectorAll('script').length") == 1
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    seen = page.locator("article").last.inner_text()
    assert seen.count(plain(EVIL)) >= 10
    assert "<script>document.title='owned'</script>" in (page.locator("article math").last.text_content() or "")


def test_it_can_be_printed(show: Opener) -> None:
    page = show(scheme="dark")
    page.emulate_media(media="print")
    assert not page.locator(".controls").is_visible()
    assert page.locator("article#var-linear .plot svg").is_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('article')).color") == "rgb(23, 28, 38)"
