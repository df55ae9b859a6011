"""Trace files that are written by hand, sound but for what a test plants in one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sqrtdk.errors import TraceFileError
from sqrtdk.recording import read_trace_file
from sqrtdk.recording.format import DTYPE_BY_NAME

Tensors = dict[str, tuple[str, list[int]]]
SIZES = {name: dtype.itemsize for name, dtype in DTYPE_BY_NAME.items()}


def forge(
    path: Path,
    tensors: Tensors | None = None,
    document: Any = None,
    *,
    header: Callable[[dict[str, Any]], Any] = lambda header: header,
    content: bytes | None = None,
    text: str | None = None,
) -> Path:
    """Write a trace file by hand: two heads of q, one of k, of zeros; `document` is what differs of its one call."""
    tensors = {**GOOD, **(tensors or {})}
    entries: dict[str, Any] = {}
    place = 0
    for name, (dtype, shape) in tensors.items():
        end = place + math.prod(shape) * SIZES.get(dtype, 4)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, end]}
        place = end
    whole = {"schema_version": 1, "calls": [{"site": "a"}]}
    if isinstance(document, dict):
        whole = {**whole, **document}
    told = json.dumps(whole) if text is None else text
    made = header({"__metadata__": {"sqrtdk_trace": told}, **entries})
    raw = made if isinstance(made, bytes) else json.dumps(made).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + (bytes(place) if content is None else content))
    return path


GOOD: Tensors = {
    "calls.0.q": ("F32", [1, 2, 3, 4]),
    "calls.0.k": ("F32", [1, 1, 5, 4]),
    "calls.0.v": ("F32", [1, 1, 5, 6]),
    "calls.0.output": ("F32", [1, 2, 3, 6]),
}


def refused(path: Path, message: str) -> None:
    """A file is refused with one clear sentence, and a hint."""
    with pytest.raises(TraceFileError) as caught:
        read_trace_file(path)
    begin, _, text = str(caught.value).partition(
        " can't be read as a trace file: "
    )  # the path has the test's name in it
    assert begin == repr(str(path))
    assert message in text
    assert caught.value.hint
    assert len(text) < 600
    assert text.isprintable()
