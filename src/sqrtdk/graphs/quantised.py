"""Turns a quantised ONNX graph back into a floating-point graph.

onnxruntime's quantiser writes three forms. All of them round, and none changes the scale of a tensor:

- dynamic: `DynamicQuantizeLinear`, `MatMulInteger`, `Cast`, and `Mul` by the scales of both operands;
- QDQ: `QuantizeLinear` and `DequantizeLinear` around each operator;
- QOperator: `QLinearMatMul`, `QLinearConv`, `QLinearSoftmax` and others, with scales and zero points as inputs.

Here a quantised activation becomes the activation itself, and a quantised weight becomes
`(integers - zero point) * scale`, computed on demand. So `MatMulInteger(x_q, w_q)` times `x_scale * w_scale` becomes
`MatMul(x, w)`: these scales belong to the rounding and must not be read as factors on q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sqrtdk.graphs.graph import Computed, Graph, GraphNode
from sqrtdk.graphs.rewriting import (
    INTEGER_PRODUCT,
    REWRITTEN_DOMAINS,
    Array,
    Rewriting,
    UnreadOperator,
    few_bits,
    four_bit_floats,
    integers,
)
from sqrtdk.messages import Message, joined


class _Row(NamedTuple):
    """The floating-point operator that replaces an operator on integers, and the roles of its inputs by index."""

    op: str  # the floating-point operator
    # one index for a plain tensor; three for integers, their scale and their zero point
    operands: tuple[int | tuple[int, int, int], ...]
    # indices of the result's scale and zero point; () if the result is not quantised
    result: tuple[int, ...] = ()
    axis: int = 0  # axis along which the scales of a weight differ
    # indices of an integer bias and of the two scales whose product is its unit
    bias: tuple[int, ...] = ()


_ONE, _TWO = ((0, 1, 2),), ((0, 1, 2), (3, 4, 5))
_QLINEAR_ROWS = {
    "QLinearSigmoid": _Row("Sigmoid", _ONE, (3, 4)),
    "QLinearLeakyRelu": _Row("LeakyRelu", _ONE, (3, 4)),
    "QLinearSoftmax": _Row("Softmax", _ONE, (3, 4)),
    "QLinearAveragePool": _Row("AveragePool", _ONE, (3, 4)),
    "QLinearGlobalAveragePool": _Row("GlobalAveragePool", _ONE, (3, 4)),
    "QLinearReduceMean": _Row("ReduceMean", _ONE, (3, 4)),
    "QLinearAdd": _Row("Add", _TWO, (6, 7)),
    "QLinearMul": _Row("Mul", _TWO, (6, 7)),
    "QLinearMatMul": _Row("MatMul", _TWO, (6, 7), axis=-1),
    "QLinearConv": _Row("Conv", _TWO, (6, 7), bias=(8, 1, 4)),
    "QGemm": _Row("Gemm", _TWO, (7, 8), axis=1, bias=(6, 1, 4)),
    "QLinearWhere": _Row("Where", (0, (1, 2, 3), (4, 5, 6)), (7, 8)),
    "MatMulIntegerToFloat": _Row("MatMul", ((0, 2, 4), (1, 3, 5), 6), axis=-1),
    "QAttention": _Row("Attention", ((0, 3, 6), (1, 4, 7), 2, 5, 8), axis=-1),
    "QEmbedLayerNormalization": _Row(
        "EmbedLayerNormalization", (0, 1, (2, 8, 13), (3, 9, 14), (4, 10, 15), (5, 11, 16), (6, 12, 17), 7)
    ),
}


def without_quantisation(graph: Graph) -> Graph:
    """Return the graph in floating-point numbers, or the same object if nothing in it is quantised.

    An unsupported operator stays in place under a name that no operator has, such as "QLinearAdd of integers that are
    computed", so that the walk reports it as not read.
    """
    if not any(node.op in _REWRITES and node.domain in REWRITTEN_DOMAINS for node in graph.nodes):
        return graph
    rewriting = Rewriting(graph, _REWRITES, dict(graph.initializers))
    for node in graph.nodes:
        rewriting.take(node)
    # `x_scale * w_scale` is dropped where nothing uses it any more.
    taken = {name for node in rewriting.nodes for name in node.inputs}
    nodes = tuple(node for node in rewriting.nodes if node not in rewriting.of_scales or taken & {*node.outputs})
    return replace(graph, nodes=nodes, initializers=rewriting.initializers)


def note_on_dialects(graph: Graph) -> tuple[str, ...]:
    """Return the note that names how a graph is quantised, of the graph as the file has it; () if it is not."""
    ops = [node for node in graph.nodes if node.op in _REWRITES and node.domain in REWRITTEN_DOMAINS]
    held = {node.op for node in ops}
    found = [name for name, members in _QUANTISED_FORMS.items() if held & members]
    if not found and held & _ON_BOTH_SIDES:
        found = ["QDQ"]
    found += dict.fromkeys(_packed(node) for node in ops if node.op in _PACKED)
    return (Message("graphs.quantised", what=joined(found, "comma")),) if found else ()


def _packed(node: GraphNode) -> str:
    block = int(node.attributes.get("block_size", 32))
    if node.op == "MatMulBnb4":
        return f"MatMulBnb4 ({('FP4', 'NF4')[int(node.attributes.get('quant_type', 1)) != 0]}, blocks of {block})"
    return f"{node.op} ({int(node.attributes.get('bits', 4))} bits, blocks of {block})"


def _by_row(to: Rewriting, node: GraphNode) -> None:
    row = _QLINEAR_ROWS[node.op]
    axis = 0 if node.attributes.get("transB") else row.axis
    names = []
    for places in row.operands:
        if isinstance(places, int):
            names.append(node.input(places))
        else:
            names.append(to.floating([node.input(i) for i in places], axis) if node.input(places[0]) else "")
    if row.bias:
        names.append(_summed_bias(to, [node.input(i) for i in row.bias], float(node.attributes.get("alpha", 1.0))))
    to.add(node, row.op, names)
    if row.result and node.input(row.result[0]):
        to.requantised(node, *(node.input(i) for i in row.result))


def _summed_bias(to: Rewriting, names: list[str], factor: float) -> str:
    """Return the name of a dequantised bias: integers in units of the product of both operands' scales."""
    whole, first, second = (to.graph.array(name) if name else None for name in names)
    if whole is None:
        return ""
    if first is None or second is None:
        raise UnreadOperator("with scales that are computed")

    def compute() -> Array:
        made: Array = integers(whole) * (first.flatten() * second.flatten() * np.float32(factor))
        return made.astype(np.float32)

    return to.constant(names[0], whole.shape, 1, compute, tuple(names))


