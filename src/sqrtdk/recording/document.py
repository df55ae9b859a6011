"""The JSON document of a trace file, as records with their limits. A field that is null counts as absent.

`recording.decode` joins it with the tensors; docs/en/trace-file.md describes it for other programs.

Its sentences are English. Their ids and values are in a second JSON text of the metadata, sentence -> `message_id` and
`values`, from which a reader can say them in another language. Readers of other versions do not look at it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from sqrtdk.messages import said_again, table_of
from sqrtdk.recording.format import (
    FLOAT_NAMES,
    FORMULA_TERMS,
    KEY,
    MESSAGES,
    SCHEMA_VERSION,
    SHARD_VERSION,
    TENSOR_LAYOUTS,
)
from sqrtdk.recording.limits import (
    MAX_DIMENSIONS,
    MAX_NAME_CHARACTERS,
    MAX_STEPS,
    MAX_TEXT_CHARACTERS,
    MAX_TRACE_CALLS,
    parse_trace_json,
    quote,
    refuse_file,
    trace_record,
)
from sqrtdk.recording.records import Cut, Shard, TraceMetadata
from sqrtdk.tracing.records import NotMeasured
from sqrtdk.tracing.tensors import CallTensors

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
Number = float | int  # an int stays one
Count = Annotated[int, Meta(ge=0)]
FloatName = Annotated[str, Meta(pattern=f"^({'|'.join(FLOAT_NAMES)})$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """One step of a vector between its projection and the product, as the file's JSON has it."""

    name: Text
    detail: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorEntry:
    """The vector q, k or v of a call, as the file's JSON has it.

    `docs/en/trace-file.md` describes the fields of this and the other entries.
    """

    factor: Number | None = None
    steps: Annotated[tuple[StepEntry, ...], Meta(max_length=MAX_STEPS)] | None = None
    projection: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskEntry:
    """A mask that the JSON describes in words of the format, such as "causal", rather than by a tensor."""

    shape: Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMENSIONS)] | None = None
    least: int | None = None
    greatest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TermEntry(MaskEntry):
    """A term that is added to the logits, as the file's JSON has it."""

    name: Annotated[str, Meta(pattern=f"^({'|'.join(FORMULA_TERMS)})$")]
    value: Number | None = None
    detail: Text | None = None
    fill: Number | None = None
    added: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEntry:
    """One attention call, as the file's JSON has it."""

    site: Name
    index: Count | None = None
    layout: Annotated[str, Meta(pattern=f"^({'|'.join(TENSOR_LAYOUTS)})$")] | None = None
    q: VectorEntry | None = None
    k: VectorEntry | None = None
    v: VectorEntry | None = None
    terms: Annotated[tuple[TermEntry, ...], Meta(max_length=MAX_STEPS)] | None = None
    kept: MaskEntry | None = None
    dropout: Number | None = None
    dtype: FloatName | None = None
    logits_dtype: FloatName | None = None
    weights_dtype: FloatName | None = None
    missing: Text | None = None
    cut: Cut | None = None
    shard: Shard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The whole JSON document of a trace file.

    Its field `same` maps names of tensors to the names of equal tensors, so that each is stored once.
    """

    schema_version: int
    calls: Annotated[tuple[CallEntry, ...], Meta(max_length=MAX_TRACE_CALLS)]
    same: dict[Name, str] | None = None
    writer: Text | None = None
    model: Text | None = None
    module_class: Text | None = None
    dtype: Text | None = None
    device: Text | None = None
    attn: Text | None = None
    packages: Annotated[dict[str, Text | None], Meta(max_length=200)] | None = None
    not_measured: Annotated[tuple[NotMeasured, ...], Meta(max_length=MAX_TRACE_CALLS)] | None = None


def parse_document(text: str) -> Document:
    """Return the JSON document of a trace file.

    Raises:
        TraceFileError: The text is not such a document, its version is unknown, or a field is missing, unknown, of
            another type or beyond a limit.
    """
    what = f"the metadata {KEY!r}"
    document: Any = parse_trace_json(text, what)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(document, dict) or type(version) is not int:
        refuse_file(f"{what} has no whole number 'schema_version'", f"It is {SCHEMA_VERSION}.")
    # Before the fields are read: a later version may have fields that would be refused as unknown, with a misleading
    # message.
    if version not in (SCHEMA_VERSION, SHARD_VERSION):
        refuse_file(
            f"the file is of version {quote(version)} of the format; this sqrtdk reads versions {SCHEMA_VERSION} and "
            f"{SHARD_VERSION}",
            "Install a newer sqrtdk." if version > SHARD_VERSION else "Write the file again.",
        )
    found = trace_record(Document, document, "the trace")
    if version < SHARD_VERSION and any(call.shard is not None for call in found.calls):
        refuse_file(
            f"a call has a 'shard', and the file is of version {version} of the format",
            f"With a shard, 'schema_version' is {SHARD_VERSION}.",
        )
    return found


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
