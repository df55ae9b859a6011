"""Every kind of page: it needs nothing else, its policy lets its own through, and it opens and draws in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sqrtdk.monitor.reading import read_run
from sqrtdk.report import html
from sqrtdk.report.diff import html as diff_html
from sqrtdk.report.watch import html as watch_html
from sqrtdk.report.watch.compare import compare_runs
from sqrtdk.report.watch.summary import summarise
from tests.report import sample_diff, sample_report
from tests.report.html_page import HtmlPage, check_alone, check_policy
from tests.support.lab_here import LAB
from tests.support.pages import open_fold, settle

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Runs = dict[str, Path]
Opener = Callable[..., Any]
CHECKS = ("healthy", "static", "sick", "hostile", "unjudged")


def check_page(name: str) -> Callable[[Runs], str]:
    return lambda _: html.to_html(getattr(sample_report, name)())


def diff_page(name: str) -> Callable[[Runs], str]:
    return lambda _: diff_html.to_html(sample_diff.REPORTS[name]())


def watch(runs: Runs) -> str:
    return watch_html.to_html([summarise(read_run(runs["unscaled"]))])


def sick_watch(runs: Runs) -> str:
    return watch_html.to_html([summarise(read_run(runs["sick"]))])


def comparison(runs: Runs) -> str:
    told = [summarise(read_run(runs[name])) for name in ("healthy", "sick")]
    return watch_html.to_html(told, compare_runs(*told))


def lab(_: Runs) -> str:
    from lab_tests.report import sample_lab
    from sqrtdk_lab.report.page import to_html

    one, other, *_more = sample_lab.records()
    return to_html([*sample_lab.records(), sample_lab.unsound(one), sample_lab.undecided(other)])


def hostile_lab(_: Runs) -> str:
    from lab_tests.report import sample_lab
    from sqrtdk_lab.report.page import to_html

    return to_html([sample_lab.records()[0], sample_lab.hostile()])


PAGES = {
    **{f"check {name}": check_page(name) for name in CHECKS},
    **{f"diff {name}": diff_page(name) for name in sample_diff.REPORTS},
    **({"lab": lab, "lab hostile": hostile_lab} if LAB else {}),
    "watch": watch,
    "watch sick": sick_watch,
    "comparison": comparison,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", PAGES)
def test_the_page_needs_nothing_else(name: str, runs: Runs) -> None:
    page = HtmlPage(PAGES[name](runs))
    check_policy(page)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    if name.startswith(("watch", "comparison")):  # whose script and style come in several parts
        assert not any(a.get("src") or str(a.get("href", "#")).startswith("http") for _, a in page.elements)
    else:
        check_alone(page, scripts=1 if name.startswith("lab") else 2, fields=not name.startswith("diff"))


DRAWN = {  # what its script draws, or shows where it is asked
    "check sick": "#maps .cell",
    "diff two_causes": ".scatter .drawing circle",
    **({"lab": ".plot svg"} if LAB else {}),
    "watch": ".panel svg",
    "comparison": ".panel svg",
}


@pytest.mark.sampled(2)
@pytest.mark.browser
@pytest.mark.parametrize("name", DRAWN)
def test_the_page_opens_draws_and_speaks_both_languages(opened: Opener, runs: Runs, tmp_path: Path, name: str) -> None:
    """The fixture fails on an error of the console, and on a request."""
    path = tmp_path / "page.html"
    path.write_text(PAGES[name](runs), encoding="utf-8")
    page = opened(path, "#en")
    if name.startswith("diff"):
        open_fold(page, 1)
    assert page.locator(DRAWN[name]).count() > 0
    assert page.locator(DRAWN[name]).first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    page.locator("button", has_text="中文").click()
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    assert page.locator("h2 .zh, h1 .zh").first.is_visible()


@pytest.mark.browser
@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_overflows(opened: Opener, runs: Runs, tmp_path: Path, name: str, scheme: str) -> None:
    """Whatever is unfolded."""
    path = tmp_path / "page.html"
    path.write_text(PAGES[name](runs), encoding="utf-8")
    page = opened(path, "#en", scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.evaluate("document.querySelectorAll('.opens').forEach(button => button.click())")
    for language in ("zh-CN", "en"):
        page.locator("button", has_text={"zh-CN": "中文", "en": "English"}[language]).first.click()
        for width in (1280, 1090, 700, 390):
            page.set_viewport_size({"width": width, "height": 844})
            if name.startswith(("watch", "comparison")):  # drawn as wide as the page is when it opens
                page.reload()
            settle(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (language, width)


CUT_OFF = """[...document.querySelectorAll("svg text")].filter(text => {
    const [box, all] = [text, text.ownerSVGElement].map(e => e.getBoundingClientRect());
    const across = Math.max(all.left - box.left, box.right - all.right);
    return box.width && Math.max(across, all.top - box.top, box.bottom - all.bottom) > 1;
}).map(text => text.textContent)"""


@pytest.mark.sampled(3)
@pytest.mark.browser
@pytest.mark.parametrize("name", PAGES)
def test_no_drawing_cuts_off_its_text(opened: Opener, runs: Runs, tmp_path: Path, name: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGES[name](runs), encoding="utf-8")
    for width in (1280, 390):
        page = opened(path, "#en", width=width)
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        for language in ("中文", "English"):
            page.locator("button", has_text=language).first.click()
            settle(page)
            assert page.evaluate(CUT_OFF) == [], (language, width)


@pytest.mark.browser
@pytest.mark.full
@pytest.mark.parametrize("name", DRAWN)
def test_light_and_dark_differ(opened: Opener, runs: Runs, tmp_path: Path, name: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGES[name](runs), encoding="utf-8")
    colour = "getComputedStyle(document.body).backgroundColor"
    assert len({opened(path, scheme=scheme).evaluate(colour) for scheme in ("light", "dark")}) == 2


@pytest.mark.browser
@pytest.mark.full
@pytest.mark.parametrize("name", DRAWN)
def test_the_policy_stops_what_might_slip_through(browser: Browser, runs: Runs, tmp_path: Path, name: str) -> None:
    path = tmp_path / "page.html"
    slipped = "<main><script>document.title='owned'</script><style>main { display: none }</style>"
    text = PAGES[name](runs)
    assert "<main>" in text
    path.write_text(text.replace("<main>", slipped, 1), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    assert "owned" not in page.title()
    assert page.locator("main").is_visible()
    page.close()
