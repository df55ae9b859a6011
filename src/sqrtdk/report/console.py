"""Drawing with rich into a string: no colour but on a terminal, no markup, no trailing blanks."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from sqrtdk.report.plain import plain

_MOST_SITES = 3
_PROSE_WIDTH = 110


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


def listed(sites: Sequence[str]) -> str:
    """Name sites, each once; of many the first ones.

    Example:
        >>> listed(["h.0", "", "h.0", "h.2", "h.4", "h.6"])
        'h.0, (root), h.2 and 2 more'
    """
    names = list(dict.fromkeys(plain(site) or "(root)" for site in sites))
    more = f" and {len(names) - _MOST_SITES} more" if len(names) > _MOST_SITES else ""
    return ", ".join(names[:_MOST_SITES]) + more


def paragraph(console: Console, text: Text, indent: int) -> None:
    """Print a paragraph; the lines that wrap are indented two columns further."""
    width = min(console.width, _PROSE_WIDTH) - indent - 2
    for number_of, line in enumerate(text.wrap(console, width, overflow="fold")):
        line.rstrip()
        console.print(Text(" " * (indent + (2 if number_of else 0))) + line)
