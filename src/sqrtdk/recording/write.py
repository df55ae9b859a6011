"""Writes a trace file: checked as a reader will check it, and on disk whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sqrtdk._files import check_writable, write_parts
from sqrtdk.errors import OutputError
from sqrtdk.recording.document import parse_document, sentences_to_json
from sqrtdk.recording.encode import Sheet, encode_call, number_sites
from sqrtdk.recording.format import INPUT_PREFIX, KEY, MESSAGES, NAME_BY_DTYPE, SCHEMA_VERSION, SHARD_VERSION
from sqrtdk.recording.header import Header, Spec
from sqrtdk.recording.limits import (
    MAX_HEADER_BYTES,
    MAX_NAME_CHARACTERS,
    MAX_TENSORS,
    MAX_TEXT_CHARACTERS,
    MAX_TRACE_BYTES,
    MAX_TRACE_CALLS,
    at_most,
)
from sqrtdk.recording.read import check_calls
from sqrtdk.recording.records import Cut, Recording, Shard, TraceMetadata
from sqrtdk.tracing.tensors import CallTensors

_BYTES_A_WRITE = 2**26  # bytes written at once; a signal such as Ctrl-C waits for no more than this


def write_trace_file(
    path: str | Path,
    calls: Sequence[CallTensors],
    metadata: TraceMetadata | None = None,
    *,
    cuts: Sequence[Cut | None] | None = None,
    shards: Sequence[Shard | None] | None = None,
    model_inputs: Mapping[str, Tensor] | None = None,
    projections: bool = False,
    force: bool = False,
    announce: Callable[[str], None] = lambda text: None,
) -> Recording:
    """Write calls to a trace file, whole or not at all.

    `read_trace_file` returns the same calls bit for bit. Without `projections`, their projections are None.

    Args:
        path: The file; its directory must exist.
        calls: The calls; no two with the same site and index.
        metadata: Model and program; None leaves it empty.
        cuts: Parallel to `calls`: which part of the attention each holds.
        shards: Parallel to `calls`: which part of the attention over all ranks this rank had; None: one process.
        model_inputs: Input tensors of the model by name.
        projections: Whether to write weights and inputs of the projections too.
        force: Whether to replace an existing file.
        announce: Called with the file's size before anything is written.

    Raises:
        OutputError: The file exists, can't be written, or does not fit on the disk.
        InvalidValueError: A tensor has no values or a dtype that the format lacks, or two calls share site and index.
        TraceFileError: The file would exceed a reader's limits, or the tensors of a call don't fit one another.

    Example:
        >>> import tempfile
        >>> from sqrtdk.recording import read_trace_file
        >>> from sqrtdk.tracing.tensors import Vector
        >>> q = Vector(torch.ones(1, 2, 3, 4))
        >>> call = CallTensors("layers.0.attn", 0, q, q, q, q.values, terms=None)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = write_trace_file(f"{folder}/a.safetensors", [call])
        ...     read_trace_file(f"{folder}/a.safetensors").calls[0].site
        'layers.0.attn'
    """
    path = Path(path)
    check_writable(path, force)
    number_sites(calls)
    at_most(len(calls), MAX_TRACE_CALLS, "calls")
    metadata = metadata or TraceMetadata()
    sheet = Sheet()
    entries = [
        encode_call(call, number, sheet, projections=projections, cut=cut, shard=shard)
        for number, (call, cut, shard) in enumerate(
            zip(calls, cuts or [None] * len(calls), shards or [None] * len(calls), strict=True)
        )
    ]
    for name, tensor in (model_inputs or {}).items():
        sheet.put(INPUT_PREFIX + name, tensor)
    tensors, same = _without_copies(sheet.tensors)
    version = SHARD_VERSION if any(shards or ()) else SCHEMA_VERSION
    document = {"schema_version": version, **_metadata_fields(metadata), "calls": entries, "same": same}
    header, begin = _lay_out(tensors, document, sentences_to_json(calls, metadata))
    check_calls(header, parse_document(header.document))  # a file that we can't read must not be written
    size = sum(len(part) for part in begin) + max((spec.end for spec in header.specs.values()), default=0)
    at_most(size, MAX_TRACE_BYTES, "bytes")
    announce(f"{path.name}: {_count(len(calls), 'call')}, {_bytes(size)}")
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise OutputError(
            f"cannot write {path}: it takes {_bytes(size)}, and {_bytes(free)} are free",
            hint="Record less: --calls, --rows or --heads; or choose another disk.",
        )
    write_parts(path, _parts(begin, header, tensors), force)
    return Recording(path, len(calls), size, metadata)


def check_limits(call: CallTensors, *, projections: bool = False) -> None:
    """Check that a call, once written, could be read.

    Raises:
        InvalidValueError: See `write_trace_file`.
        TraceFileError: See `write_trace_file`.
    """
    sheet = Sheet()
    entry = encode_call(call, 0, sheet, projections=projections, cut=None)
    document = {"schema_version": SCHEMA_VERSION, "calls": [entry]}
    header, _ = _lay_out(sheet.tensors, document)
    check_calls(header, parse_document(header.document))


def _metadata_fields(metadata: TraceMetadata) -> dict[str, Any]:
    entries = {name: value for name, value in dataclasses.asdict(metadata).items() if value}
    if metadata.packages:
        # a reader refuses longer texts, and one odd version must not cost the recording
        entries["packages"] = {name: text[:MAX_TEXT_CHARACTERS] for name, text in metadata.packages.items()}
    if metadata.not_measured:
        entries["not_measured"] = [
            {
                name: value[:MAX_TEXT_CHARACTERS]
                for name, value in dataclasses.asdict(entry).items()
                if value is not None and name != "code"  # an older reader may not know it
            }
            for entry in metadata.not_measured[:MAX_TRACE_CALLS]
        ]
    return entries


def _without_copies(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors without duplicates, and name -> name of the equal tensor that is kept."""
    shapes = Counter((tensor.dtype, tensor.shape) for tensor in tensors.values())
    stored: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        place = name
        if tensor.numel() and shapes[tensor.dtype, tensor.shape] > 1:  # hash only what can have an equal
            digest = hashlib.sha256(_content(tensor)).digest()
            # equal bytes under another dtype or shape are other numbers
            place = first.setdefault((tensor.dtype, tensor.shape, digest), name)
        if place == name:
            stored[name] = tensor
        else:
            same[name] = place
    return stored, same


