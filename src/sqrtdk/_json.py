"""JSON for numbers that JSON lacks, NaN and infinities, by one convention.

An infinite value is a measurement, and the worst one, so it is the text "Infinity" or "-Infinity". In a document that
people and other programs read, NaN is null: there was nothing to measure. Where a record must come back as it was, and
null means something else, NaN is the text "NaN".
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from sqrtdk.errors import INTERRUPTS

NONFINITE_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def json_document(value: Any) -> str:
    """Return `value` as one JSON document, ASCII only, that ends with a newline.

    Args:
        value: numbers, strings, None, and containers of them, including dataclasses; anything else is written as its
            text. A subclass, which a model may bring, is written as its content.

    Example:
        >>> print(json_document({"a": [1, math.inf], "b": math.nan}), end="")
        {
          "a": [1, "Infinity"],
          "b": null
        }
    """
    return _pretty(plain_data(value)) + "\n"


def exact_data(value: Any) -> Any:
    """Return a value as JSON data from which it can be read back: see `plain_data`, but NaN is a text.

    Example:
        >>> exact_data((1.5, math.nan, -math.inf))
        [1.5, 'NaN', '-Infinity']
    """
    return plain_data(value, "NaN")


def exact_line(value: Any) -> str:
    """Return a value as JSON on one line, from which it can be read back exactly; `exact_data` says how."""
    return json.dumps(exact_data(value), allow_nan=False)


def numbers_back(value: Any) -> Any:
    """Return what `exact_data` was given, but for tuples and records, which stay lists and dicts.

    Example:
        >>> numbers_back({"loss": ["NaN", "Infinity", "none"]})
        {'loss': [nan, inf, 'none']}
    """
    if isinstance(value, dict):
        return {name: numbers_back(item) for name, item in value.items()}
    if isinstance(value, list):
        return [numbers_back(item) for item in value]
    return NONFINITE_NAMES.get(value, value) if isinstance(value, str) else value


def plain_data(value: Any, nan: str | None = None) -> Any:
    """Return a value rebuilt from JSON's own types, at any depth.

    Methods of subclasses, which may do anything, are not called.

    Args:
        value: A value of JSON types or their subclasses.
        nan: What stands for NaN and infinities; None: they stay.
    """
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
            return nan
        return number if math.isfinite(number) else ("Infinity" if number > 0 else "-Infinity")
    if issubclass(kind, dict):
        return {_text(key): plain_data(item, nan) for key, item in dict.items(value)}
    for sequence in (list, tuple, set, frozenset):
        if issubclass(kind, sequence):
            return [plain_data(item, nan) for item in sequence.__iter__(value)]
    if dataclasses.is_dataclass(kind):
        return {field.name: plain_data(getattr(value, field.name), nan) for field in dataclasses.fields(kind)}
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
