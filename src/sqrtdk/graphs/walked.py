"""Exported graphs of every kind as models that can be traced without running them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqrtdk.graphs.records import Missing
from sqrtdk.models.names import graph_kind
from sqrtdk.models.records import LoadedModel


@dataclass(frozen=True, slots=True)
class Walked:
    """A graph as a model whose forward walks it on the meta device.

    Attributes:
        loaded: the model, its inputs without values, and values of its constants.
        missing: attentions that are not read.
        sizes: numbers that stand for the sizes which the graph leaves free.
    """

    loaded: LoadedModel
    missing: tuple[Missing, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


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
    if graph_kind(os.fspath(path)) == ".pt2":
        from sqrtdk.graphs.program_walk import walk_program

        loaded, missing, sizes = walk_program(path, config, trust_remote_code=trust_remote_code, larger=larger)
    else:
        from sqrtdk.graphs.onnx_walk import walk_onnx

        loaded, missing, sizes = walk_onnx(path, config, larger=larger)
    return Walked(loaded, missing, sizes)
