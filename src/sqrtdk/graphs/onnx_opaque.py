"""Operators of an ONNX graph that nobody here reads: the shapes of their results, and their values by onnxruntime.

Both come from a model of that one node: onnx works out shapes for the operators that it knows, branches and loops
included, and onnxruntime runs what it has. Of an operator of another library, the file may say the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from sqrtdk import _extras
from sqrtdk.errors import INTERRUPTS
from sqrtdk.frontends.opaque import Shapes, UnreadStep
from sqrtdk.graphs.graph import Graph, GraphNode, to_tensor
from sqrtdk.graphs.model_file import ONNX_EXTRA, graphs_of
from sqrtdk.graphs.onnx_judge import opened_session
from sqrtdk.graphs.onnx_step import ONNX_DTYPES

_NUMERIC = {dtype: number for number, dtype in ONNX_DTYPES.items()}


def reads_of(graph: Graph, node: GraphNode) -> list[str]:
    """Return the names of the tensors that a node reads, those inside its branches included."""
    names = dict.fromkeys(filter(None, node.inputs))
    attributes = graph.model.graph.node[node.number].attribute if node.inner else ()
    for inner in (one for attribute in attributes if attribute.HasField("g") for one in graphs_of(attribute.g)):
        made = {name for one in inner.node for name in one.output} | {tensor.name for tensor in inner.initializer}
        made |= {value.name for value in inner.input}
        names |= dict.fromkeys(name for one in inner.node for name in one.input if name and name not in made)
        names |= dict.fromkeys(value.name for value in inner.output if value.name not in made)
    return [name for name in names if name in graph.made_by or name in graph.initializers or name in _given(graph)]


def opaque_step(
    graph: Graph,
    node: GraphNode,
    reads: Mapping[str, Tensor],
    known: Mapping[str, Tensor],
    size: Callable[[str], int | None],
) -> UnreadStep | None:
    """Return the step that stands for a node; None if nothing is known of its results.

    Args:
        graph: The graph.
        node: The node.
        reads: What it reads, by name, in the order of `reads_of`; with values or on the meta device.
        known: Values of small constants by name.
        size: Returns the number for a size that the graph leaves free.
    """
    proto = graph.model.graph.node[node.number] if node.number < len(graph.model.graph.node) else None
    if proto is None or proto.op_type != node.op or [*proto.output] != [*node.outputs]:
        return None  # an operator on integers, which was rewritten
    name = f"{node.domain}.{node.op}" if node.domain else node.op
    numbers = {label: value.numpy() for label, value in known.items() if label in reads}
    model = _model(graph, proto, reads, numbers)
    if not all(tensor.is_meta for tensor in reads.values()):
        return UnreadStep("onnx", name, (), partial(_computed, model, [n for n in reads if n not in numbers], [*reads]))
    results = _inferred(model) or _noted(graph, node, size)
    return None if results is None else UnreadStep("onnx", name, results)


def _model(graph: Graph, proto: Any, reads: Mapping[str, Tensor], known: Mapping[str, Any]) -> Any:
    """Return a model of one node, whose inputs are what it reads, without small constants."""
    onnx = _extras.load_extra("onnx", ONNX_EXTRA)
    given = [
        onnx.helper.make_tensor_value_info(name, _NUMERIC[tensor.dtype], tensor.shape)
        for name, tensor in reads.items()
        if name not in known
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in proto.output if name]
    constants = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in known.items()]
    of = onnx.helper.make_graph([proto], "one", given, outputs, constants)
    model = onnx.helper.make_model(of, opset_imports=graph.model.opset_import)
    model.ir_version = graph.model.ir_version
    return model


def _inferred(model: Any) -> Shapes | None:
    """Return shapes and dtypes of the results as onnx works them out; None if it does not know one."""
    onnx = _extras.load_extra("onnx", ONNX_EXTRA)
    try:
        made = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.output
    except INTERRUPTS:
        raise
    except Exception:  # onnx raises many types for operators and versions that it does not know
        return None
    return _shapes(made, lambda symbol: None)


def _noted(graph: Graph, node: GraphNode, size: Callable[[str], int | None]) -> Shapes | None:
    """Return shapes and dtypes of the results as the file says them."""
    values = {value.name: value for value in (*graph.model.graph.value_info, *graph.model.graph.output)}
    names = [name for name in node.outputs if name]
    return _shapes([values[name] for name in names], size) if values.keys() >= set(names) else None


def _shapes(values: Sequence[Any], size: Callable[[str], int | None]) -> Shapes | None:
    found = []
    for value in values:
        kind = value.type.tensor_type
        if not kind.HasField("shape") or int(kind.elem_type) not in ONNX_DTYPES:
            return None
        shape = [int(d.dim_value) if d.HasField("dim_value") else size(d.dim_param) for d in kind.shape.dim]
        known = [n for n in shape if n is not None and n >= 0]
        if len(known) < len(shape):
            return None
        found.append((known, ONNX_DTYPES[int(kind.elem_type)]))
    return found


def _computed(model: Any, feeds: Sequence[str], names: Sequence[str], reads: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of the node by onnxruntime."""
    given = dict(zip(names, reads, strict=True))
    kinds = {value.name: ONNX_DTYPES[value.type.tensor_type.elem_type] for value in model.graph.input}
    session = opened_session(model.SerializeToString())
    arrays = session.run(None, {name: given[name].to(kinds[name]).cpu().numpy() for name in feeds})
    return [to_tensor(array) for array in arrays]


def _given(graph: Graph) -> set[str]:
    return {value.name for value in graph.inputs}
