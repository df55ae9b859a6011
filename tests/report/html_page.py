"""An HTML page as a browser would read it: elements, attributes, texts, table rows."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path


class HtmlPage(HTMLParser):
    """Elements with their attributes, texts outside of scripts and styles, and the cells of each table row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.rows: list[list[str]] = []
        self._open = ""
        self._cell = False
        self.feed(text)

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag == "tr":
            self.rows.append([])
            self._cell = False
        if tag in ("th", "td"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._open = ""
        if tag in ("th", "td"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        self.inside.get(self._open, self.texts).append(data)
        if self._cell:
            self.rows[-1][-1] += data


def check_policy(page: HtmlPage) -> None:
    """The content security policy lets the page's own style and script through, by their hashes, and nothing else."""
    (policy,) = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for kind in ("script", "style"):
        digest = hashlib.sha256(page.inside[kind][-1].encode()).digest()
        assert f"{kind}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy


def check_alone(page: HtmlPage, *, scripts: int = 2, fields: bool = False) -> None:
    """Its own scripts and one style are all that a page needs; links lead to places in it, or to papers."""
    assert page.tags.count("script") == scripts
    assert page.tags.count("style") == 1
    outside = {"iframe", "object", "embed", "img", "form", "base", "image", "foreignobject"}
    assert not set(page.tags) & (outside if fields else outside | {"input"})
    for tag, attributes in page.elements:
        for key, value in attributes.items():
            assert not key.startswith("on"), (tag, key)
            assert key != "style"  # the policy would drop it
            if key in ("src", "href", "xlink:href"):
                assert value is not None
                ours = value.startswith("#") or (tag, value) == ("link", "data:,")
                assert ours or (tag == "a" and re.fullmatch(r"https://arxiv\.org/abs/[\d.]+", value))


def template(name: str) -> str:
    """The text of a page's template, with the heading that all pages share in its place."""
    folder = Path(__file__).parents[2] / "src" / "sqrtdk" / "report" / "templates"
    return (folder / name).read_text().replace('{% include "brand.html" %}', (folder / "brand.html").read_text())
