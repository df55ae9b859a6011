"""Values of our own operators, and onnxruntime's of the same graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk.graphs.graph import read_graph, to_tensor
from sqrtdk.graphs.onnx_ops import operate
from sqrtdk.graphs.onnx_step import OnnxStep
from sqrtdk.graphs.quantised import without_quantisation
from tests.support.optional import optional

Array = np.ndarray[Any, Any]


def ours(model: Any, given: dict[str, Array]) -> dict[str, Tensor]:
    """Each tensor of a graph, by our operators, on values."""
    graph = without_quantisation(read_graph(model, Path()))
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
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in model.graph.output]
    return {name: to_tensor(array) for name, array in zip(names, session.run(names, given), strict=True)}
