"""Wait for a page in a browser: what it draws, it draws in tasks of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"


def settle(page: Page) -> None:
    """Wait until a page is drawn, and until the browser has told its scripts of a new size and of opened folds."""
    page.locator("html:not([data-drawn=no])").wait_for(state="attached")
    page.evaluate(TWO_FRAMES)


def open_fold(page: Page, fold: int) -> None:
    """Open a line of a comparison and wait for its charts."""
    page.locator("details.fold > summary").nth(fold).click()
    page.locator("details.fold").nth(fold).locator(".drawing svg").first.wait_for(state="attached")
