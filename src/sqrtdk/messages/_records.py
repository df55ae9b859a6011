"""The sentences of records that are written as JSON: the text alone where it stands, its id and values in a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from sqrtdk.messages._message import Message, fields, recorded


def table_of(value: Any) -> dict[str, dict[str, Any]]:
    """Return `fields` of each message in dataclasses and containers, by its English text.

    Example:
        >>> table_of({"how": Message("joins.same"), "site": "h.0"})
        {'the same': {'message_id': 'joins.same', 'values': {}}}
    """
    return {str(message): fields(message) for message in _messages(value)}


def said_again(value: Any, table: object) -> Any:
    """Return dataclasses and tuples that were read back, with their sentences as messages.

    Args:
        value: as it was read; anything but dataclasses, tuples and texts in it stays as it is.
        table: what `table_of` returned, of an untrusted file; a sentence without a fitting entry stays as it is.

    Example:
        >>> said_again(("the same", "h.0"), table_of(Message("joins.same")))[0].said("zh")
        '相同'
    """
    return _again(value, table) if isinstance(table, dict) and table else value


def _messages(value: Any) -> Iterator[Message]:
    if isinstance(value, Message):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _messages(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _messages(getattr(value, field.name))


def _again(value: Any, table: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        entry = table.get(value)
        return recorded(value, entry.get("message_id"), entry.get("values")) if isinstance(entry, dict) else value
    if isinstance(value, tuple):
        return tuple(_again(item, table) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _again(getattr(value, field.name), table) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value
