"""What a trace file may ask of its reader is bounded by its size, and a whole one is read however it comes."""

from __future__ import annotations

import io
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from sqrtdk.errors import TraceFileError
from sqrtdk.recording import limits, read_trace_file
from sqrtdk.recording.header import read_header, read_tensor
from tests.recording_files.forged import forge, refused


def _row_file(path: Path, rows: int, keys: int, width: int, calls: int = 1, **one: Any) -> Path:
    """Calls of one set of tensors; every one of them asks for rows x keys logits."""
    shapes = {"q": rows, "k": keys, "v": keys, "output": rows}
    tensors = {f"calls.0.{name}": ("F32", [1, 1, length, width]) for name, length in shapes.items()}
    same = {f"calls.{number}.{name}": f"calls.0.{name}" for number in range(1, calls) for name in shapes}
    listed = [{"site": "a", "index": number, **one} for number in range(calls)]
    return forge(path, tensors, {"calls": listed, "same": same})


@pytest.mark.parametrize(
    ("shape", "calls", "one"),
    [
        ((4096, 4096, 1), 1, {"terms": [{"name": "mask", "least": 0}]}),
        ((4096, 4096, 1), 1, {}),
        ((32768, 32768, 1), 1, {"terms": [{"name": "mask", "least": 0}]}),
        ((2048, 2048, 1), 1, {}),
        ((900, 900, 1), 64, {}),  # many calls of one set of tensors
        ((700, 700, 1), 1, {"terms": [{"name": "mask", "least": at, "greatest": at + 9} for at in range(60)]}),
    ],
)
def test_work_is_bounded_by_the_size_of_the_file(
    shape: tuple[int, int, int], calls: int, one: dict[str, Any], tmp_path: Path
) -> None:
    path = _row_file(tmp_path / "a", *shape, calls, **one)
    size = path.stat().st_size
    most = max(limits.LEAST_WORK, limits.WORK_A_BYTE * size)
    refused(path, f"in a file of {size} bytes; at most {most} are computed, 32 a byte")


@pytest.mark.parametrize(("shape", "calls"), [((512, 512, 8), 1), ((64, 8192, 16), 4), ((1000, 1000, 1), 1)])
def test_long_rows_of_wide_heads_are_read(shape: tuple[int, int, int], calls: int, tmp_path: Path) -> None:
    assert len(read_trace_file(_row_file(tmp_path / "a", *shape, calls)).calls) == calls


class Slow(io.FileIO):
    """A file system that gives a few bytes at once, as Linux gives at most 2^31 - 4096."""

    def readinto(self, into: Any) -> int | None:
        return super().readinto(memoryview(into)[:7])

    def read(self, count: int | None = -1) -> bytes:
        return super().read(7 if count is None or count < 0 else min(count, 7))


def test_a_file_that_comes_in_pieces_is_whole(tmp_path: Path) -> None:
    path = forge(tmp_path / "a")
    content = bytearray(path.read_bytes())
    content[-4:] = b"\x00\x00\x80\x3f"
    path.write_bytes(content)
    with Slow(path) as file:
        header = read_header(file, path.stat().st_size)
        whole = {name: read_tensor(file, header, spec) for name, spec in header.specs.items()}
    assert torch.equal(whole["calls.0.output"], read_trace_file(path).calls[0].output)
    assert whole["calls.0.output"].flatten()[-1] == 1
    with Slow(path) as file:  # it became shorter since its header was read
        os.truncate(path, path.stat().st_size - 3)
        with pytest.raises(TraceFileError, match=r"bytes were to come at \d+ and \d+ did: the file is cut off"):
            read_tensor(file, header, header.specs["calls.0.output"])


@pytest.mark.slow
def test_a_tensor_of_2_gib_is_read(tmp_path: Path) -> None:
    """More than one read gives; the file is sparse, the tensor is not."""
    rows = 2**22
    shapes = {"q": [1, 1, rows, 128], "k": [1, 1, 1, 128], "v": [1, 1, 1, 1], "output": [1, 1, rows, 1]}
    path = forge(tmp_path / "a", {f"calls.0.{name}": ("F32", shape) for name, shape in shapes.items()}, content=b"")
    os.truncate(path, path.stat().st_size + 4 * sum(map(math.prod, shapes.values())))
    (call,) = read_trace_file(path).calls
    assert call.query.values.nbytes == 2**31


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("q", {"q": [1, 2, 0, 4], "output": [1, 2, 0, 6]}),
        ("q", {"q": [1, 2, 3, 0], "k": [1, 1, 5, 0]}),
        ("q", {"q": [1, 0, 3, 4], "output": [1, 0, 3, 6]}),
        ("k", {"k": [1, 1, 0, 4], "v": [1, 1, 0, 6]}),
        ("k", {"k": [1, 0, 5, 4], "v": [1, 0, 5, 6]}),
        ("v", {"v": [1, 1, 5, 0], "output": [1, 2, 3, 0]}),
        ("q.projected", {"q.projected": [1, 2, 3, 0]}),
        ("q", {"q": [0, 2, 3, 4], "k": [0, 1, 5, 4], "v": [0, 1, 5, 6], "output": [0, 2, 3, 6]}),
    ],
)
def test_a_call_without_numbers_is_refused(name: str, shapes: dict[str, list[int]], tmp_path: Path) -> None:
    path = forge(tmp_path / "a", {f"calls.0.{part}": ("F32", shape) for part, shape in shapes.items()})
    refused(path, f"calls.0.{name} (B, H, L, E) {tuple(shapes[name])} has no numbers")
    with pytest.raises(TraceFileError, match="Leave a call without rows"):
        read_trace_file(path)