def _quantize(to: Rewriting, node: GraphNode) -> None:
    """Replaces `QuantizeLinear(x, scale, zero point)` by x, rounded."""
    to.rounded(node, node.inputs[0], node.inputs[1:3])
    to.carry(node, node.input(1))


def _dynamic(to: Rewriting, node: GraphNode) -> None:
    """Replaces `DynamicQuantizeLinear(x)` by x, rounded, with scale 1 and zero point 0."""
    to.rounded(node, node.inputs[0])
    to.carry(node, node.outputs[1])
    constants: tuple[tuple[int, Array], ...] = ((1, np.ones((), np.float32)), (2, np.zeros((), np.uint8)))
    for name, (dtype, number) in zip(node.outputs[1:], constants, strict=False):
        to.initializers[name] = Computed(name, (), dtype, number.copy)


def _dequantize(to: Rewriting, node: GraphNode) -> None:
    """Replaces `DequantizeLinear` of a constant by a weight, and of an activation by the activation itself."""
    axis, block, kind = (
        int(node.attributes.get(*entry)) for entry in (("axis", 1), ("block_size", 0), ("output_dtype", 0))
    )
    name = node.inputs[0]
    if name not in to.integer_scales and to.graph.array(name) is None:
        to.nodes.append(node)  # the caller's integers, such as the pixels of an image
        return
    names = (to.floating((name, node.input(1), node.input(2)), axis, block),)
    to.add(node, "Cast" if kind else "Identity", names, {"to": kind} if kind else {})


def _integer_product(to: Rewriting, node: GraphNode) -> None:
    """Replaces `MatMulInteger` by `MatMul` and `ConvInteger` by `Conv`, on floating tensors.

    Later nodes multiply the integer product by the scales of both operands.
    """
    names, zeros = node.inputs[:2], (node.input(2), node.input(3))
    # The product is later multiplied by x_scale * w_scale, of which only the scales of constants are needed.
    own = {to.integer_scales[name] for name in names if name in to.integer_scales}
    constants = [i for i, name in enumerate(names) if name not in to.integer_scales]
    scales = to.weight_scale(node, own, len(constants))
    of, op = dict(zip(constants, scales, strict=True)), node.op.removesuffix("Integer")
    sources = [
        name if i not in of else to.floating((name, of[i], zeros[i]), -1 if op == "MatMul" else 0)
        for i, name in enumerate(names)
    ]
    to.add(node, op, sources)
    to.carry(node, INTEGER_PRODUCT)


def _concat(to: Rewriting, node: GraphNode) -> None:
    """Replaces `QLinearConcat(y scale, y zero, X, scale, zero, ...)`."""
    to.add(node, "Concat", [to.floating(node.inputs[i : i + 3]) for i in range(2, len(node.inputs) - 2, 3)])
    to.requantised(node, node.input(0), node.input(1))


