"""Values of our own operators, and onnxruntime's of the same graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk.graphs.graph import read_graph, to_tensor
from sqrtdk.graphs.onnx_judge import unsigned_weights
from sqrtdk.graphs.onnx_ops import operate
from sqrtdk.graphs.onnx_source import walkable
from sqrtdk.graphs.onnx_step import OnnxStep
from tests.graphs.files import MICROSOFT, onnx
from tests.support.optional import optional
from tests.tolerances import complaint

helper, numpy_helper = onnx.helper, onnx.numpy_helper
Array = np.ndarray[Any, Any]


def ours(model: Any, given: dict[str, Array]) -> dict[str, Tensor]:
    """Each tensor of a graph, by our operators, on values."""
    graph = walkable(read_graph(model, Path()))
    known = {name: torch.from_numpy(np.asarray(array)) for name, array in given.items()}
    known |= {name: to_tensor(graph.array(name)) for name in graph.initializers}
    for node in graph.nodes:
        inputs = tuple(known[name] if name else None for name in node.inputs)
        known |= operate(OnnxStep(node, graph, inputs, known, "cpu", set()))
    return known


def theirs(model: Any, given: dict[str, Array]) -> dict[str, Tensor]:
    """The outputs of a graph, by onnxruntime without its rewriting."""
    runtime = optional("onnxruntime")
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    with unsigned_weights(read_graph(model, Path())):
        whole = model.SerializeToString()
    session = runtime.InferenceSession(whole, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in model.graph.output]
    return {name: to_tensor(array) for name, array in zip(names, session.run(names, given), strict=True)}


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def model(nodes: list[Any], given: dict[str, Array], constants: dict[str, Array], opset: int, names: list[str]) -> Any:
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in given.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in names]
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    made = helper.make_graph(nodes, "graph", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10)


def same(
    nodes: list[Any],
    given: dict[str, Array],
    constants: dict[str, Array] | None = None,
    *,
    opset: int = 22,
    outputs: tuple[str, ...] = ("y",),
    length: int = 64,
) -> None:
    """Both give the same numbers, of the same shape, up to the rounding of sums of `length` terms."""
    graph = model(nodes, given, constants or {}, opset, [*outputs])
    right, made = theirs(graph, given), ours(graph, given)
    for name in outputs:
        assert made[name].shape == right[name].shape
        assert made[name].dtype is right[name].dtype
        if right[name].is_floating_point():
            wrong = complaint(made[name], right[name].double(), right[name].dtype, length=length, logit=8.0)
            assert wrong is None, (name, wrong)
        else:
            assert torch.equal(made[name], right[name])
