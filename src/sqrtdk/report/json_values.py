"""What JSON documents and the data of pages hold: the tool, fields of records, rounded numbers, texts as pairs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from collections.abc import Container
from typing import Any

from sqrtdk.messages import Text, fields, text_of_value


def tool() -> dict[str, str]:
    """Return the name and the version of sqrtdk, as each JSON document has them under "tool".

    Example:
        >>> sorted(tool())
        ['name', 'version']
    """
    return {"name": "sqrtdk", "version": importlib.metadata.version("sqrtdk")}


def record_fields(record: Any, without: Container[str] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass as a dict, by reference.

    `dataclasses.asdict` would copy deeply, and run the code of objects that belong to the model.

    Args:
        record: An instance of a dataclass.
        without: Names of fields to leave out.
    """
    names = (field.name for field in dataclasses.fields(record))
    return {name: getattr(record, name) for name in names if name not in without}


def reasoned(record: Any, without: Container[str] = ()) -> dict[str, Any]:
    """Return a record that has a `reason` as a dict for JSON.

    Args:
        record: The record.
        without: Names of fields to leave out.

    Returns:
        Its fields, and `message_id` and `values` of the sentence in `reason`.
    """
    return record_fields(record, without) | fields(record.reason)


def rounded(value: float, digits: int) -> float | str | None:
    """Return a number with so many digits; a whole number keeps all of its own.

    JSON has neither NaN nor infinities: NaN becomes None, an infinity a string.

    Example:
        >>> [rounded(value, 3) for value in (0.12345, 12345, math.nan, -math.inf)]
        [0.123, 12345, None, '-Infinity']
    """
    # a count stays exact: 123,456 rows are not 123,460
    if isinstance(value, int):
        return value
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.{digits}g}")


def pair(sentence: Text | str) -> list[str]:
    """Return a sentence as [English, Chinese]; the script of the page shows one of them.

    Example:
        >>> pair("h.0")
        ['h.0', 'h.0']
    """
    text = text_of_value(sentence)
    return [text.en, text.zh]
