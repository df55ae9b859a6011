"""ONNX's own cases of each operator: both walks give what its reference gives, or say what is not read."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqrtdk.errors import ModelError
from sqrtdk.frontends.module import foreign_module
from sqrtdk.graphs.graph import Graph, read_graph, to_tensor
from sqrtdk.graphs.onnx_ops import ONNX_OPERATIONS
from sqrtdk.graphs.onnx_source import OnnxSource, walkable
from sqrtdk.graphs.onnx_walk import Walk
from tests.graphs.files import onnx

node_cases = importlib.import_module("onnx.backend.test.case.node")
OPERATORS = {op.lower() for domain, op in ONNX_OPERATIONS if not domain}
MODULES = [
    module.name
    for module in pkgutil.iter_modules(node_cases.__path__)
    if module.name.replace("_", "") in {*OPERATORS, "and", "not", "or", "rangeop"}
]
# Of equal numbers ONNX takes the first, torch any; a row that sees no key is 0 in ONNX, NaN here, and told as such.
OTHERWISE = ("test_top_k_same_values", "_nan_robustness")


def walked(graph: Graph, given: dict[str, Any], names: list[str]) -> Walk:
    """A walk on values, after a run inside modules that gave the same."""
    source = OnnxSource(graph, on_meta=False, wanted=names)
    bound = source.bind((), dict(zip(source.signature.parameters, given.values(), strict=False)))
    root, _ = foreign_module(source, bound, "Graph")
    for name, tensor in root(*bound.tensors).items():
        torch.testing.assert_close(tensor, source.last.made[name], rtol=0, atol=0, equal_nan=True)
    return source.last


@pytest.mark.sampled(14)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", MODULES)
def test_the_cases_of_an_operator(module: str) -> None:
    count = len(node_cases._NodeTestCases)
    importlib.import_module(f"{node_cases.__name__}.{module}")
    for case in node_cases._NodeTestCases[count:]:
        model, known = case.model, {(node.domain, node.op_type) for node in case.model.graph.node} <= {*ONNX_OPERATIONS}
        if not known or any(word in case.name for word in OTHERWISE):
            continue
        inputs, outputs = case.data_sets[0]
        names = [value.name for value in model.graph.output]
        try:
            given = {v.name: _tensor(array) for v, array in zip(model.graph.input, inputs, strict=True)}
            rights = {name: _tensor(array) for name, array in zip(names, outputs, strict=True)}
            walk = walked(walkable(read_graph(model, Path())), given, names)
        except ModelError:  # numbers of 4 or 8 bits, and texts
            continue
        for name in names if not walk.unread else ():
            if name in walk.made:  # what is made for training alone, as the mean of a norm, is not
                right, made = rights[name], walk.made[name]
                eps = torch.finfo(right.dtype).eps if right.is_floating_point() else 0.0
                size = float(right.double().abs().nan_to_num(0, 0, 0).max()) if right.numel() else 0.0
                bars = {"rtol": case.rtol + 8 * eps, "atol": case.atol + 64 * eps * size}  # some are of 4 digits
                torch.testing.assert_close(made, right, equal_nan=True, msg=f"{case.name}: {made} {right}", **bars)


def _tensor(array: Any) -> torch.Tensor:
    return to_tensor(onnx.numpy_helper.to_array(array) if isinstance(array, onnx.TensorProto) else np.asarray(array))
