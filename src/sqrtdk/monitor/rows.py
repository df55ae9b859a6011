"""Alarms, and how a step ran, as rows of the records and back.

The records hold sentences in English, beside each the id and the values of its `Message`, so that a reader can say it
in another language. Records of older versions hold the sentence alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqrtdk._records import parse_json
from sqrtdk.errors import RunFolderError
from sqrtdk.messages import fields, recorded
from sqrtdk.monitor.samples import Alarm, not_measured

RECORDED_CHARACTERS = 2000  # most characters of a recorded text
MAX_VALUES_BYTES = 8000  # most bytes of the values of a sentence; one with more is recorded in English only
_AS_THEY_ARE = ("step", "site", "index", "head", "name", "severity", "value", "bar", "source", "text")
_OLD_UNMEASURED_PREFIX = "not measured: "  # `how` in records of older versions


def stored_text(text: str) -> str:
    """Return a text as the records store it: at most `RECORDED_CHARACTERS` characters, and valid UTF-8."""
    return text[:RECORDED_CHARACTERS].encode("utf-8", "replace").decode()


def alarm_row(alarm: Alarm) -> dict[str, Any]:
    """Return the row of an alarm in the table of alarms.

    Returns:
        Values by the names of `ALARM_COLUMNS`, texts cut as by `stored_text`; `message_id`, `values` and `source_id`
        say which sentences of the catalogue they are.
    """
    values = {name: getattr(alarm, name) for name in _AS_THEY_ARE}
    row = {name: stored_text(value) if isinstance(value, str) else value for name, value in values.items()}
    return row | _message(alarm.text) | {"source_id": _message(alarm.source)["message_id"]}


def alarm_of(row: Mapping[str, Any]) -> Alarm:
    """Return the alarm of a row.

    Example:
        >>> alarm = Alarm("idle", "warn", 1, not_measured("x"), "a report")
        >>> alarm_of(alarm_row(alarm)) == alarm, alarm_of(alarm_row(alarm)).text.said("zh")
        (True, '未测量：x')
    """
    text = _sentence(row["text"], row)
    source = recorded(row["source"], row["source_id"], {})  # the sources of bars have no values
    return Alarm(**{name: row[name] for name in _AS_THEY_ARE} | {"text": text, "source": source})


def how_row(how: str) -> dict[str, Any]:
    """Return the columns of `STEP_COLUMNS` that say how a step ran.

    Returns:
        "how", the text, and "message_id" and "values", from which it can be said in another language.
    """
    return {"how": stored_text(how)} | _message(how)


def how_of(row: Mapping[str, Any]) -> str | None:
    """Return how the step of a row of the table of steps ran; None if the row does not say.

    It is a `Message`, which has both languages, if the row has an id of the catalogue, and otherwise the stored text.
    """
    text = row["how"]
    if text is None:
        return None
    how = _sentence(text, row)
    return (
        not_measured(text.removeprefix(_OLD_UNMEASURED_PREFIX))
        if how is text and text.startswith(_OLD_UNMEASURED_PREFIX)
        else how
    )


def _message(sentence: str) -> dict[str, str | None]:
    """Return the columns `message_id` and `values`, the latter as JSON."""
    made = fields(sentence)
    values = None if made["values"] is None else json.dumps(made["values"], ensure_ascii=False)
    encoded = None if values is None else values.encode("utf-8", "replace")
    if encoded is None or len(encoded) > MAX_VALUES_BYTES:
        return {"message_id": None, "values": None}
    return {"message_id": made["message_id"], "values": encoded.decode()}


def _sentence(text: str, row: Mapping[str, Any]) -> str:
    if row["message_id"] is None or row["values"] is None:
        return text
    try:
        values = parse_json(row["values"], "the values of a sentence", RunFolderError, "")
    except RunFolderError:  # an untrusted record: what it says in English stays
        return text
    return recorded(text, row["message_id"], values)
