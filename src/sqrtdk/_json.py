"""JSON documents without NaN and infinity, which JSON lacks, laid out for reading.

NaN is written as null: there was nothing to measure. An infinite value is a measurement, and the worst one, so it is
written as the string "Infinity" or "-Infinity".
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from sqrtdk.errors import INTERRUPTS


def document(value: Any) -> str:
    """Return `value` as one JSON document, ASCII only, that ends with a newline.

    Args:
        value: numbers, strings, None, and containers of them, including dataclasses; anything else is written as its
            text. A subclass, which a model may bring, is written as its content.

    Example:
        >>> print(document({"a": [1, math.inf], "b": math.nan}), end="")
        {
          "a": [1, "Infinity"],
          "b": null
        }
    """
    return _pretty(_exact(value)) + "\n"


def _exact(value: Any) -> Any:
    """Rebuild a value from JSON's own types, at any depth, without calling a subclass's methods, which may do
    anything."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, int):
        return int.__int__(value)
    if issubclass(kind, float):
        number = float.__float__(value)
        if math.isnan(number):
            return None
        return number if math.isfinite(number) else ("Infinity" if number > 0 else "-Infinity")
    if issubclass(kind, dict):
        return {_text(key): _exact(item) for key, item in dict.items(value)}
    for sequence in (list, tuple, set, frozenset):
        if issubclass(kind, sequence):
            return [_exact(item) for item in sequence.__iter__(value)]
    if dataclasses.is_dataclass(kind):
        return {field.name: _exact(getattr(value, field.name)) for field in dataclasses.fields(kind)}
    return _text(value)  # a torch.dtype, or a version object in `environment`


def _text(value: Any) -> str:
    """Return its text, or its type's name if it has no text."""
    try:
        return str.__str__(value if isinstance(value, str) else str(value))
    except INTERRUPTS:
        raise
    except BaseException:  # the __str__ of foreign code may raise anything
        return f"<{type.__dict__['__name__'].__get__(type(value))}>"


def _pretty(value: Any, indent: str = "") -> str:
    """Indent like `json.dumps(indent=2)`, but keep containers of plain values on one line."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(child, (dict, list)) for child in children):
        return _dumps(value)
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [f"{inner}{_dumps(key)}: {_pretty(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    lines = [inner + _pretty(item, inner) for item in value]
    return "[\n" + ",\n".join(lines) + f"\n{indent}]"


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False).replace("\x7f", r"\u007f")  # the one control that it leaves as it is