def _dynamic_product(to: Rewriting, node: GraphNode) -> None:
    """Replaces `DynamicQuantizeMatMul(A, B, scale, zero, bias)`."""
    left, right = f"{node.outputs[0]}::rounded", to.floating((*node.inputs[1:3], node.input(3)), -1)
    to.rounded(replace(node, outputs=(left,)), node.inputs[0])
    to.add(node, "MatMul", (left, right, node.input(4)))


def _nbits(to: Rewriting, node: GraphNode) -> None:
    """Replaces `MatMulNBits(A, B, scales, zero points, group numbers, bias)`, whose weight has blocks along K."""
    attributes, packed = node.attributes, node.input(1)
    rows, columns = int(attributes.get("K", 0)), int(attributes.get("N", 0))
    arrays = [to.graph.array(name) if name else None for name in (packed, *(node.input(i) for i in (2, 3, 4)))]
    if min(rows, columns) < 1 or arrays[0] is None:
        raise UnreadOperator("of sizes that are not told")
    if node.input(4) and arrays[3] is None:
        raise UnreadOperator("with groups that are computed")
    bits, block = int(attributes.get("bits", 4)), int(attributes.get("block_size", 32))

    def compute() -> Array:
        return few_bits(*arrays, rows=rows, columns=columns, bits=bits, block=block)

    weight = to.constant(packed, (rows, columns), to.dtype(node.input(2)), compute, (packed, node.input(2)))
    read = ("K", "N", "bits", "block_size", "accuracy_level")  # accuracy_level only limits rounding
    rest = {name: value for name, value in attributes.items() if name not in read}
    to.add(node, "MatMul", (node.inputs[0], weight, node.input(5)), rest)


def _bnb4(to: Rewriting, node: GraphNode) -> None:
    """Replaces `MatMulBnb4(A, B, largest of each block)`, whose weight has blocks over all its numbers."""
    attributes, packed = node.attributes, node.input(1)
    rows, columns, block, kind = (int(attributes.get(name, -1)) for name in ("K", "N", "block_size", "quant_type"))
    whole, largest = (to.graph.array(name) for name in (packed, node.input(2)))
    if min(rows, columns, block) < 1 or whole is None or largest is None:
        raise UnreadOperator("of sizes that are not told")
    if kind not in (0, 1) or not int(attributes.get("transB", 1)):
        raise UnreadOperator("of a code, or a layout, that is not known")

    def compute() -> Array:
        return four_bit_floats(whole, largest, rows=rows, columns=columns, kind=kind, block=block)

    weight = to.constant(packed, (rows, columns), to.dtype(node.input(2)), compute, (packed, node.input(2)))
    read = ("K", "N", "block_size", "quant_type", "transB", "training_mode")
    rest = {name: value for name, value in attributes.items() if name not in read}
    to.add(node, "MatMul", (node.inputs[0], weight), rest)


def _gather_blocks(to: Rewriting, node: GraphNode) -> None:
    """Replaces `GatherBlockQuantized(table, indices, scales, zero points)`."""
    attributes = node.attributes
    axis, block = int(attributes.get("quantize_axis", 1)), int(attributes.get("block_size", 128))
    if int(attributes.get("bits", 4)) == 4 and getattr(to.graph.array(node.inputs[0]), "dtype", None) == np.uint8:
        raise UnreadOperator("with two numbers in a byte")
    table = to.floating((node.inputs[0], node.input(2), node.input(3)), axis, block)
    to.add(node, "Gather", (table, node.inputs[1]), {"axis": int(attributes.get("gather_axis", 0))})


_ON_BOTH_SIDES = frozenset({"QuantizeLinear", "DequantizeLinear"})  # also at the ends of a graph of QOperators
_PACKED = ("MatMulNBits", "MatMulBnb4", "GatherBlockQuantized")
_QUANTISED_FORMS = {
    "QOperator": frozenset({*_QLINEAR_ROWS, "QLinearConcat"}) - {"MatMulIntegerToFloat", "QAttention"},
    "MatMulInteger": frozenset({
        "MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention",
    }),
}  # fmt: skip

_REWRITES: dict[str, Callable[[Rewriting, GraphNode], None]] = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _dynamic,
    "MatMulInteger": _integer_product,
    "ConvInteger": _integer_product,
    "DynamicQuantizeMatMul": _dynamic_product,
    "QLinearConcat": _concat,
    "MatMulNBits": _nbits,
    "MatMulBnb4": _bnb4,
    "GatherBlockQuantized": _gather_blocks,
    **dict.fromkeys(_QLINEAR_ROWS, _by_row),
}
