"""Checks an untrusted ONNX file before onnxruntime opens it.

The file must not exceed the size limit of its format. External tensors must lie in the same folder, in regular files,
within the length of those files. Operators must be ONNX's own or onnxruntime's, because any other needs a library,
which is code. onnxruntime checks the rest of the graph.
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

ONNX_EXTRA = "onnx"
MAX_ONNX_BYTES = 2**31 - 1  # size limit of a protocol buffer
MAX_BESIDE = 2**40  # bytes of one external tensor file
MAX_NODES = 2**20
MAX_GRAPH_DEPTH = 16  # levels of graphs inside graphs
MAX_FUNCTION_DEPTH = 64  # levels of functions that call functions
# Domains whose operators onnxruntime has itself; "ai.onnx" is another name of "".
ONNXRUNTIME_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc")


def load_file(path: str | os.PathLike[str]) -> Any:
    """Return the `onnx.ModelProto` of a file with its functions inlined. External tensors are not loaded.

    Raises:
        MissingExtraError: onnx is not installed.
        ModelError: The file can't be read, is too large, is no ONNX file, names a file outside its folder, or needs
            operators that onnxruntime does not have.
    """
    proto = _extras.load_extra("onnx", ONNX_EXTRA)
    shown = str(path)[:200]
    try:
        content = read_bytes(os.fspath(path), f"the graph {shown!r}", MAX_ONNX_BYTES)
    except OSError as error:
        raise ModelError(f"can't read the graph {shown!r}: {short_text(error)}", hint="Check the path.") from error
    try:
        model = proto.ModelProto.FromString(content)
    except INTERRUPTS:
        raise
    except Exception as error:  # each implementation of protobuf has its own error type
        raise _no_model(shown, short_text(error)) from error
    del content
    if not model.HasField("graph") or not model.graph.node:
        raise _no_model(shown, "it holds no graph")
    _refuse_outside_files(model, folder_of(path))
    if model.functions:  # inlined, because an attention may be hidden in one
        _refuse_many_calls(model)
        try:
            model = _extras.load_extra("onnx.inliner", ONNX_EXTRA).inline_local_functions(model)
        except (*INTERRUPTS, MissingExtraError):
            raise
        except Exception as error:  # raised for functions that call themselves or each other
            raise ModelError(
                f"the functions of {shown!r} can't be written out: {kind_and_text(error)}",
                hint="Export it again, or inline them with onnx.inliner.",
            ) from error
    _refuse_unknown_operators(model)
    return model


def folder_of(path: str | os.PathLike[str]) -> Path:
    """Return the folder that holds a path, with links resolved.

    The file itself may be a link; its target is not followed, as external tensors lie beside the link.
    """
    return Path(os.path.realpath(os.path.dirname(os.path.abspath(path))))


def _no_model(shown: str, why: str) -> ModelError:
    return ModelError(
        f"{shown!r} is not an ONNX model: {why}", hint="Export it again with torch.onnx.export(..., dynamo=True)."
    )


def _refuse_many_calls(model: Any) -> None:
    """Raises a `ModelError` if functions call each other endlessly, or expand to too many nodes when inlined."""
    bodies = {(function.domain, function.name): function for function in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def size(graph: Any, depth: int) -> int:
        if depth > MAX_FUNCTION_DEPTH:
            raise ModelError(
                f"functions of the graph call each other {depth} deep, or themselves",
                hint=f"At most {MAX_FUNCTION_DEPTH} are read: export it again, or inline them with onnx.inliner.",
            )
        # Counted before anything is inlined: 60 functions that call the next one twice expand to 2^60 nodes.
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
    """Yield an ONNX graph, then all graphs inside its nodes: branches of conditions and bodies of loops.

    Args:
        graph: A `GraphProto`.
        depth: Nesting depth of `graph` itself; 0 for the graph of a model.

    Raises:
        ModelError: They are nested deeper than `MAX_GRAPH_DEPTH`.
    """
    if depth > MAX_GRAPH_DEPTH:
        raise ModelError(
            f"graphs are nested {depth} deep; at most {MAX_GRAPH_DEPTH} are read", hint="Flatten the graph."
        )
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs_of(attribute.g, depth + 1)
            for inner in attribute.graphs:
                yield from graphs_of(inner, depth + 1)


def _refuse_unknown_operators(model: Any) -> None:
    """Raises a `ModelError` for operators of a domain that onnxruntime lacks, and for too many nodes."""
    unknown: set[str] = set()
    count = 0
    for graph in graphs_of(model.graph):
        count += len(graph.node)
        unknown |= {
            f"{node.domain}::{node.op_type}"[:100] for node in graph.node if node.domain not in ONNXRUNTIME_DOMAINS
        }
    if count > MAX_NODES:
        raise ModelError(f"the graph has {count} nodes; at most {MAX_NODES} are read", hint="Export a smaller part.")
    if unknown:
        names = sorted(unknown)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ModelError(
            f"the graph needs custom operators: {', '.join(names[:5])}{more}",
            hint="They run code of a library of their own, which is not loaded: export with ONNX's own operators.",
        )


def _refuse_outside_files(model: Any, folder: Path) -> None:
    """Raises a `ModelError` for tensors outside the folder, not in a regular file, or beyond the file's end."""
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
    """Yield the name and proto of each tensor of a model that may be stored in an external file."""
    for graph in (*graphs_of(model.graph), *model.functions):
        for node in graph.node:
            for attribute in node.attribute:
                yield from ((node.name or node.op_type, tensor) for tensor in (attribute.t, *attribute.tensors))
        if not hasattr(graph, "initializer"):  # a FunctionProto has no initializers
            continue
        yield from ((tensor.name, tensor) for tensor in graph.initializer)
        for sparse in graph.sparse_initializer:
            yield from ((sparse.values.name, tensor) for tensor in (sparse.values, sparse.indices))


def _size_beside(folder: Path, location: str) -> int:
    """Return the size in bytes of a file with external tensors.

    Raises:
        ModelError: It is not in the graph's folder, not regular, or too large.
    """
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
    """Return the resolved path of a file beside a graph.

    A link may point within the folder, or within the hub cache that the folder is a snapshot of.

    Raises:
        ModelError: The file does not exist, or is a link to another place.
    """
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
