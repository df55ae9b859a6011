"""Exported graphs of every kind as models that can be traced without running them."""

from __future__ import annotations

import os
from typing import Any

from sqrtdk.errors import INTERRUPTS, ModelError, SqrtdkError, kind_and_text
from sqrtdk.graphs.graph import read_graph
from sqrtdk.graphs.model_file import folder_of, load_file
from sqrtdk.graphs.places import GraphRoot, class_of
from sqrtdk.graphs.records import Walked
from sqrtdk.graphs.symbols import shown_sizes
from sqrtdk.models.names import graph_kind
from sqrtdk.models.records import LoadedModel


def open_graph(
    path: str | os.PathLike[str], config: Any = None, *, trust_remote_code: bool = False, larger: bool = False
) -> Walked:
    """Read a graph.

    Args:
        path: of an .onnx or .pt2 file.
        config: what is declared; None where nothing is.
        trust_remote_code: load a program also where that could run code of its author.
        larger: give what the graph leaves free other sizes than otherwise.

    Raises:
        MissingExtraError: onnx is not installed.
        ModelError: the file can't be read, or would run code.
    """
    try:
        return _opened(path, config, trust_remote_code, larger)
    except (*INTERRUPTS, SqrtdkError):
        raise
    except Exception as error:  # whatever onnx, numpy and torch make of a damaged file
        raise ModelError(
            f"the graph {str(path)[:200]!r} can't be read: {kind_and_text(error)}",
            hint="The file is damaged: export it again.",
        ) from error


def _opened(path: str | os.PathLike[str], config: Any, trust_remote_code: bool, larger: bool) -> Walked:
    if graph_kind(os.fspath(path)) == ".pt2":
        from sqrtdk.graphs.program_walk import walk_program

        return walk_program(path, config, trust_remote_code=trust_remote_code, larger=larger)
    return _onnx(path, config, larger)


def _onnx(path: str | os.PathLike[str], config: Any, larger: bool) -> Walked:
    """An ONNX graph as a model whose forward walks it on the meta device."""
    from sqrtdk.graphs.onnx_walk import Walk, walkable

    walk = Walk(walkable(read_graph(load_file(path), folder_of(path))), larger=larger)
    walk.first()
    root = class_of(walk.graph.root_class, GraphRoot)(walk.again, config)
    values = walk.place(root)
    notes: tuple[str, ...] = (shown_sizes(walk.sizes),) if walk.sizes else ()
    notes += tuple(f"the input {name} is taken as ones: no padding" for name in walk.masks)
    if walk.unread:
        ops = ", ".join(sorted(walk.unread)[:5])
        notes += (f"not read: {ops}{' and more' if len(walk.unread) > 5 else ''}; nor what comes after",)
    if walk.folded:
        notes += (
            f"{len(walk.folded)} queries are constants that the exporter worked out: their projections are not in it",
        )
    loaded = LoadedModel(root, tuple(walk.inputs.values()), str(path), "onnx", config, notes=notes, masks=values)
    return Walked(loaded, tuple(walk.missing), walk.sizes, walk.operators(), tuple(sorted(walk.unread)), walk.sick)
