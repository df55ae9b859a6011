"""An ONNX file from a stranger: what is looked at before onnxruntime gets it.

The file itself has a size that its format can have. Tensors beside it lie in its folder, in regular files, and in bytes
that these files have. Operators are ONNX's own or onnxruntime's; others need a library, which is code. What the graph
says beyond that is onnxruntime's to check.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqrtdk import _extras
from sqrtdk.errors import INTERRUPTS, MissingExtraError, ModelError, kind_and_text, short_text
from sqrtdk.models.limits import read_bytes
from sqrtdk.models.links import homes_of

EXTRA = "onnx"
MAX_BYTES = 2**31 - 1  # what a protocol buffer may have
MAX_BESIDE = 2**40  # of a file of tensors
MAX_NODES = 2**20
MAX_DEPTH = 16  # of graphs in graphs
MAX_CALLS = 64  # of functions in functions
# Domains whose operators onnxruntime has itself; "ai.onnx" is another name of "".
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc")


def load_file(path: str | os.PathLike[str]) -> Any:
    """The `onnx.ModelProto` in a file, without the tensors beside it; its functions are made part of the graph.

    Raises:
        MissingExtraError: onnx is not installed.
        ModelError: it can't be read, is too large, is no ONNX file, names a file out of its folder, or needs operators
            that onnxruntime does not have.
    """
    proto = _extras.load("onnx", EXTRA)
    shown = str(path)[:200]
    try:
        content = read_bytes(os.fspath(path), f"the graph {shown!r}", MAX_BYTES)
    except OSError as error:
        raise ModelError(f"can't read the graph {shown!r}: {short_text(error)}", hint="Check the path.") from error
    try:
        model = proto.ModelProto.FromString(content)
    except INTERRUPTS:
        raise
    except Exception as error:  # protobuf has its own error types, a new one with each of its implementations
        raise _no_model(shown, short_text(error)) from error
    del content
    if not model.HasField("graph") or not model.graph.node:
        raise _no_model(shown, "it holds no graph")
    _refuse_strange_files(model, folder_of(path))
    if model.functions:  # they are written out, so that no attention is hidden in one
        _refuse_many_calls(model)
        try:
            model = _extras.load("onnx.inliner", EXTRA).inline_local_functions(model)
        except (*INTERRUPTS, MissingExtraError):
            raise
        except Exception as error:  # of functions that call themselves, or each other
            raise ModelError(
                f"the functions of {shown!r} can't be written out: {kind_and_text(error)}",
                hint="Export it again, or inline them with onnx.inliner.",
            ) from error
    _refuse_strange_operators(model)
    return model


def folder_of(path: str | os.PathLike[str]) -> Path:
    """The folder in which a file is named, without links; where the file itself is a link, not the one it leads to."""
    return Path(os.path.realpath(os.path.dirname(os.path.abspath(path))))


def _no_model(shown: str, why: str) -> ModelError:
    return ModelError(
        f"{shown!r} is not an ONNX model: {why}", hint="Export it again with torch.onnx.export(..., dynamo=True)."
    )


def _refuse_many_calls(model: Any) -> None:
    """Refuse functions that call each other without end, or that make too many nodes when they are written out."""
    bodies = {(function.domain, function.name): function for function in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def size(graph: Any, depth: int) -> int:
        if depth > MAX_CALLS:
            raise ModelError(
                f"functions of the graph call each other {depth} deep, or themselves",
                hint=f"At most {MAX_CALLS} are read: export it again, or inline them with onnx.inliner.",
            )
        total = 0
        for part in graphs_of(graph):
            for node in part.node:
                name = (node.domain, node.op_type)
                if name in bodies and name not in sizes:
                    sizes[name] = size(bodies[name], depth + 1)
                total += sizes.get(name, 1)
        return total

    count = size(model.graph, 0)
    if count > MAX_NODES:
        raise ModelError(
            f"the graph has {min(count, 10**18)} nodes with its functions written out; at most {MAX_NODES} are read",
            hint="Export a smaller part.",
        )


def graphs_of(graph: Any, depth: int = 0) -> Iterator[Any]:
    """A graph, and those inside its nodes: branches and bodies of loops."""
    if depth > MAX_DEPTH:
        raise ModelError(f"graphs are nested {depth} deep; at most {MAX_DEPTH} are read", hint="Flatten the graph.")
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs_of(attribute.g, depth + 1)
            for inner in attribute.graphs:
                yield from graphs_of(inner, depth + 1)


def _refuse_strange_operators(model: Any) -> None:
    """Refuse operators of a domain that onnxruntime lacks, and more nodes than a model has."""
    strange: set[str] = set()
    count = 0
    for graph in graphs_of(model.graph):
        count += len(graph.node)
        strange |= {f"{node.domain}::{node.op_type}"[:100] for node in graph.node if node.domain not in DOMAINS}
    if count > MAX_NODES:
        raise ModelError(f"the graph has {count} nodes; at most {MAX_NODES} are read", hint="Export a smaller part.")
    if strange:
        names = sorted(strange)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ModelError(
            f"the graph needs custom operators: {', '.join(names[:5])}{more}",
            hint="They run code of a library of their own, which is not loaded: export with ONNX's own operators.",
        )


def _refuse_strange_files(model: Any, folder: Path) -> None:
    """Refuse tensors that lie out of the folder, in what is no file, or beyond a file's end."""
    sizes: dict[str, int] = {}
    for name, tensor in _tensors(model):
        if not tensor.external_data:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if location not in sizes:
            sizes[location] = _size_beside(folder, location)
        try:
            start = int(entries.get("offset", "0"))
            length = int(entries.get("length", str(sizes[location] - start)))
        except ValueError as error:
            raise ModelError(
                f"the tensor {name[:100]!r} says no numbers of where it lies in {location[:100]!r}",
                hint="Export the model again.",
            ) from error
        if min(start, length) < 0 or start + length > sizes[location]:
            raise ModelError(
                f"the tensor {name[:100]!r} is said to lie in bytes {start} to {start + length} of {location[:100]!r}, "
                f"which has {sizes[location]}",
                hint="The file is cut off, or of another export: copy both files again.",
            )


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """All tensors of a model that may lie in another file, and their names."""
    for graph in (*graphs_of(model.graph), *model.functions):
        for node in graph.node:
            for attribute in node.attribute:
                yield from ((node.name or node.op_type, tensor) for tensor in (attribute.t, *attribute.tensors))
        if not hasattr(graph, "initializer"):  # a function has no tensors of its own
            continue
        yield from ((tensor.name, tensor) for tensor in graph.initializer)
        for sparse in graph.sparse_initializer:
            yield from ((sparse.values.name, tensor) for tensor in (sparse.values, sparse.indices))


