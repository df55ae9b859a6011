"""Names on the command line: lists with commas, of what a table holds."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from sqrtdk.errors import InvalidValueError

Thing = TypeVar("Thing")


def chosen(text: str, table: Mapping[str, Thing], what: str, also: Mapping[str, str] | None = None) -> dict[str, Thing]:
    """The entries of a table that a list names, in the table's order; "all" names every one.

    Args:
        text: names with commas between them.
        table: of what there is.
        what: it is, for the error.
        also: other names, and those of the table that they stand for.

    Raises:
        InvalidValueError: there is no such entry; the nearest names are offered.

    Example:
        >>> chosen("b, a", {"a": 1, "b": 2, "c": 3}, "letter")
        {'a': 1, 'b': 2}
    """
    names = [(also or {}).get(name.strip(), name.strip()) for name in text.split(",")]
    for name in names:
        if name != "all" and name not in table:
            near = get_close_matches(name, table, n=3)
            raise InvalidValueError(
                f"there is no {what} {name!r} in {text!r}",
                hint=f"Did you mean {' or '.join(near)}?" if near else f"Use some of {', '.join(table)}; or all.",
            )
    return {name: thing for name, thing in table.items() if name in names or "all" in names}
