"""Reads a dump of one evaluation of ggml, which a program with any build of llama.cpp wrote (.ggmldump, version 1).

A dump is a sequence of records. Each is one line of JSON, and after it as many bytes as its "bytes" says. The first
record says what follows, the last that nothing is missing:

    {"sqrtdk_ggml_dump": 1, "producer": "...", "metadata": {"general.architecture": "llama"}, "vocabulary": 32000}
    {"tensor": ID, "name": "token_embd.weight", "op": "NONE", "type": "q8_0", "ne": [...], "nb": [...], "bytes": N}
    {"node": ID, "name": "Qcur-0", "op": "ROPE", "type": "f32", "ne": [...], "nb": [...], "params": [...],
     "src": [ID, ...], "root": ID, "offset": 0}
    {"output": ID, "bytes": N}
    {"end": NODES}

`examples/llama_cpp_dump` writes it, in C++ without a library, and the page "Port to llama.cpp" describes it. A dump is
data alone: nothing in it runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from sqrtdk.errors import INTERRUPTS, ModelError, short_text
from sqrtdk.frontends.ggml.graph import GgmlRun, GgmlTensor, bytes_of, plain_array
from sqrtdk.messages import Message

VERSION = 1
_LONGEST_LINE = 2**16  # bytes of a record's JSON
_MOST_RECORDS = 2**20
_MOST_TENSOR_BYTES = 2**40  # of one tensor
_LONGEST_AXIS = 2**31
_LARGEST_TENSOR = 2**31  # of one tensor


class _OddError(Exception):
    """What no dump holds."""


def read_dump(path: str | os.PathLike[str]) -> GgmlRun:
    """Return the evaluation that a dump holds.

    Args:
        path: The file.

    Raises:
        ModelError: It can't be read, is cut off, of another version, or no dump.
        MissingExtraError: It has quantised weights, and gguf is not installed.
    """
    try:
        with open(path, "rb") as file:
            return _run(file, os.path.basename(path))
    except OSError as error:
        reason = short_text(error)
    except _OddError as error:
        reason = str(error)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StopIteration, MemoryError) as error:
        # JSON, numpy and gguf on odd values
        reason = f"{type(error).__name__}: {short_text(error)}"
    raise ModelError(
        Message("frontends.odd_dump", path=repr(str(path)[:200]), reason=reason), hint=Message("frontends.hint.dump")
    )


def _run(file: BinaryIO, title: str) -> GgmlRun:
    records = _records(file)
    head, _ = next(records, ({}, b""))
    if head.get("sqrtdk_ggml_dump") != VERSION:
        raise _OddError(f"version {head.get('sqrtdk_ggml_dump')}, and {VERSION} is read")
    nodes: list[GgmlTensor] = []
    leaves: dict[int, GgmlTensor] = {}
    data: dict[int, Any] = {}
    output: Any = None
    complete = False
    for record, memory in records:
        if "end" in record:
            complete = record["end"] == len(nodes)
            break
        if "output" in record:
            last = next(node for node in reversed(nodes) if node.key == record["output"])
            output = plain_array(last, memory).astype(np.float32)
            continue
        tensor = _tensor(record)
        if "node" in record:
            nodes.append(tensor)
        else:
            leaves[tensor.key] = tensor
            if memory:
                data[tensor.key] = plain_array(tensor, memory)
    if not complete or output is None or not nodes:
        raise _OddError("it is cut off")
    _refuse_dangling(nodes, leaves)
    metadata = {str(key)[:200]: str(value)[:300] for key, value in dict(head.get("metadata") or {}).items()}
    vocabulary = head.get("vocabulary")
    return GgmlRun(
        title, metadata, tuple(nodes), leaves, data, output,
        vocabulary if isinstance(vocabulary, int) and vocabulary > 0 else 0, str(head.get("producer", "ggml"))[:200],
    )  # fmt: skip


def _records(file: BinaryIO) -> Iterator[tuple[dict[str, Any], bytes]]:
    size = os.fstat(file.fileno()).st_size
    for _ in range(_MOST_RECORDS):
        line = file.readline(_LONGEST_LINE + 1)
        if not line:
            return
        if not line.endswith(b"\n"):
            raise _OddError("a line that is cut off, or too long" if len(line) > _LONGEST_LINE else "it is cut off")
        try:
            record = json.loads(line)
        except (*INTERRUPTS,):
            raise
        except (ValueError, RecursionError) as error:
            raise _OddError("a line that is no JSON") from error
        if not isinstance(record, dict):
            raise _OddError("a line that is no JSON object")
        count = record.get("bytes", 0)
        if not isinstance(count, int) or not 0 <= count <= _MOST_TENSOR_BYTES:
            raise _OddError(f"a tensor of {count} bytes")
        if file.tell() + count > size:
            raise _OddError("it is cut off")
        yield record, file.read(count) if count else b""
    raise _OddError(f"more than {_MOST_RECORDS} records")


def _tensor(record: dict[str, Any]) -> GgmlTensor:
    key = record["node"] if "node" in record else record["tensor"]
    ne, nb = _whole(record["ne"], 4, _LONGEST_AXIS), _whole(record["nb"], 4, _MOST_TENSOR_BYTES)
    params = np.array(record.get("params", [0] * 16), np.int64).astype(np.int32)
    root = record.get("root")
    if math.prod(ne) > _LARGEST_TENSOR:
        raise _OddError(f"a tensor of {math.prod(ne)} elements")
    if len(params) != 16 or not isinstance(key, int) or not (root is None or isinstance(root, int)):
        raise _OddError("a tensor without an id, or with other than 16 parameters")
    tensor = GgmlTensor(
        key, str(record.get("name", ""))[:64], str(record["op"])[:64], str(record["type"])[:16], ne, nb,
        params.tobytes(), tuple(map(int, record.get("src", ())))[:10], root, int(record.get("offset", 0)),
    )  # fmt: skip
    if record.get("bytes") and record["bytes"] < bytes_of(tensor):
        raise _OddError(f"{tensor.name} has {record['bytes']} bytes, and needs {bytes_of(tensor)}")
    return tensor


def _whole(values: Any, count: int, most: int) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) != count or not all(
            type(value) is int and 0 < value <= most for value in values):  # fmt: skip
        raise _OddError("sizes or strides that are no four whole numbers above 0")
    return tuple(values)


def _refuse_dangling(nodes: list[GgmlTensor], leaves: dict[int, GgmlTensor]) -> None:
    """Refuse ids that name nothing, or a node that has not run yet."""
    known = set(leaves)
    for node in nodes:
        missing = [key for key in (*node.src, node.root) if key is not None and key not in known]
        if missing:
            raise _OddError(f"{node.name} reads {missing[0]}, which is not there")
        known.add(node.key)
