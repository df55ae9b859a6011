"""Programs of a page: blocks of plain Python, each with the block of text behind it, which is what it prints.

A block that is copied from the page runs, so each is a program of its own. A block of Python without a block of text
behind it is a part of the reader's own program, which defines the rest of its names.
"""

from __future__ import annotations

import re

PROGRAM = re.compile(r"^```python\n((?:(?!```).*\n)+)```\n\n```text\n((?:(?!```).*\n)+)```$", re.MULTILINE)


def programs(page: str) -> list[tuple[str, str]]:
    """The code of each program of a page, and what the page says that it prints."""
    return [(code, printed) for code, printed in PROGRAM.findall(page) if not code.startswith(">>> ")]


def without_blanks(text: str) -> str:
    """For comparison: a page breaks long lines, and Chinese has no blank to break them at."""
    return "".join(text.split())
