"""An ONNX graph, run through onnxruntime, read to the tensors of its attentions."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from sqrtdk import _extras
from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.calls import Plan, plan_weighing
from sqrtdk.graphs.check import checked
from sqrtdk.graphs.feeds import feeds, fixed, usual
from sqrtdk.graphs.graph import Graph, read_graph
from sqrtdk.graphs.layout import Values
from sqrtdk.graphs.logits import read_weighing
from sqrtdk.graphs.model_file import EXTRA, folder_of, load_file
from sqrtdk.graphs.operators import OPERATORS, plan_operator
from sqrtdk.graphs.records import GraphRun, Missing
from sqrtdk.graphs.session import refuse_unlike, run_exposed, run_plain, to_tensor
from sqrtdk.tracing.tensors import CallTensors


def read_onnx(path: str | os.PathLike[str], inputs: Mapping[str, Any] | tuple[Any, ...]) -> GraphRun:
    """Run an ONNX graph, and read the tensors of all its attentions.

    The graph runs twice on the CPU, once as it is and once with the attentions' tensors as outputs. Both times
    onnxruntime's rewriting of graphs is switched off: it would fuse the very operations that are looked at. The outputs
    of both runs must be the same, bit for bit. What onnxruntime computes with its rewriting on may differ from that by
    rounding.

    Args:
        path: of the file; tensors that lie in others are read from its folder.
        inputs: tensors by the names of the graph's inputs, or in their order.

    Raises:
        MissingExtraError: onnx or onnxruntime is not installed.
        ModelError: the file can't be read, needs custom operators, or names a file out of its folder; the inputs are
            not those that the graph takes; onnxruntime fails; the graph draws random numbers.
    """
    model = load_file(path)
    graph = read_graph(model, folder_of(path))
    given = feeds(graph.inputs, inputs)
    plans, missing = find(graph)
    plain = run_plain(model, graph, given)
    tensors = [name for plan in plans for name in plan.tensors]
    shapes = [name for plan in plans for name in plan.shapes]
    ran, told = run_exposed(model, graph, given, tensors, shapes)
    refuse_unlike(plain, ran)
    values = Values(graph, ran, told)
    batch = next((array.shape[0] for array in given.values() if array.ndim > 1), None)
    calls: list[CallTensors] = []
    counts: Counter[str] = Counter()
    for plan in plans:
        try:
            call = plan.read(values, batch)
        except UnsupportedError as error:
            missing.append(Missing(plan.site, str(error)))
            continue
        calls.append(checked(replace(call, index=counts[call.site]), derived=plan.derived))
        counts[call.site] += 1
    versions = {name: str(_extras.load(name, EXTRA).__version__) for name in ("onnxruntime", "onnx")}
    return GraphRun(
        calls=tuple(calls),
        outputs={name: to_tensor(array) for name, array in plain.items() if isinstance(array, np.ndarray)},
        missing=tuple(missing),
        producer=f"{model.producer_name} {model.producer_version}".strip()[:100],
        opset={entry.domain or "ai.onnx": int(entry.version) for entry in model.opset_import},
        ir_version=int(model.ir_version),
        versions=versions,
        forwards=2,
    )


def fixed_sizes(path: str | os.PathLike[str]) -> tuple[int | None, int | None]:
    """Rows and tokens that a graph was exported for; None where they are free, or not told.

    Raises:
        MissingExtraError: onnx is not installed.
        ModelError: the file can't be read.
    """
    return fixed(_inputs(path))


def usual_inputs(path: str | os.PathLike[str], given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Positions and types of tokens that a graph takes and that were not given.

    Raises:
        MissingExtraError: onnx is not installed.
        ModelError: the file can't be read.
    """
    return usual(_inputs(path), given)


def _inputs(path: str | os.PathLike[str]) -> tuple[Any, ...]:
    return read_graph(load_file(path), folder_of(path)).inputs


def find(graph: Graph) -> tuple[list[Plan], list[Missing]]:
    """The attentions of a graph, in order, and those that can't be read."""
    plans: list[Plan] = []
    missing: list[Missing] = []
    for node in graph.nodes:
        if node in graph.hidden:
            hidden = [op for domain, op in graph.hidden[node] if op == "Softmax" or (domain, op) in OPERATORS]
            if hidden:
                missing.append(Missing(node.site, f"{hidden[0]} inside of {node.op}: branches and loops are not read"))
            continue
        try:
            if (node.domain, node.op) in OPERATORS:
                plans.append(plan_operator(graph, node))
                continue
            weighing = read_weighing(graph, node) if node.op == "Softmax" and not node.domain else None
            if isinstance(weighing, str):
                missing.append(Missing(node.site, weighing))
            elif weighing is not None:
                plans.append(plan_weighing(graph, weighing))
        except UnsupportedError as error:
            missing.append(Missing(node.site, str(error)))
    return plans, missing
