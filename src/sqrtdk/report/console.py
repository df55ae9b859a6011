"""Drawing with rich into a string: no colour but on a terminal, no markup, no trailing blanks."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console


def drawn(draw: Callable[[Console], None], width: int, color: bool) -> str:
    """Return what `draw` prints on a console of `width` columns, 40 at least."""
    console = Console(
        file=io.StringIO(),
        width=max(width, 40),
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )
    with console.capture() as capture:
        draw(console)
    return "\n".join(line.rstrip() for line in capture.get().split("\n"))
