"""Opens an exported graph as a model that can be traced without running it, and the config.json beside its file."""

from __future__ import annotations

import os
from typing import Any

from sqrtdk.errors import INTERRUPTS, MissingExtraError, ModelError, SqrtdkError, kind_and_text
from sqrtdk.graphs.model_file import file_beside, folder_of
from sqrtdk.graphs.onnx import walk_onnx
from sqrtdk.graphs.places import GraphModel
from sqrtdk.graphs.program import walk_program
from sqrtdk.messages import Message
from sqrtdk.models.checkpoint import CONFIG
from sqrtdk.models.config import clean_config_dict, load_config, read_config_dict
from sqrtdk.models.names import graph_kind


def open_graph(
    path: str | os.PathLike[str], config: Any = None, *, trust_remote_code: bool = False, larger: bool = False
) -> GraphModel:
    """Return the graph of an .onnx or .pt2 file as a model.

    Args:
        path: The file.
        config: The model's config, if it is known.
        trust_remote_code: Whether to load a file that would run code of its author.
        larger: Whether free sizes get larger numbers. Comparing both readings shows what depends on a size.

    Raises:
        MissingExtraError: onnx is not installed.
        ModelError: The file can't be read, or it would run code of its author and `trust_remote_code` is False.
    """
    try:
        if graph_kind(os.fspath(path)) == ".pt2":
            return walk_program(path, config, trust_remote_code=trust_remote_code, larger=larger)
        return walk_onnx(path, config, larger)
    except (*INTERRUPTS, SqrtdkError):
        raise
    except Exception as error:  # onnx, numpy and torch raise many types for a damaged file
        raise ModelError(
            f"the graph {str(path)[:200]!r} can't be read: {kind_and_text(error)}",
            hint="The file is damaged: export it again.",
        ) from error


def config_beside(path: str | os.PathLike[str]) -> tuple[Any, tuple[str, ...]]:
    """Return the config beside a graph and notes on it.

    The config is an object of transformers if it knows the model type, else a mapping, or None without a file.

    Raises:
        ModelError: The file is a link out of the folder, or can't be read.
    """
    folder = folder_of(path)
    if not os.path.lexists(folder / CONFIG):
        return None, (Message("graphs.no_config", name=CONFIG),)
    file_beside(folder, CONFIG)
    raw = read_config_dict(folder)
    try:
        config, notes = load_config(folder)
    except MissingExtraError:
        config, notes = clean_config_dict(raw)[0], ()
    except ModelError as error:
        config, notes = clean_config_dict(raw)[0], (Message("graphs.by_fields", name=CONFIG, what=error.message),)
    return config, tuple(notes)
