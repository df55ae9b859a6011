"""What every report on a terminal keeps to, whatever it tells."""

import re
from collections.abc import Callable

from rich.cells import cell_len


def check_fits(text: str, width: int) -> None:
    """No line is wider, and the last one ends."""
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert text.endswith("\n")


def check_colours(draw: Callable[..., str]) -> None:
    """Without colours no control character stands there, and with them the same text.

    Args:
        draw: takes `width` and `color`.
    """
    assert draw(width=80).replace("\n", "").isprintable()
    colored = draw(width=120, color=True)
    assert "\x1b[" in colored
    bare = re.sub(r"\x1b\[[\d;]*m", "", colored)
    assert [line.rstrip() for line in bare.splitlines()] == draw(width=120).splitlines()