def _size_beside(folder: Path, location: str) -> int:
    """Bytes of a regular file in the folder."""
    parts = Path(location).parts
    if not location or "\0" in location or Path(location).is_absolute() or ".." in parts or "\\" in location:
        raise ModelError(
            f"tensors of the graph are said to lie in {location[:200]!r}, out of its folder",
            hint="Put the file beside the graph, and export again.",
        )
    real = file_beside(folder, location)
    size = real.stat().st_size
    if not real.is_file() or size > MAX_BESIDE:
        raise ModelError(
            f"{location[:200]!r} is no regular file of at most {MAX_BESIDE} bytes",
            hint="Give the file of the export itself.",
        )
    return size


def file_beside(folder: Path, name: str) -> Path:
    """Where a file beside a graph lies; no link leads out of the folder, or of the hub cache that has a snapshot."""
    try:
        real = Path(os.path.realpath(folder / name, strict=True))
    except OSError as error:
        raise ModelError(
            f"{name[:200]!r}, which the graph needs, is not beside it: {short_text(error)}",
            hint="Copy the file to the folder of the graph.",
        ) from error
    if not any(real.is_relative_to(home) for home in homes_of(folder)):
        raise ModelError(
            f"{name[:200]!r} beside the graph is a link out of its folder, to {str(real)!r}",
            hint="Put the file itself there: what a stranger's link leads to is not read.",
        )
    return real
