"""The ids and values of the sentences in a trace file, so that a reader can say them in another language.

The document of a file holds sentences in English. They stand again in a text of their own in the file's metadata, which
readers of other versions do not look at: an object of sentence -> `message_id` and `values`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from sqrtdk.messages import said_again, table_of
from sqrtdk.recording.format import MESSAGES
from sqrtdk.recording.limits import parse_trace_json
from sqrtdk.recording.records import TraceMetadata
from sqrtdk.tracing.tensors import CallTensors


def sentences_to_json(calls: Sequence[CallTensors], metadata: TraceMetadata) -> str:
    """Return the JSON text with the ids and values of the sentences in a file, so that they can be read in Chinese.

    Returns:
        The JSON text, or "" if no sentence is from the catalogue.
    """
    table = table_of([metadata.not_measured, *((call.missing, call.call) for call in calls)])
    return json.dumps(table) if table else ""


def with_sentences(
    text: str, calls: Sequence[CallTensors], metadata: TraceMetadata
) -> tuple[tuple[CallTensors, ...], TraceMetadata]:
    """Return calls and metadata of a file with its sentences as messages.

    Args:
        text: what `sentences_to_json` returned, of an untrusted file.
        calls: as they were read.
        metadata: as it was read.
    """
    table = parse_trace_json(text, f"the metadata {MESSAGES!r}") if text else {}
    again = tuple(
        dataclasses.replace(call, missing=said_again(call.missing, table), call=said_again(call.call, table))
        for call in calls
    )
    return again, dataclasses.replace(metadata, not_measured=said_again(metadata.not_measured, table))
