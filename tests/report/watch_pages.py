"""Pages of runs for a browser, and the colours that they draw."""

from __future__ import annotations

from pathlib import Path

from sqrtdk.monitor.reading import read_run
from sqrtdk.report.watch.compare import compare_runs
from sqrtdk.report.watch.html import to_html
from sqrtdk.report.watch.summary import summarise
from tests.support.playwright_here import Page


def page_of(runs: dict[str, Path], *names: str) -> str:
    told = [summarise(read_run(runs[name])) for name in names]
    return to_html(told, compare_runs(*told) if len(told) == 2 else None)


def pixel(page: Page, x: float, y: float, panel: int = 0) -> list[int]:
    """Colour of the large map at shares of its width and height."""
    canvas = page.locator(".panel canvas").nth(panel)
    colour: list[int] = canvas.evaluate(
        """(canvas, at) => {
            const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
            pen.drawImage(canvas, -canvas.width * at[0], -canvas.height * at[1]);
            return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
        }""",
        [x, y],
    )
    return colour
