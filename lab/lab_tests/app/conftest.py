"""One served page for all tests of the explorer, and pages of Chromium on it; skipped where Gradio is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from lab_tests.app.served import Served, served
from tests.report.conftest import opened as opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

GRADIO = importlib.util.find_spec("gradio") is not None
WAIT_MS = 180_000  # a machine that is busy with other tests draws slowly


@pytest.fixture(scope="session")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not GRADIO:
        pytest.skip("Gradio is not installed: pip install 'sqrtdk[app]'")
    with served(tmp_path_factory.mktemp("explorer")) as page:
        yield page
    assert page.process.returncode == 130
    assert list(page.folder.iterdir()) == []


@pytest.fixture
def visit(explorer: Served, browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open the page and wait for its last figure; whatever goes wrong in the browser, or leaves loopback, fails."""
    wrong: list[str] = []
    contexts = []

    def heard(message: ConsoleMessage) -> None:
        if message.type == "error":
            wrong.append(message.text)

    def asked(request: Request) -> None:
        if not request.url.startswith((explorer.address, "data:", "blob:")):
            wrong.append(f"asked for {request.url}")

    def open_page(
        path: str = "/en/", *, width: int = 1400, locale: str = "en-US", scheme: str = "light", ready: bool = True
    ) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, locale=locale, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("console", heard)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", asked)
        page.goto(explorer.address + path, wait_until="domcontentloaded")
        if ready:
            page.wait_for_selector("#ranges table")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
