"""A graph in onnxruntime, with tensors inside it exposed as outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import _extras
from sqrtdk.errors import INTERRUPTS, MissingExtraError, ModelError, kind_and_text
from sqrtdk.graphs.graph import Graph
from sqrtdk.graphs.model_file import EXTRA

_FOLDER = "session.model_external_initializers_file_folder_path"
Arrays = dict[str, np.ndarray[Any, Any]]


def run_exposed(model: Any, graph: Graph, given: Arrays, tensors: Iterable[str]) -> Arrays:
    """Outputs of the graph, and tensors in it, by name.

    Args:
        model: an `onnx.ModelProto`; it is left as it was.
        graph: its graph.
        given: its inputs.
        tensors: names of those that nodes make.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        ModelError: onnxruntime refuses the graph, or fails to run it.
    """
    proto = _extras.load("onnx", EXTRA)
    outputs = model.graph.output
    own = [value.name for value in outputs]
    exposed = [name for name in dict.fromkeys(tensors) if name not in own]
    try:
        outputs.extend(proto.ValueInfoProto(name=name) for name in exposed)
        return _run(model, graph, given, [*own, *exposed])
    finally:
        del outputs[len(own) :]


def _run(model: Any, graph: Graph, given: Arrays, names: list[str]) -> Arrays:
    """One run without any rewriting of the graph, so that every tensor of it is computed as it stands there."""
    runtime = _extras.load("onnxruntime", EXTRA)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # an error is raised all the same
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry(_FOLDER, str(graph.folder))
    try:
        content = model.SerializeToString()
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        del content
        return dict(zip(names, session.run(names, given), strict=True))
    except (*INTERRUPTS, MissingExtraError):
        raise
    except Exception as error:  # onnxruntime and protobuf have error types of their own
        raise ModelError(
            f"onnxruntime {runtime.__version__} does not run the graph: {kind_and_text(error)}",
            hint="Check it with onnx.checker, and that this version of onnxruntime has its opset and operators.",
        ) from error


def to_tensor(array: Any) -> Tensor:
    """An array of onnxruntime, or of the file, as a tensor.

    Raises:
        ModelError: of a dtype that torch does not have.
    """
    array = np.asarray(array)
    try:
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.array(array))  # a copy: what onnxruntime and the file hold is read-only, or shared
    except TypeError as error:
        raise ModelError(f"a tensor of the graph has dtype {array.dtype}", hint="Export in float32.") from error
