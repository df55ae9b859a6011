"""Writes frozen records of numbers and texts as JSON, and reads them back exactly, with the declared types enforced."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import types
import typing
from typing import Any, TypeVar

from sqrtdk.recording.limits import MAX_TEXT, refuse, shown

Record = TypeVar("Record")
_LARGEST = sys.float_info.max
_NAMED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def number_to_json(value: float) -> float | str:
    """Return a number, or its name if JSON has no form for it (NaN and infinities).

    Example:
        >>> number_to_json(-math.inf), number_to_json(0.1)
        ('-Infinity', 0.1)
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def number_from_json(value: Any, what: str) -> float:
    """Return the number that `number_to_json` wrote.

    Raises:
        TraceFileError: The value is not a number.

    Example:
        >>> number_from_json("-Infinity", "fill")
        -inf
    """
    if isinstance(value, str) and value in _NAMED:
        return _NAMED[value]
    # bool is an int in Python, but true is no number in the format
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _LARGEST:  # JSON may hold integers beyond every float
        refuse(f"{what} is {shown(value)}, which is no number", f"Give a number, or {', '.join(_NAMED)} in quotes.")
    number: float = value
    return number


def record_to_json(record: Any) -> str:
    """Return a record, including nested records, as JSON on one line.

    Args:
        record: a dataclass of numbers, texts, None, tuples and other records.
    """
    return json.dumps(_plain(record), allow_nan=False)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return number_to_json(value) if isinstance(value, float) else value


def record_from_json(kind: type[Record], document: Any, what: str) -> Record:
    """Return the record that `record_to_json` wrote.

    Args:
        kind: the record's class.
        document: parsed JSON.
        what: the record's name in error messages.

    Raises:
        TraceFileError: A field is missing, unknown or of another type.

    Example:
        >>> from sqrtdk.tracing.records import Stage
        >>> record_from_json(Stage, {"where": "q", "name": "rope"}, "a stage")
        Stage(where='q', name='rope', detail='', at=None)
    """
    read = _value(document, kind, what)
    assert isinstance(read, kind)
    return read


@functools.cache  # get_type_hints evaluates all annotations on each call
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _value(value: Any, hint: Any, what: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):  # `str | None`: records have no other unions
        choices = typing.get_args(hint)
        if value is None and types.NoneType in choices:
            return None
        (hint,) = (choice for choice in choices if choice is not types.NoneType)
        return _value(value, hint, what)
    if origin is tuple:  # always tuple[X, ...]
        if not isinstance(value, list):
            refuse(f"{what} is a {type(value).__name__}; a list belongs there")
        return tuple(_value(item, typing.get_args(hint)[0], f"{what}[{at}]") for at, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return _record(value, hint, what)
    if hint is float:
        return number_from_json(value, what)
    if type(value) is not hint:  # not isinstance: True is no int here
        refuse(f"{what} is {shown(value)}; {hint.__name__} belongs there")
    if hint is str and len(value) > MAX_TEXT:
        refuse(f"{what} has {len(value)} characters; at most {MAX_TEXT} are read")
    return value


def _record(value: Any, kind: Any, what: str) -> Any:
    if not isinstance(value, dict):
        refuse(f"{what} is a {type(value).__name__}; an object belongs there")
    hints, fields = _hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    if unknown := value.keys() - fields.keys():
        refuse(f"{what} has {shown(min(unknown))}, which is no field of {kind.__name__}")
    needed = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in needed if name not in value]:
        refuse(f"{what} lacks {missing[0]!r}")
    return kind(**{name: _value(item, hints[name], f"{what}.{name}") for name, item in value.items()})
