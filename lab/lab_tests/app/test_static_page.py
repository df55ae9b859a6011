"""The static explorer as a file: written by the command line, and opened from disk in a browser without a server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sqrtdk.messages import word
from sqrtdk_lab.app.figures import EXPLORER_FIGURES
from sqrtdk_lab.app.settings import CONTROLS
from sqrtdk_lab.app.static import STATIC_CONTROLS, explorer_page
from sqrtdk_lab.cli import language_path
from tests.report.contrast import LEAST, contrasts
from tests.report.html_page import HtmlPage
from tests.support.playwright_here import Page, expect
from tests.support.program import called

Opener = Callable[..., Page]
MOVED = {  # a value for each control, and a figure that it moves
    "d_k": ("100", "logits"),
    "keys": ("64", "weights"),
    "components": ("Laplace", "logits"),
    "query_variance": ("4", "entropy"),
    "key_variance": ("0.5", "peak"),
    "rule": ("fixed", "jacobian"),
    "parameter": ("0.7", "range"),
    "overlay": ("off", "peak"),
    "temperature": ("0.7", "gradient"),
    "softcap": ("5", "logits"),
    "seed": ("1", "gradient"),
}


def test_the_command_line_writes_it_and_replaces_no_file(tmp_path: Path) -> None:
    file = tmp_path / "explorer.html"
    done = called("app", "--static", str(file), "--lang", "zh-CN")
    assert (done.returncode, done.stdout) == (0, "")
    text = file.read_text(encoding="utf-8")
    assert text == explorer_page("zh-CN")
    assert '<html lang="zh-CN" data-opens="zh-CN">' in text
    assert called("app", "--static", str(file)).returncode == 2
    assert called("app", "--static", str(file), "--force", "--lang", "en").returncode == 0
    assert file.read_text(encoding="utf-8") == explorer_page("en")


@pytest.mark.parametrize("options", [("--static", "x.html", "--port", "0"), ("--force",)])
def test_options_that_would_be_ignored_are_refused(options: tuple[str, ...]) -> None:
    done = called("app", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(r"Error: --(port|force) given with(out)? (option )?--static", done.stderr), done.stderr


@pytest.mark.parametrize(("choice", "path"), [("zh-CN", "zh/"), ("en", "en/"), ("auto", "")])
def test_the_address_is_that_of_the_language(choice: str, path: str) -> None:
    """The tests run in an English locale: of "auto" the reader's browser makes its own choice."""
    assert language_path(choice) == path  # type: ignore[arg-type]


def test_a_chinese_locale_opens_the_chinese_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert language_path("auto") == "zh/"


def test_it_fetches_nothing_and_says_all_in_both_languages() -> None:
    page = HtmlPage(explorer_page())
    assert not {"img", "iframe", "link rel=stylesheet"} & set(page.tags)
    text = explorer_page()
    assert re.findall(r"(?:src|href)=[\"'](?!#|data:)[^\"']*", text) == []
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket", text)
    assert all(word(f"app.caption.{name}", "zh") in text for name in EXPLORER_FIGURES)
    assert {*STATIC_CONTROLS} == {*CONTROLS} - {"dtype"} == {*MOVED}


@pytest.fixture
def show(opened: Opener, tmp_path: Path) -> Opener:
    """Open the page and wait until everything is drawn."""

    def open_page(query: str = "", *, width: int = 1400, scheme: str = "light", locale: str = "en-US") -> Page:
        file = tmp_path / "explorer.html"
        file.write_text(explorer_page(), encoding="utf-8")
        page = opened(file, query, width=width, scheme=scheme, locale=locale)
        page.set_default_timeout(120_000)
        drawn(page)
        return page

    return open_page


_CELLS = "all => all.map(row => [...row.children].map(one => one.innerText))"


def drawn(page: Page) -> None:
    page.wait_for_selector("#results[aria-busy=false]")


def field(page: Page, name: str) -> str:
    return page.locator(f"#field-{name}").input_value()


def choose(page: Page, name: str, value: str) -> None:
    control = page.locator(f"#field-{name}")
    if CONTROLS[name].low is None:
        control.select_option(value)
    else:
        control.fill(value)
        control.press("Enter")


# -- in a browser: the fixture `opened` fails where anything is fetched, logged or raised


@pytest.mark.browser
@pytest.mark.full
def test_every_control_moves_its_figure(show: Opener) -> None:
    page = show()
    for name, (value, figure) in MOVED.items():
        before = page.locator(f"#figure-{figure} svg").inner_html()
        choose(page, name, value)
        page.wait_for_function(
            "([place, before]) => ![null, before].includes(document.querySelector(place)?.innerHTML ?? null)",
            arg=[f"#figure-{figure} svg", before],
        )
        drawn(page)
        assert f"{name}={value}" in page.url
    page.reload()
    drawn(page)
    assert {name: field(page, name) for name in MOVED} == {name: value for name, (value, _) in MOVED.items()}


