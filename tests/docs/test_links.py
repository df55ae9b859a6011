"""What the sources of the site tell without a build: links and pictures lead somewhere, and the API is whole."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import sqrtdk
from tests.docs.pages import DOCS, ROOT, pages, read_page

anchors = pytest.importorskip("mdit_py_plugins.anchors.index")
PAGES = {f"{tree}/{name}": path for tree in ("en", "zh") for name, path in pages(tree).items()}
PAGES |= {name: ROOT / name for name in ("README.md", "README.zh-CN.md", "benchmarks/README.md", "scripts/README.md")}
_PAGES = [path.stem for path in sorted((DOCS / "en" / "api").glob("*.md"))]
NAMESPACES = [name for name in _PAGES if not name.startswith("sqrtdk")]
LEVELS = 4  # of headings that have an anchor: myst_heading_anchors


def places(path: Path) -> set[str]:
    """Anchors of a page, made of its headings."""
    page = read_page(path)
    both = zip(page.headings, page.titles, strict=True)
    return {anchors.slugify(title) for level, title in both if level <= LEVELS}


@pytest.mark.parametrize("name", PAGES)
def test_links_and_pictures_lead_somewhere(name: str) -> None:
    path, page = PAGES[name], read_page(PAGES[name])
    lost = []
    for target in (*page.links, *page.pictures):
        parts = urlsplit(unquote(target))
        file = (path.parent / parts.path).resolve() if parts.path else path
        known = places(file) if parts.fragment and file.suffix == ".md" and file.exists() else set()
        if not parts.scheme and (not file.exists() or (parts.fragment and parts.fragment not in known)):
            lost.append(target)
    assert lost == []


def test_each_script_and_record_is_told_of() -> None:
    told = {folder: (ROOT / folder / "README.md").read_text(encoding="utf-8") for folder in ("benchmarks", "scripts")}
    for folder, text in told.items():
        names = [path.name for path in (ROOT / folder).glob("*.py")]
        assert len(names) > 15
        assert [name for name in names if name not in text] == []
    records = [path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    assert len(records) > 15
    assert [name for name in records if f"| `{name}` |" not in told["benchmarks"]] == []


def offered(namespace: str) -> list[str]:
    """Return what a namespace lists itself, or the classes and functions of this package that it has."""
    module = getattr(sqrtdk, namespace)
    return getattr(module, "__all__", None) or [
        name
        for name, thing in vars(module).items()
        if name[0] != "_" and getattr(thing, "__module__", "").startswith("sqrtdk") and callable(thing)
    ]


def test_every_namespace_has_a_page() -> None:
    """But for those that hold no names of their own: what they offer has pages that explain it."""
    explained = {"integrations", "monitor", "report"}
    assert {*sqrtdk._ROOMS} - explained == {*NAMESPACES}


@pytest.mark.parametrize("tree", ["en", "zh"])
def test_the_pages_of_the_api_write_out_every_public_name(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(DOCS / "site"), *sys.path])
    public = pytest.importorskip("public", reason="sphinx is not installed")
    for name, listed in {"sqrtdk": sqrtdk.__all__, **{name: offered(name) for name in NAMESPACES}}.items():
        namespace = "sqrtdk" if name == "sqrtdk" else f"sqrtdk.{name}"
        assert listed
        assert set(listed) <= {*public.names(namespace)}, namespace
        assert (f"{{public}} {namespace}", "") in read_page(DOCS / tree / "api" / f"{name}.md").blocks
