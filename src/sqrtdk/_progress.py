"""Progress of a long run: reported by the working code, shown on stderr if it is a terminal, or in a notebook.

rich draws both: it is a dependency anyway, and its bar is plain HTML in a notebook, where tqdm's needs widgets. A bar
appears after a second and is redrawn at each message, so that no thread runs beside timed code.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

AFTER_S = 1.0  # shorter work needs no bar
EVERY_S = 0.1
OFF_VARIABLE = "SQRTDK_PROGRESS"  # "0" in the environment disables the bar
Tell = Callable[[str, int, int], None]  # current work, steps done, total steps; 0 of 0: unknown
Count = Callable[[int, int], None]

_listener: ContextVar[Tell | None] = ContextVar("listener", default=None)


def report_progress(text: str, done: int = 0, total: int = 0) -> None:
    """Report the current work to the listener, if there is one.

    Args:
        text: What is being done, in our own words: it must hold no text from a model.
        done: Number of parts that are done.
        total: Number of all parts; 0 if it is unknown.
    """
    listener = _listener.get()
    if listener is not None:
        listener(text, done, total)


@contextmanager
def pass_progress_to(listener: Tell) -> Iterator[None]:
    """Return a context whose progress messages are passed to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def progress_shown(title: str) -> Iterator[None]:
    """Return a context whose progress messages are shown by a bar, unless a listener already receives them."""
    if _listener.get() is not None:
        yield
        return
    with progress_bar(title) as listener, pass_progress_to(listener):
        yield


@contextmanager
def progress_counted(title: str, given: Count | None = None) -> Iterator[Count]:
    """Return a context that yields a function of (done, total).

    It is `given`, or passes the numbers to the current listener, or draws a bar titled `title`.
    """
    listener = _listener.get()
    if given is not None:
        yield given
    elif listener is not None:
        yield lambda done, total: listener(title, done, total)
    else:
        with progress_bar(title) as own:
            yield lambda done, total: own("", done, total)


@contextmanager
def progress_bar(title: str) -> Iterator[Tell]:
    """Return a context that yields a function which updates a bar; the bar is removed at the end.

    Messages of `report_progress` don't reach it; see `progress_shown`. There is no bar without a terminal.
    """
    screen = None if os.environ.get(OFF_VARIABLE) == "0" else _screen()
    if screen is None:
        yield lambda text, done, total: None
        return
    drawn = _Bar(title, screen)
    try:
        yield drawn.tell
    finally:
        drawn.close()


class _Bar:
    """rich's progress for one task, on a screen that opens after `AFTER_S`."""

    def __init__(self, title: str, screen: type[_Terminal] | type[_Notebook]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        words = TextColumn("{task.description}", markup=False)
        self._progress = Progress(
            words,
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=screen.console(),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # a model's own output must not be redirected
            redirect_stderr=False,
        )
        self._title, self._screen = title, screen(self._progress)
        self._task = self._progress.add_task(title, total=None)
        self._lock, self._open, self._drawn = threading.Lock(), False, 0.0
        self._timer = threading.Timer(AFTER_S, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def _begin(self) -> None:
        with self._lock:
            if not self._timer.finished.is_set():  # closed in the meantime
                self._screen.open()
                self._open = True

    def tell(self, text: str, done: int, total: int) -> None:
        words = f"{self._title}: {text}" if text else self._title
        self._progress.update(self._task, description=words, completed=done, total=total or None)
        with self._lock:
            if self._open and (done == total or time.monotonic() - self._drawn > EVERY_S):
                self._drawn = time.monotonic()
                self._screen.draw()

    def close(self) -> None:
        with self._lock:
            self._timer.cancel()
            if self._open:
                self._screen.close()


class _Terminal:
    """The bar on stderr."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress

    @staticmethod
    def console() -> Any:
        from rich.console import Console

        return Console(stderr=True)

    def open(self) -> None:
        self._progress.start()

    def draw(self) -> None:
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


class _Notebook:
    """The bar in the output of a notebook cell: a display of its own, emptied at the end."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._display: Any = None

    @staticmethod
    def console() -> Any:
        return None

    def open(self) -> None:
        from IPython.display import display

        self._display = display(self._progress, display_id=True)

    def draw(self) -> None:
        if self._display is not None:
            self._display.update(self._progress)

    def close(self) -> None:
        from IPython.display import HTML

        if self._display is not None:
            self._display.update(HTML(""))


def _screen() -> type[_Terminal] | type[_Notebook] | None:
    """Return where a bar can be seen: in a notebook, whose kernel has no terminal, or on stderr if that is a
    terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell, "kernel"):
        return _Notebook
    terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return _Terminal if terminal else None