def _lay_out(
    tensors: Mapping[str, Tensor], document: Mapping[str, Any], sentences: str = ""
) -> tuple[Header, list[bytes]]:
    """Return the header and the first bytes of the file. The widest dtypes come first, so that all are aligned."""
    at_most(len(tensors), MAX_TENSORS, "tensors")
    specs: dict[str, Spec] = {}
    place = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        at_most(len(name), MAX_NAME_CHARACTERS, f"characters in the name {name[:40]!r}...")
        end = place + math.prod(tensor.shape) * tensor.dtype.itemsize
        specs[name] = Spec(tensor.dtype, tuple(tensor.shape), place, end)
        place = end
    text = json.dumps(document, allow_nan=False)
    entries: dict[str, Any] = {"__metadata__": {KEY: text} | ({MESSAGES: sentences} if sentences else {})}
    for name, spec in specs.items():
        shape, offsets = list(spec.shape), [spec.start, spec.end]
        entries[name] = {"dtype": NAME_BY_DTYPE[spec.dtype], "shape": shape, "data_offsets": offsets}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # so that the tensors begin aligned to 8 bytes
    at_most(len(header), MAX_HEADER_BYTES, "bytes in the header")
    return Header(specs, text, 8 + len(header)), [len(header).to_bytes(8, "little"), header]


def _parts(begin: Sequence[bytes], header: Header, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield from begin
    for name in header.specs:
        content = _content(tensors[name])
        for start in range(0, len(content), _BYTES_A_WRITE):
            yield content[start : start + _BYTES_A_WRITE]


def _content(tensor: Tensor) -> memoryview:
    """Return the values of a tensor in order, as bytes."""
    whole = tensor.detach().to("cpu").contiguous().reshape(-1)
    return whole.view(torch.uint8).numpy().data if whole.numel() else memoryview(b"")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _bytes(count: int) -> str:
    """Format a number of bytes.

    Example:
        >>> _bytes(2_500_000)
        '2.5 MB'
    """
    size = float(count)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
