"""A graph in onnxruntime, with tensors inside it exposed as outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import _extras
from sqrtdk.errors import INTERRUPTS, MissingExtraError, ModelError, kind_and_text
from sqrtdk.graphs.graph import Graph
from sqrtdk.graphs.model_file import EXTRA

_FOLDER = "session.model_external_initializers_file_folder_path"
_SHAPE = "sqrtdk::shape::"  # names of the nodes and outputs that tell shapes
Arrays = dict[str, np.ndarray[Any, Any]]


def run_plain(model: Any, graph: Graph, given: Arrays) -> Arrays:
    """Outputs of the graph as it is, by name."""
    return _run(model, graph, given, [value.name for value in model.graph.output])


def run_exposed(
    model: Any, graph: Graph, given: Arrays, tensors: Iterable[str], shapes: Iterable[str]
) -> tuple[Arrays, dict[str, tuple[int, ...]]]:
    """Outputs of the graph and tensors in it, and the shapes of others.

    Args:
        model: an `onnx.ModelProto`; it is left as it was.
        graph: its graph.
        given: its inputs.
        tensors: names of those to expose.
        shapes: names of those whose shape alone is wanted.

    Returns:
        Values by name, the graph's own outputs too; shapes by name.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        ModelError: onnxruntime refuses the graph, or fails to run it.
    """
    proto = _extras.load("onnx", EXTRA)
    own = [value.name for value in model.graph.output]
    known = {*graph.initializers, *given}
    exposed = [name for name in dict.fromkeys(tensors) if name not in own and name not in known]
    told = [name for name in dict.fromkeys(shapes) if name not in known]
    changed = model.graph
    outputs, nodes = len(changed.output), len(changed.node)
    try:
        changed.output.extend(proto.ValueInfoProto(name=name) for name in exposed)
        for name in told:
            changed.node.append(proto.helper.make_node("Shape", [name], [_SHAPE + name]))
            changed.output.append(proto.ValueInfoProto(name=_SHAPE + name))
        ran = _run(model, graph, given, [*own, *exposed, *(_SHAPE + name for name in told)])
    finally:
        del changed.output[outputs:]
        del changed.node[nodes:]
    found = {name: tuple(int(size) for size in ran.pop(_SHAPE + name)) for name in told}
    ran |= {name: given[name] for name in tensors if name in given}
    for name in tensors:
        if name in graph.initializers and (array := graph.array(name)) is not None:
            ran[name] = array
    found |= {name: given[name].shape for name in shapes if name in given}
    found |= {name: tuple(graph.initializers[name].dims) for name in shapes if name in graph.initializers}
    return ran, found


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


def refuse_unlike(plain: Mapping[str, Any], exposed: Mapping[str, Any]) -> None:
    """Refuse a graph whose outputs are other ones with tensors exposed.

    Raises:
        ModelError: they are; the message says how much.
    """
    for name, before in plain.items():
        after = exposed[name]
        if not isinstance(before, np.ndarray):  # a sequence, or a map
            continue
        numbers = before.dtype.kind in "fc"
        if before.shape == after.shape and np.array_equal(before, after, equal_nan=numbers):
            continue
        most = float("nan")
        if before.shape == after.shape and numbers:
            with np.errstate(all="ignore"):
                most = float(np.nanmax(np.abs(before - after)))
        raise ModelError(
            f"the output {name[:100]!r} of the graph is not the same in two runs, by up to {most:.3g}",
            hint="It draws random numbers (Dropout in training mode, RandomNormal): export the model in eval mode.",
        )


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
