"""Exported graphs of every kind as models that can be traced without running them."""

from __future__ import annotations

import os
from typing import Any

from sqrtdk.errors import INTERRUPTS, ModelError, SqrtdkError, kind_and_text
from sqrtdk.graphs.records import Walked
from sqrtdk.models.names import graph_kind


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
    from sqrtdk.graphs.onnx_walk import walk_onnx

    return walk_onnx(path, config, larger=larger)
