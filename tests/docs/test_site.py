"""The built site: every public name, links that lead somewhere, nothing from elsewhere, pages that fit a browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import sqrtdk
from tests.docs.pages import pages
from tests.docs.test_links import NAMESPACES, offered
from tests.support.playwright_here import Browser

pytestmark = pytest.mark.full  # what the sources alone tell is in test_links.py
TREES = ("en", "zh")
SIZES = {"wide": (1400, 900), "phone": (390, 844)}
SAMPLE = ("index", "watch", "glossary", "api/sqrtdk", "architecture")


class Links(HTMLParser):
    """What a page asks for or leads to, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id":
                self.anchors.add(value)
            elif name in ("href", "src"):
                leads = tag == "a" or ((tag, name) == ("link", "href") and ("rel", "stylesheet") not in attrs)
                (self.targets if leads else self.loaded).append(value)


@pytest.fixture(scope="session")
def links(site: Path) -> dict[Path, Links]:
    return {path: Links(path) for tree in TREES for path in (site / tree).rglob("*.html")}


def test_every_page_is_built(site: Path) -> None:
    for tree in TREES:
        assert {name for name in pages(tree) if not (site / tree / f"{name}.html").is_file()} == set()


def test_the_first_page_leads_to_both_trees(site: Path) -> None:
    first = Links(site / "index.html")
    assert first.targets == ["en/index.html", "zh/index.html"]
    assert not first.loaded


def test_links_lead_somewhere(links: dict[Path, Links]) -> None:
    """Files are there, and the places in them."""
    lost = []
    for path, page in links.items():
        for target in page.targets + page.loaded:
            parts = urlsplit(target)
            if parts.scheme:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            if not file.is_file() or (place and file in links and place not in links[file].anchors):
                lost.append((str(path), target))
    assert lost == []


def test_nothing_is_loaded_from_elsewhere(site: Path, links: dict[Path, Links]) -> None:
    assert [target for page in links.values() for target in page.loaded if urlsplit(target).netloc] == []
    for style in site.rglob("*.css"):
        assert re.findall(r"url\(\s*['\"]?(?:https?:)?//|@import", style.read_text(encoding="utf-8")) == [], style


@pytest.mark.parametrize("tree", TREES)
def test_the_api_has_every_public_name(tree: str, links: dict[Path, Links], site: Path) -> None:
    anchors = links[site / tree / "api" / "sqrtdk.html"].anchors
    assert {name for name in sqrtdk.__all__ if f"sqrtdk.{name}" not in anchors} == set()


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_namespace_is_whole(name: str, site: Path, links: dict[Path, Links]) -> None:
    listed = offered(name)
    page = site / "en" / "api" / f"{name}.html"
    text = page.read_text(encoding="utf-8")
    lost = [one for one in listed if f"sqrtdk.{name}.{one}" not in links[page].anchors and f"#sqrtdk.{one}" not in text]
    assert lost == []


_BROKEN = """() => [...document.querySelectorAll("article code:not(.long) .pre")].filter(word => {
  const box = document.createRange();
  box.selectNodeContents(word);
  return new Set([...box.getClientRects()].map(line => Math.round(line.top))).size > 1;
}).map(word => word.textContent)"""


def look(browser: Browser, page_file: Path, size: tuple[int, int]) -> list[str]:
    """What is wrong with a page: errors, requests that leave the site, too wide for the window, code cut in a word."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": size[0], "height": size[1]})
    page = context.new_page()
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else wrong.append(asked.url))
    page.on("requestfailed", lambda asked: wrong.append(f"failed: {asked.url}"))
    page.goto(page_file.as_uri())
    width = page.evaluate("document.documentElement.scrollWidth")
    if width > size[0]:
        wrong.append(f"{width} pixels wide")
    wrong += [f"broken: {word}" for word in page.evaluate(_BROKEN)]
    if not page.locator("article h1").first.is_visible():
        wrong.append("no title")
    context.close()
    return wrong


@pytest.mark.browser
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tree", TREES)
def test_pages_fit(browser: Browser, site: Path, tree: str, size: str) -> None:
    shown = {name: look(browser, site / tree / f"{name}.html", SIZES[size]) for name in SAMPLE if name in pages(tree)}
    assert {name: wrong for name, wrong in shown.items() if wrong} == {}


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tree", TREES)
def test_all_pages_fit(browser: Browser, site: Path, tree: str, size: str) -> None:
    shown = {name: look(browser, site / tree / f"{name}.html", SIZES[size]) for name in pages(tree)}
    assert {name: wrong for name, wrong in shown.items() if wrong} == {}


SEARCHES = {"en": ("sliding window", "Glossary"), "zh": ("滑动窗口", "术语表")}


@pytest.mark.browser
@pytest.mark.parametrize("tree", TREES)
def test_the_search_finds_without_a_network(browser: Browser, site: Path, tree: str) -> None:
    """By what a reader types, in the language of the tree."""
    words, title = SEARCHES[tree]
    page = browser.new_page()
    page.goto((site / tree / "search.html").as_uri() + f"?q={words}")
    page.wait_for_selector("#search-results li a")
    page.wait_for_selector(f"#search-results li a >> text={title}")
    page.close()


COPIED = {
    "commands": "sqrtdk check demo --lang zh-CN\n",
    "session": "import torch, sqrtdk\n",
    "program": "import torch, sqrtdk\n",
}
BLOCKS = {"commands": ("start", "console", 1), "session": ("check", "python", 0), "program": ("start", "python", 0)}


@pytest.mark.browser
@pytest.mark.parametrize("what", BLOCKS)
def test_a_button_copies_what_is_to_be_run(browser: Browser, site: Path, what: str) -> None:
    """Without prompts, output and comments of commands."""
    name, language, number = BLOCKS[what]
    page = browser.new_page()
    page.add_init_script("navigator.clipboard.writeText = async text => { window.written = text; }")
    page.goto((site / "zh" / f"{name}.html").as_uri())
    block = page.locator(f".highlight-{language}").nth(number)
    block.hover()
    block.get_by_role("button", name="复制").click()
    block.get_by_role("button", name="已复制").wait_for()
    written = page.evaluate("window.written")
    assert written.startswith(COPIED[what])
    assert re.findall(r"^(?:\$|>>>|\.\.\.) |  # .*[一-龥]", written, re.MULTILINE) == []
    assert page.locator(".highlight-text button").count() == 0
    page.close()


@pytest.mark.browser
def test_the_other_language_is_one_click_away(browser: Browser, site: Path) -> None:
    page = browser.new_page()
    page.goto((site / "en" / "api" / "scales.html").as_uri())
    page.click(".other-tree a")
    assert page.url.endswith("/zh/api/scales.html")
    assert page.get_attribute("html", "lang") == "zh-CN"
    page.close()
