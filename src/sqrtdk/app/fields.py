"""Values of a document that came from a file, each of the type that a report has, or an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_ROWS = 400  # of a table
INFINITE = ("Infinity", "-Infinity")  # numbers, as `sqrtdk._json` writes them


def text(value: Any) -> str:
    """A text, cut to what a cell holds.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, str):
        raise TypeError(f"a text was expected; got a {type(value).__name__}")
    return value if len(value) <= 2000 else f"{value[:2000]}..."


def maybe_text(value: Any) -> str:
    """A text, or "-" for null."""
    return "-" if value is None else text(value)


def number(value: Any) -> float:
    """A number as `sqrtdk._json` writes it: null is NaN, infinite ones are words.

    Raises:
        TypeError: it is none.
    """
    if value is None:
        return math.nan
    if value in INFINITE or type(value) in (int, float):
        return float(value)
    raise TypeError(f"a number was expected; got a {type(value).__name__}")


def maybe(value: Any) -> float | None:
    """A number, or None where it is null."""
    found = number(value)
    return None if math.isnan(found) else found


def listed(value: Any) -> Sequence[Any]:
    """A list.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, list):
        raise TypeError(f"a list was expected; got a {type(value).__name__}")
    return value


def mapping(value: Any) -> Mapping[str, Any]:
    """An object.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, dict):
        raise TypeError(f"an object was expected; got a {type(value).__name__}")
    return value


def of(value: Any, names: Iterable[str]) -> str:
    """A text that is one of some names.

    Raises:
        ValueError: it is another.
    """
    allowed = tuple(names)
    if value not in allowed:
        raise ValueError(f"one of {', '.join(allowed)} was expected; got {str(value)[:40]!r}")
    return text(value)


def extreme(values: Any, largest: bool) -> float | None:
    """The largest or the least of a list of numbers; None where it has none."""
    known = [one for one in map(number, listed(values)) if not math.isnan(one)]
    return (max(known) if largest else min(known)) if known else None
