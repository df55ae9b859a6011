"""Reads the header of a safetensors file, and checks all of it before a tensor is read.

The file is 8 bytes (the length of the header, little endian), the header (JSON) and the tensors, end to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sqrtdk.recording.format import DTYPE_BY_NAME, KEY, MESSAGES
from sqrtdk.recording.limits import (
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_NAME_CHARACTERS,
    MAX_SIDE,
    MAX_TENSORS,
    REPLACE,
    at_most,
    parse_trace_json,
    quote,
    refuse_file,
)

_TENSOR_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class Spec:
    """Dtype, shape and place of one tensor; `start` and `end` are byte offsets from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file, after it was checked."""

    specs: Mapping[str, Spec]
    document: str  # the JSON document of the trace
    size: int  # bytes before the first tensor
    sentences: str = ""  # see `recording.document`


def read_header(file: BinaryIO, size: int) -> Header:
    """Read and check the header.

    Args:
        file: positioned at its beginning.
        size: size of the file in bytes.

    Raises:
        TraceFileError: The file is not a safetensors file, not a trace file, damaged, or beyond a limit.
    """
    # safetensors: 8 bytes with the length of the header, the header as JSON, then the tensors.
    begin = _exactly(file, 8)
    length = int.from_bytes(begin, "little")
    if len(begin) < 8:
        refuse_file(f"not a safetensors file: it has {len(begin)} bytes, and the length of its header takes 8")
    if length > MAX_HEADER_BYTES:
        refuse_file(
            f"a header of {length} bytes; at most {MAX_HEADER_BYTES} are read",
            "If this is a trace file, record less: --calls. Other files begin with other bytes.",
        )
    if 8 + length > size:
        refuse_file(f"the header has {length} bytes and the file {size}: it is cut off", "Copy or write it again.")
    entries = parse_trace_json(bytes(_exactly(file, length)), "the header")
    if not isinstance(entries, dict):
        refuse_file(f"the header is a {type(entries).__name__}; it is an object of tensors")
    metadata = entries.pop("__metadata__", None)
    document = _document(metadata)
    sentences = metadata.get(MESSAGES, "")
    at_most(len(entries), MAX_TENSORS, "tensors")
    specs = {name: _spec(name, entry) for name, entry in entries.items()}
    _check_places(specs, size - 8 - length)
    return Header(specs, document, 8 + length, sentences if isinstance(sentences, str) else "")


def _document(metadata: Any) -> str:
    document = metadata.get(KEY) if isinstance(metadata, dict) else None
    if not isinstance(document, str):
        refuse_file(
            f"not a trace file: its metadata has no text {KEY!r}",
            "Write one with `sqrtdk record`, or with the writer in docs/en/trace-file.md.",
        )
    return document


def _spec(name: str, entry: Any) -> Spec:
    """Return the checked description of a tensor in the header.

    Raises:
        TraceFileError: A field is missing or wrong, or its size is not that of its shape.
    """
    if len(name) > MAX_NAME_CHARACTERS:
        refuse_file(f"a tensor's name of {len(name)} characters; at most {MAX_NAME_CHARACTERS} are read")
    what = f"the tensor {quote(name)}"
    if not isinstance(entry, dict) or set(entry) != _TENSOR_FIELDS:
        refuse_file(f"{what} is not described by {', '.join(sorted(_TENSOR_FIELDS))}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BY_NAME:
        refuse_file(f"{what} has dtype {quote(dtype)}", f"These are read: {', '.join(DTYPE_BY_NAME)}.")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        refuse_file(f"{what} has a shape or offsets that are no counts: {quote(shape)}, {quote(offsets)}")
    at_most(len(shape), MAX_DIMENSIONS, f"dimensions of {what}")
    at_most(max(shape, default=0), MAX_SIDE, f"entries in a dimension of {what}")
    needed = math.prod(shape) * DTYPE_BY_NAME[dtype].itemsize
    start, end = offsets
    if end - start != needed:
        refuse_file(f"{what}, {dtype} {tuple(shape)}, needs {needed} bytes and has {end - start}")
    return Spec(DTYPE_BY_NAME[dtype], tuple(shape), start, end)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_places(specs: Mapping[str, Spec], size: int) -> None:
    """Check that each tensor begins where the previous one ends, and that the last one ends with the file."""
    # Without gaps or overlaps, as the format demands: two tensors that share bytes could make a small file claim a
    # large one.
    place, before = 0, "the header"
    # by end as well: an empty tensor begins where the next one does and has to come first
    for name, spec in sorted(specs.items(), key=lambda item: (item[1].start, item[1].end)):
        if spec.start != place:
            how = "overlap" if spec.start < place else f"leave {spec.start - place} bytes that are nobody's"
            refuse_file(f"{before} and the tensor {quote(name)} {how}: it begins at {spec.start}, not {place}")
        place, before = spec.end, f"the tensor {quote(name)}"
    if place > size:
        refuse_file(
            f"the tensors have {place} bytes and {size} are there: the file is cut off", "Copy or write it again."
        )
    if place < size:
        refuse_file(f"{size - place} bytes follow the last tensor", REPLACE)


def read_tensor(file: BinaryIO, header: Header, spec: Spec) -> Tensor:
    """Read one tensor, whose size `read_header` checked against the file's.

    Raises:
        TraceFileError: The file has been shortened since.
    """
    count = spec.end - spec.start
    if not count:
        return torch.empty(spec.shape, dtype=spec.dtype)
    file.seek(header.size + spec.start)
    content = _exactly(file, count)
    if len(content) < count:
        refuse_file(
            f"{count} bytes were to come at {spec.start} and {len(content)} did: the file is cut off",
            "Copy or write it again.",
        )
    return torch.frombuffer(content, dtype=torch.uint8).view(spec.dtype).reshape(spec.shape)


def _exactly(file: BinaryIO, count: int) -> bytearray:
    """Read `count` bytes, or all that are left. One read returns at most 2^31 - 4096 bytes on Linux, so it loops."""
    content = bytearray(count)  # writable, as torch.frombuffer wants it
    whole = memoryview(content)
    taken = 0
    while taken < count and (more := file.readinto(whole[taken:])):  # type: ignore[attr-defined]  # BinaryIO lacks it
        taken += more
    whole.release()  # a bytearray can't shrink while a view of it exists
    del content[taken:]
    return content
