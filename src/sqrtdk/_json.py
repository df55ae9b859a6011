"""JSON documents: no NaN and no infinity, which JSON does not have, and laid out to be read.

NaN is written as null: there was nothing to measure. An infinite value is a measurement, and the worst one, so it is
written as the string "Infinity" or "-Infinity".
"""

from __future__ import annotations

import json
import math
from typing import Any


def document(value: Any) -> str:
    """Return `value` as one JSON document, ASCII only, that ends with a newline.

    Args:
        value: numbers, strings, None, and containers of them; what JSON has no form for is written as its text.

    Example:
        >>> print(document({"a": [1, math.inf], "b": math.nan}), end="")
        {
          "a": [1, "Infinity"],
          "b": null
        }
    """
    return _pretty(_finite(value)) + "\n"


def _finite(value: Any) -> Any:
    """Replace what JSON cannot hold, at any depth."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_finite(item) for item in value]
    return str(value)  # e.g. a torch.dtype or a version object in `environment`


def _pretty(value: Any, indent: str = "") -> str:
    """Indent as `json.dumps(indent=2)` does, but keep containers of plain values on one line."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(child, (dict, list)) for child in children):
        return json.dumps(value, allow_nan=False)
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {_pretty(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    lines = [inner + _pretty(item, inner) for item in value]
    return "[\n" + ",\n".join(lines) + f"\n{indent}]"