@pytest.mark.browser
@pytest.mark.full
def test_sliders_are_named_and_move_by_the_keyboard(show: Opener) -> None:
    page = show("?d_k=100")
    slider = page.get_by_role("slider", name=word("app.control.d_k", "en"), exact=True)
    assert slider.get_attribute("aria-valuetext") == "100"
    slider.focus()
    slider.press("ArrowRight")
    assert field(page, "d_k") == slider.get_attribute("aria-valuetext") == "256"  # 100 is nearest to 128
    slider.press("Home")
    assert field(page, "d_k") == "1"
    softcap = page.get_by_role("slider", name=word("app.control.softcap", "en"), exact=True)
    assert softcap.get_attribute("aria-valuetext") == "none"
    for name in STATIC_CONTROLS:
        label = word(f"app.control.{name}", "en")
        assert (
            page.get_by_label(label, exact=True).count() == (1 if CONTROLS[name].low is None else 2)
            or name == "parameter"
        )
    drawn(page)


@pytest.mark.browser
@pytest.mark.full
def test_what_is_typed_is_read_or_refused(show: Opener) -> None:
    page = show("?keys=abc")
    message = page.locator("#message")
    for value in ("abc", "0", "1e999", "64.5", "<img src=x onerror=alert(1)>", "٦٤", ""):
        choose(page, "keys", value)
        expect(message).to_contain_text("a whole number from 2 to 2048 is wanted; got")
        expect(page.locator("#figures")).to_be_hidden()
    choose(page, "keys", "32")
    expect(message).to_be_hidden()
    expect(show("?rule=__proto__").locator("#message")).to_contain_text("one of sqrt_dk, none,")
    drawn(page)
    expect(page.locator("#figures svg")).to_have_count(len(EXPLORER_FIGURES))


@pytest.mark.browser
@pytest.mark.full
def test_the_other_language_keeps_what_is_chosen(show: Opener) -> None:
    page = show("?d_k=128&rule=fixed&softcap=none", locale="zh-CN")
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    said = page.locator("body").inner_text()
    for key in ("page.lead", "figure.gradient", "caption.weights", "control.keys", "parameter.fixed", "row.peak"):
        assert word(f"app.{key}", "zh") in said
    assert not re.search(r"\b(measured|weights|scale|Head|rows)\b", said)
    assert field(page, "softcap") == word("app.offered_softcap.none", "zh")
    page.get_by_role("button", name="English").click()
    drawn(page)
    assert (field(page, "d_k"), field(page, "softcap")) == ("128", "none")
    said = page.locator("body").inner_text()
    assert word("app.row.peak", "en") in said
    assert re.findall(r"[\u4e00-\u9fff]+", said) == ["中文"]  # the button


@pytest.mark.browser
@pytest.mark.full
def test_the_table_says_what_theory_and_the_page_measure(show: Opener) -> None:
    page = show("?rule=none")
    cells = page.locator("#numbers tbody tr").evaluate_all(_CELLS)
    rows = {row[0]: row[1:] for row in cells}
    assert rows[word("app.row.ratio", "en")] == ["8.000", "8.000", "1.000"]
    assert rows[word("app.row.std", "en")][1:] == ["8", "1"]
    assert rows[word("app.row.entropy", "en")][1:] == ["0.7384", "5.052"]
    assert len(rows) == 10


@pytest.mark.browser
@pytest.mark.full
def test_nothing_to_draw_is_said(show: Opener) -> None:
    page = show("?rule=fixed&parameter=0&overlay=off")
    for name in EXPLORER_FIGURES:
        empty = name in ("logits", "gradient")
        expect(page.locator(f"#figure-{name} .empty")).to_be_visible(visible=empty)
        expect(page.locator(f"#figure-{name} svg")).to_have_count(0 if empty else 1)


@pytest.mark.browser
@pytest.mark.full
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_nothing_overflows_and_texts_stand_out(show: Opener, width: int, scheme: str, locale: str) -> None:
    page = show("?query_variance=1000000&key_variance=1000000&rule=none", width=width, scheme=scheme, locale=locale)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    right = page.locator("#numbers td, #ranges td, .plot svg").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect().right)"
    )
    assert max(right) <= width
    if width < 768:
        page.locator("#controls summary").press("Enter")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    texts = contrasts(page)
    assert len(texts) > 50
    assert [one for one in texts if one[0] < LEAST] == []
    tops = page.locator(".legend").evaluate_all(
        "all => all.map(list => [...list.children].map(one => one.getBoundingClientRect().top))"
    )
    assert all(len({*lines}) == len(lines) for lines in tops)
