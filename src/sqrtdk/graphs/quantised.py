"""A quantised ONNX graph as the graph that was quantised: every integer tensor as the numbers that it stands for.

onnxruntime's quantiser writes three forms, all of which round and none of which scales:

- dynamic: `DynamicQuantizeLinear`, `MatMulInteger`, `Cast`, and `Mul` by the scales of both operands;
- QDQ: `QuantizeLinear` and `DequantizeLinear` around each operator;
- QOperator: `QLinearMatMul`, `QLinearConv`, `QLinearSoftmax` and others, with scales and zero points as inputs.

Here a quantised activation is the activation itself, and a quantised weight is `(integers - zero point) * scale`, which
is computed when it is asked for. So `MatMulInteger(x_q, w_q)` times `x_scale * w_scale` is `MatMul(x, w)`: the scales
are those of rounding, and no factor on q.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sqrtdk.graphs.graph import Graph, Node
from sqrtdk.graphs.rewriting import DOMAINS, PRODUCT, Rewriting, Unread
from sqrtdk.graphs.unpacked import few_bits, integers

Array = np.ndarray[Any, Any]
# Operators (X, scale, zero point, scale of Y, zero point of Y), and what they are of floating-point numbers.
_ALONE = {"QLinearSigmoid": "Sigmoid", "QLinearLeakyRelu": "LeakyRelu", "QLinearAveragePool": "AveragePool",
          "QLinearGlobalAveragePool": "GlobalAveragePool", "QLinearReduceMean": "ReduceMean"}  # fmt: skip
_PAIRS = {"QLinearAdd": "Add", "QLinearMul": "Mul", "QLinearMatMul": "MatMul"}


def without_quantisation(graph: Graph) -> Graph:
    """The graph in floating-point numbers; the same object where nothing in it is quantised.

    An operator that is not understood keeps its place under a name that no table of operators has, which says why.
    """
    if not any(node.op in _REWRITES and node.domain in DOMAINS for node in graph.nodes):
        return graph
    rewriting = Rewriting(graph, _REWRITES, dict(graph.initializers))
    for node in graph.nodes:
        rewriting.take(node)
    taken = {name for node in rewriting.nodes for name in node.inputs}
    nodes = tuple(node for node in rewriting.nodes if node not in rewriting.of_scales or taken & {*node.outputs})
    kept = set(nodes)
    taken_by: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        for name in filter(None, node.inputs):
            taken_by[name].append(node)
    made_by = {name: node for node in nodes for name in node.outputs if name}
    return replace(
        graph, nodes=nodes, made_by=made_by, taken_by=taken_by, initializers=rewriting.initializers,
        hidden={node: inner for node, inner in graph.hidden.items() if node in kept},
        _constant={}, _arrays={},
    )  # fmt: skip


def _quantize(to: Rewriting, node: Node) -> None:
    """`QuantizeLinear(x, scale, zero point)` is x, rounded."""
    to.rounded(node, node.inputs[0], node.inputs[1:3])
    to.carry(node, node.input(1))


def _dynamic(to: Rewriting, node: Node) -> None:
    """`DynamicQuantizeLinear(x)` is x, rounded; its scale is 1 here, and its zero point 0."""
    to.rounded(node, node.inputs[0])
    to.carry(node, node.outputs[1])
    for name, number in zip(node.outputs[1:], (np.float32(1.0), np.uint8(0)), strict=False):
        to.number(name, number)


def _dequantize(to: Rewriting, node: Node) -> None:
    """`DequantizeLinear` of a constant is a weight; of an activation it is the activation."""
    axis, block = int(node.attributes.get("axis", 1)), int(node.attributes.get("block_size", 0))
    name = node.inputs[0]
    if name not in to.carried and to.graph.array(name) is None:
        to.nodes.append(node)  # integers that the caller gives: an image
        return
    to.add(node, "Identity", (to.floating((name, node.input(1), node.input(2)), axis, block),), {})


def _integer_product(to: Rewriting, node: Node) -> None:
    """`MatMulInteger` and `ConvInteger`, whose scales are multiplied to the product afterwards."""
    names, zeros = node.inputs[:2], (node.input(2), node.input(3))
    own = {to.carried[name] for name in names if name in to.carried}
    constants = [i for i, name in enumerate(names) if name not in to.carried]
    scales = to.weight_scale(node, own, len(constants))
    of, op = dict(zip(constants, scales, strict=True)), node.op.removesuffix("Integer")
    sources = [
        name if i not in of else to.floating((name, of[i], zeros[i]), -1 if op == "MatMul" else 0)
        for i, name in enumerate(names)
    ]
    to.add(node, op, sources)
    to.carry(node, PRODUCT)


def _linear(to: Rewriting, node: Node) -> None:
    """`QLinearMatMul`, `QLinearAdd` and `QLinearMul`: two operands, each with its scale and its zero point."""
    op, inputs = _PAIRS[node.op], node.inputs
    axis = -1 if op == "MatMul" else 0
    names = [to.floating(inputs[i : i + 3], axis) for i in (0, 3)]
    to.add(node, op, names, {})
    to.requantised(node, node.input(6), node.input(7))


def _alone(to: Rewriting, node: Node) -> None:
    """An operator on one tensor."""
    if node.attributes.get("channels_last", 0):
        raise Unread("with channels last")
    op = "Softmax" if node.op == "QLinearSoftmax" else _ALONE[node.op]
    to.add(node, op, (to.floating([node.input(i) for i in range(3)]),))
    to.requantised(node, node.input(3), node.input(4))


def _linear_conv(to: Rewriting, node: Node) -> None:
    """`QLinearConv(x, scale, zero, w, scale, zero, y scale, y zero, bias)`: its bias is in units of both scales."""
    names = [*node.inputs, "", ""][:9]
    x, w = to.floating(names[:3]), to.floating(names[3:6])
    to.add(node, "Conv", (x, w, _summed_bias(to, names[8], names[1], names[4])))
    to.requantised(node, names[6], names[7])


def _summed_bias(to: Rewriting, bias: str, left: str, right: str, factor: float = 1.0) -> str:
    """A bias of integers, in units of the scales of both operands of a product."""
    whole = to.graph.array(bias) if bias else None
    if whole is None:
        return ""
    first, second = to.graph.array(left), to.graph.array(right)
    if first is None or second is None:
        raise Unread("with scales that are computed")

    def compute() -> Array:
        made: Array = integers(whole) * (first.flatten() * second.flatten() * np.float32(factor))
        return made.astype(np.float32)

    return to.constant(bias, whole.shape, 1, compute, (bias, left, right))


def _gemm(to: Rewriting, node: Node) -> None:
    """`QGemm(A, scale, zero, B, scale, zero, C, y scale, y zero)`."""
    names = [*node.inputs, "", "", ""][:9]
    left = to.floating(names[:3])
    right = to.floating(names[3:6], 0 if node.attributes.get("transB") else 1)
    alpha = float(node.attributes.get("alpha", 1.0))
    to.add(node, "Gemm", (left, right, _summed_bias(to, names[6], names[1], names[4], alpha)))
    if names[7]:
        to.requantised(node, names[7], names[8])


def _concat(to: Rewriting, node: Node) -> None:
    """`QLinearConcat(y scale, y zero, X, scale, zero, ...)`."""
    names = [to.floating(node.inputs[i : i + 3]) for i in range(2, len(node.inputs) - 2, 3)]
    to.add(node, "Concat", names)
    to.requantised(node, node.input(0), node.input(1))


def _choice(to: Rewriting, node: Node) -> None:
    """`QLinearWhere(condition, X, scale, zero, Y, scale, zero, z scale, z zero)`."""
    to.add(node, "Where", (node.inputs[0], to.floating(node.inputs[1:4]), to.floating(node.inputs[4:7])), {})
    to.requantised(node, node.input(7), node.input(8))


def _to_float(to: Rewriting, node: Node) -> None:
    """`MatMulIntegerToFloat(A, B, scales, zeros, bias)`, and `DynamicQuantizeMatMul(A, B, scale, zero, bias)`."""
    if node.op == "DynamicQuantizeMatMul":
        left, right, bias = f"{node.outputs[0]}::rounded", to.floating((*node.inputs[1:3], node.input(3)), -1), 4
        to.rounded(replace(node, outputs=(left,)), node.inputs[0])
    else:
        left = to.floating((node.inputs[0], node.input(2), node.input(4)), -1)
        right, bias = to.floating((node.inputs[1], node.input(3), node.input(5)), -1), 6
    to.with_bias(node, "MatMul", (left, right), node.input(bias), {})


def _nbits(to: Rewriting, node: Node) -> None:
    """`MatMulNBits(A, B, scales, zero points, group numbers, bias)`: a weight of few bits, in blocks along K."""
    attributes, packed = node.attributes, node.input(1)
    rows, columns = int(attributes.get("K", 0)), int(attributes.get("N", 0))
    if min(rows, columns) < 1 or to.graph.array(packed) is None:
        raise Unread("of sizes that are not told")
    if node.input(4) and to.graph.array(node.input(4)) is None:
        raise Unread("with groups that are computed")
    arrays = [to.graph.array(name) if name else None for name in (packed, *(node.input(i) for i in (2, 3, 4)))]
    bits, block = int(attributes.get("bits", 4)), int(attributes.get("block_size", 32))

    def compute() -> Array:
        return few_bits(*arrays, rows=rows, columns=columns, bits=bits, block=block)

    weight = to.constant(packed, (rows, columns), to.dtype(node.input(2)), compute, (packed, node.input(2)))
    to.with_bias(node, "MatMul", (node.inputs[0], weight), node.input(5), {})


def _gather_blocks(to: Rewriting, node: Node) -> None:
    """`GatherBlockQuantized(table, indices, scales, zero points)`."""
    attributes = node.attributes
    axis, block = int(attributes.get("quantize_axis", 1)), int(attributes.get("block_size", 128))
    if int(attributes.get("bits", 4)) == 4 and getattr(to.graph.array(node.inputs[0]), "dtype", None) == np.uint8:
        raise Unread("with two numbers in a byte")
    table = to.floating((node.inputs[0], node.input(2), node.input(3)), axis, block)
    to.add(node, "Gather", (table, node.inputs[1]), {"axis": int(attributes.get("gather_axis", 0))})


def _attention(to: Rewriting, node: Node) -> None:
    """`QAttention(x, w, bias, scale, scale, mask, zero, zero, past)`."""
    x = to.floating((node.inputs[0], node.input(3), node.input(6)))
    weight = to.floating((node.inputs[1], node.input(4), node.input(7)), -1)
    to.add(node, "Attention", (x, weight, node.input(2), node.input(5), node.input(8)))


def _embed(to: Rewriting, node: Node) -> None:
    """`QEmbedLayerNormalization`: five tables, then the mask, then their scales, then their zero points."""
    tables = [
        to.floating((node.input(2 + i), node.input(8 + i), node.input(13 + i))) if node.input(2 + i) else ""
        for i in range(5)
    ]
    to.add(node, "EmbedLayerNormalization", (*node.inputs[:2], *tables, node.input(7)))


_REWRITES: dict[str, Callable[[Rewriting, Node], None]] = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _dynamic,
    "MatMulInteger": _integer_product,
    "ConvInteger": _integer_product,
    "MatMulIntegerToFloat": _to_float,
    "DynamicQuantizeMatMul": _to_float,
    "QLinearConv": _linear_conv,
    "QGemm": _gemm,
    "QLinearConcat": _concat,
    "QLinearWhere": _choice,
    "QLinearSoftmax": _alone,
    "MatMulNBits": _nbits,
    "GatherBlockQuantized": _gather_blocks,
    "QAttention": _attention,
    "QEmbedLayerNormalization": _embed,
    **dict.fromkeys(_ALONE, _alone),
    **dict.fromkeys(_PAIRS, _linear),
}
