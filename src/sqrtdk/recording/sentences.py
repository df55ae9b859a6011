"""The ids and values of the sentences in a trace file, so that a reader can say them in another language.

The document of a file holds sentences in English. They stand again in a text of their own in the file's metadata, which
readers of other versions do not look at: an object of sentence -> `message_id` and `values`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqrtdk.messages import Message, fields, recorded
from sqrtdk.recording.format import MESSAGES
from sqrtdk.recording.limits import parse_json
from sqrtdk.recording.records import TraceMetadata
from sqrtdk.tracing.tensors import CallTensors


def sentences_to_json(calls: Sequence[CallTensors], metadata: TraceMetadata) -> str:
    """Return the text of the metadata; "" if no sentence is of the catalogue."""
    found = [metadata.not_measured, *((call.missing, call.call) for call in calls)]
    table = {str(message): fields(message) for message in _messages(found)}
    return json.dumps(table) if table else ""


def said_again(text: str, calls: Sequence[CallTensors], metadata: TraceMetadata) -> tuple[Any, ...]:
    """Return calls and metadata of a file with its sentences as messages.

    Args:
        text: what `sentences_to_json` returned, of an untrusted file. A sentence without a fitting entry stays as it
            is.
        calls: as they were read.
        metadata: as it was read.
    """
    table = parse_json(text, f"the metadata {MESSAGES!r}") if text else {}
    if not isinstance(table, dict) or not table:
        return tuple(calls), metadata
    again = tuple(
        dataclasses.replace(call, missing=_again(call.missing, table), call=_again(call.call, table)) for call in calls
    )
    return again, dataclasses.replace(metadata, not_measured=_again(metadata.not_measured, table))


def _messages(value: Any) -> Iterator[Message]:
    if isinstance(value, Message):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _messages(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _messages(getattr(value, field.name))


def _again(value: Any, table: Mapping[str, Any]) -> Any:
    made: Any = value
    if isinstance(value, str):
        entry = table.get(value)
        made = recorded(value, entry.get("message_id"), entry.get("values")) if isinstance(entry, dict) else value
    elif isinstance(value, tuple):
        made = tuple(_again(item, table) for item in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _again(getattr(value, field.name), table) for field in dataclasses.fields(value)}
        made = dataclasses.replace(value, **parts)
    return made
