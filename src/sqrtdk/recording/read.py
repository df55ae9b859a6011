"""Reads a trace file. The file is untrusted: everything is checked before it is used."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sqrtdk.errors import SqrtdkError, TraceFileError, short_text
from sqrtdk.messages import Message
from sqrtdk.models.limits import check_file
from sqrtdk.recording.decode import decode_call
from sqrtdk.recording.document import Document, parse_document, with_sentences
from sqrtdk.recording.format import INPUT_PREFIX, NAME_BY_DTYPE
from sqrtdk.recording.header import Header, Spec, read_header, read_tensor
from sqrtdk.recording.limits import MAX_TRACE_BYTES, quote, refuse_file
from sqrtdk.recording.records import Bounds, Cut, Shard, TraceFile, TraceMetadata
from sqrtdk.recording.source import TensorSource, check_same
from sqrtdk.tracing.tensors import CallTensors

_MAX_TRACE_NOTES = 20


def read_trace_file(path: str | Path, *, shapes: bool = False) -> TraceFile:
    """Read a trace file into memory.

    Nothing in it is executed. Sizes, names and shapes are checked before a tensor is read; docs/en/trace-file.md lists
    the limits.

    Args:
        path: The file.
        shapes: Whether tensors of calls have shapes alone, on the meta device: a large file takes no memory then.

    Raises:
        TraceFileError: The file can't be read, is not a trace file, is damaged, has an unknown version or exceeds a
            limit, or its tensors don't fit one another.

    Example:
        >>> read_trace_file("/dev/null")
        Traceback (most recent call last):
        sqrtdk.errors.TraceFileError: '/dev/null' can't be read as a trace file: it is not a regular file
        Hint: Copy its content to a file, and give that.
    """
    path = Path(path)
    try:
        check_file(path, "it", MAX_TRACE_BYTES)
        with open(path, "rb", buffering=0) as file:  # reads go straight into the tensors' memory
            return _read(path, file, shapes)
    except (SqrtdkError, OSError) as error:
        hint = error.hint if isinstance(error, SqrtdkError) else "Check the path and its permissions."
        reason = short_text(error) if isinstance(error, SqrtdkError) else error.strerror or short_text(error)
        raise TraceFileError(f"{str(path)!r} can't be read as a trace file: {reason}", hint=hint) from error


def _read(path: Path, file: BinaryIO, shapes: bool) -> TraceFile:
    header = read_header(file, path.stat().st_size)
    document = parse_document(header.document)
    check_calls(header, document)  # all shapes first: an unfit file costs no memory

    def load(spec: Spec) -> Tensor:
        return read_tensor(file, header, spec)

    return _take(path, header, document, None if shapes else load, load)


def check_calls(header: Header, document: Document) -> None:
    """Check all that can be checked of a file's calls without reading the values of a tensor.

    Raises:
        TraceFileError: A field or tensor is missing, unknown, or does not fit the others.
    """
    _take(Path(), header, document, None)


def _take(path: Path, header: Header, document: Document, load: Any, load_small: Any = None) -> TraceFile:
    """Return the decoded calls of a file; without `load` the values are not read, and only checks are made."""
    same = document.same or {}
    check_same(same, header)
    source = TensorSource(header, same, load, load_small)
    calls: list[CallTensors] = []
    cuts: list[Cut | None] = []
    shards: list[Shard | None] = []
    bounds: list[tuple[Bounds | None, ...]] = []
    notes: list[str] = []
    count: Counter[str] = Counter()
    places: set[tuple[str, int]] = set()
    for number, entry in enumerate(document.calls):
        # without an index, the next one at its site
        call, cut, shard, bound = decode_call(entry, number, count[entry.site], source)
        if (call.site, call.index) in places:
            refuse_file(
                f"two calls are at site {quote(call.site)} with index {call.index}",
                "Count the calls of a site from 0 on, or leave 'index' out.",
            )
        places.add((call.site, call.index))
        count[call.site] += 1
        calls.append(call)
        cuts.append(cut)
        shards.append(shard)
        bounds.append(bound)
        if load is not None:
            notes += _oddities(call)
    names = [(name, name.removeprefix(INPUT_PREFIX)) for name in source.prefixed(INPUT_PREFIX)]
    inputs = {
        short: tensor
        for name, short in names
        if (tensor := source.take(name, frozenset(NAME_BY_DTYPE), small=True)) is not None
    }
    spoken, metadata = with_sentences(header.sentences, calls, _metadata(document))
    # Tensors that no call took are refused: a misspelt name would otherwise be lost without a word.
    source.end()
    source.check_work()
    if len(notes) > _MAX_TRACE_NOTES:
        notes = [*notes[:_MAX_TRACE_NOTES], Message("recording.more_tensors", count=len(notes) - _MAX_TRACE_NOTES)]
    parts = tuple(cuts), inputs, tuple(notes), tuple(shards), tuple(bounds)
    return TraceFile(path, document.schema_version, metadata, spoken, *parts)


def _metadata(document: Document) -> TraceMetadata:
    return TraceMetadata(
        writer=document.writer or "",
        model=document.model or "",
        module_class=document.module_class or "",
        dtype=document.dtype or "",
        device=document.device or "",
        attn=document.attn,
        packages={name: version or "" for name, version in (document.packages or {}).items()},
        not_measured=document.not_measured or (),
    )


def _oddities(call: CallTensors) -> list[str]:
    """Return notes on NaN and infinity in a call's tensors, which are read as they are."""
    tensors = {"q": call.query.values, "k": call.key.values, "v": call.value.values, "output": call.output}
    return [note for name, tensor in tensors.items() if (note := _oddity(f"{call.site}#{call.index}", name, tensor))]


def _oddity(place: str, name: str, tensor: Tensor) -> str | None:
    values = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # isfinite lacks float8
    if bool(torch.isfinite(values).all()):
        return None
    lost = int(values.isnan().sum())
    infinite = int(values.isinf().sum())
    numbers = {"lost": lost, "infinite": infinite, "all": values.numel()}
    return Message("recording.tensor_not_finite", name=name, place=quote(place), **numbers)
