"""An exported graph as what `check` audits: its operations walked on shapes, without running them."""

from __future__ import annotations

from dataclasses import replace

from sqrtdk.errors import InvalidValueError
from sqrtdk.graphs.beside import config_beside
from sqrtdk.graphs.records import Missing
from sqrtdk.models.names import graph_kind
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import LoadedModel

_NOT_OURS = ("text", "input_file", "batch", "seq_len", "device", "dtype", "device_map", "offload_folder", "revision",
             "attn")  # fmt: skip


def from_graph(model: str, options: LoadOptions) -> tuple[LoadedModel, tuple[Missing, ...]]:
    """A graph in a file as a model whose forward walks it on the meta device.

    Args:
        model: path of an .onnx or .pt2 file.
        options: of loading; those that a graph has settled are refused.

    Raises:
        InvalidValueError: an option that a graph does not follow.
        ModelError: the file, or the config beside it, can't be read.
        MissingExtraError: onnx is not installed.
    """
    set_ones = [f"--{name.replace('_', '-')}" for name in _NOT_OURS if getattr(options, name) is not None]
    if set_ones:
        raise InvalidValueError(
            f"{', '.join(set_ones)} given with a graph, which is read as it was exported",
            hint="Leave it out, or check the model that was exported.",
        )
    config, notes = config_beside(model)
    if graph_kind(model) == ".pt2":
        from sqrtdk.graphs.program_walk import walk_program

        loaded, missing = walk_program(model, config, trust_remote_code=options.trust_remote_code)
    else:
        from sqrtdk.graphs.onnx_walk import walk_onnx

        loaded, missing = walk_onnx(model, config)
    return replace(loaded, notes=(*loaded.notes, *notes)), missing
