"""An attention of several operations: what of it is exposed, and its tensors after the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs import terms
from sqrtdk.graphs.axes import Operands, axes_of, operands_of, put
from sqrtdk.graphs.graph import Graph, Node
from sqrtdk.graphs.layout import Values
from sqrtdk.graphs.logits import Weighing
from sqrtdk.graphs.vectors import Way, read_vector, walk
from sqrtdk.tracing.tensors import CallTensors, Term


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """An attention in a graph, and what its reading needs.

    Attributes:
        site: module path, or name of the node.
        number: of the softmax, or the operator, in the graph.
        tensors: names of those to expose.
        shapes: names of those whose shape is needed.
        read: the call after the run; its index is 0, and the batch of the inputs is given. Raises an UnsupportedError
            with what could not be read.
        derived: q, k and v are inside of an operator: they were computed from what goes in.
    """

    site: str
    number: int
    tensors: tuple[str, ...]
    shapes: tuple[str, ...]
    read: Callable[[Values, int | None], CallTensors]
    derived: bool = False


def plan_weighing(graph: Graph, weighing: Weighing) -> Plan:
    """What is needed of an attention of several operations.

    Raises:
        UnsupportedError: its products are not read.
    """
    product, met = weighing.product, weighing.values
    first = product.op != "Einsum" or _row_label(product) in str(product.attributes["equation"]).split(",")[0]
    query, key = product.inputs if first else product.inputs[::-1]
    left = met.inputs[0] == weighing.weights
    value = met.inputs[1] if left else met.inputs[0]
    pair, meeting = operands_of(product, first, of_values=False), operands_of(met, left, of_values=True)
    ways = (walk(graph, query), walk(graph, key), walk(graph, value))
    tensors, shapes = [met.outputs[0]], [product.outputs[0], weighing.softmax.outputs[0], weighing.weights]
    for more, sizes in (*(way.wanted(graph) for way in ways), *(terms.wanted(graph, link) for link in weighing.links)):
        tensors += more
        shapes += sizes

    def read(values: Values, batch: int | None) -> CallTensors:
        return _read(graph, weighing, ways, (pair, meeting), values, batch)

    site = weighing.softmax.site
    return Plan(site, weighing.softmax.number, tuple(tensors), tuple(shapes), read)


def _row_label(product: Node) -> str:
    """Of an Einsum that makes logits, the label of the rows."""
    result = str(product.attributes.get("equation", "")).replace(" ", "").partition("->")[2]
    return result[-2:-1] or "?"


def _read(
    graph: Graph,
    weighing: Weighing,
    ways: tuple[Way, Way, Way],
    operands: tuple[Operands, Operands],
    values: Values,
    batch: int | None,
) -> CallTensors:
    pair, meeting = operands
    softmax = weighing.softmax
    shape = values.shape(softmax.outputs[0])
    axis = softmax.attributes.get("axis", -1 if graph.opset >= 13 else 1)
    if axis not in (-1, len(shape) - 1):
        raise UnsupportedError(f"its softmax is over axis {axis} of {len(shape)}")
    others = [values.shape(link.made) for link in weighing.links]
    others += [shape, values.shape(weighing.weights)]
    axes = axes_of(values.shape(weighing.product.outputs[0])[:-2], others, batch)

    def at(order: tuple[int, ...] | None) -> Callable[[Tensor], Tensor]:
        return lambda tensor: axes.operand(put(tensor, order))

    query = read_vector(ways[0], values, at(pair.left))
    key = read_vector(ways[1], values, at(pair.right))
    value = read_vector(ways[2], values, at(meeting.right))
    output = axes.operand(put(values.tensor(weighing.values.outputs[0]), meeting.result))
    formula = terms.read_terms(graph, weighing.links, values, axes)
    alpha = float(weighing.product.attributes.get("alpha", 1.0))
    if weighing.product.op == "FusedMatMul" and alpha != 1.0:
        formula = (Term("scale", alpha), *formula)
    unknown = [term.detail for term in formula if term.name == "unknown"]
    dtype = _name(query.values)
    return CallTensors(
        site=softmax.site,
        index=0,
        query=query,
        key=key,
        value=value,
        output=output,
        terms=formula,
        dtype=dtype,
        logits_dtype=_cast_to(graph, softmax.inputs[0]) or dtype,
        weights_dtype=_name(value.values),  # a product takes operands of one dtype
        missing=f"{', '.join(unknown)} of the logits was not followed" if unknown else None,
    )


_ELEMENTS = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}  # by ONNX's numbers for them


def _cast_to(graph: Graph, name: str) -> str | None:
    """The dtype to which logits were last brought; None where they were not."""
    for _ in range(16):
        node = graph.made_by.get(name)
        if node is None:
            return None
        if node.op == "Cast":
            return _ELEMENTS.get(int(node.attributes["to"]))
        if node.op == "Where":
            name = node.inputs[1] if not graph.is_constant(node.inputs[1]) else node.inputs[2]
            continue
        data = [i for i in node.inputs if i and not graph.is_constant(i)]
        if node.op in ("MatMul", "Einsum", "FusedMatMul") or not data:
            return None
        name = data[0]
    return None


def _name(tensor: Tensor) -> str:
    dtype: torch.dtype = tensor.dtype
    return str(dtype).removeprefix("torch.")
