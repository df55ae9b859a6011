"""Pages in Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.pages import settle

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

if find_spec("syrupy") is None:

    @pytest.fixture
    def snapshot() -> None:
        """Stand for syrupy's fixture."""
        pytest.skip("syrupy is not installed")


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page from disk; at the end nothing may have been fetched, logged, raised or asked."""
    pages: list[Page] = []
    complaints: list[str] = []

    def open_page(path: Path, place: str = "", *, width: int = 1280, scheme: str = "light", **more: Any) -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, **more)  # type: ignore[arg-type]
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: request.url.startswith("file:") or complaints.append(request.url))
        page.goto(path.as_uri() + place)
        settle(page)
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not complaints


@pytest.fixture
def show_runs(opened: Callable[..., Page], runs: dict[str, Path], tmp_path: Path) -> Callable[..., Page]:
    """Open the page of one run or of two."""
    from tests.report.watch_pages import page_of

    def open_runs(*names: str, width: int = 1280, scheme: str = "light", language: str = "en") -> Page:
        path = tmp_path / f"{'-'.join(names)}.html"
        path.write_text(page_of(runs, *names), encoding="utf-8")
        return opened(path, f"#{language}", width=width, scheme=scheme)

    return open_runs
