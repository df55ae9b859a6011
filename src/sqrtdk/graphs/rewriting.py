"""State and helpers for rewriting a quantised graph: the new nodes, the replaced tensors, and dequantised weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sqrtdk.graphs.graph import Computed, Graph, GraphNode

Array = np.ndarray[Any, Any]
REWRITTEN_DOMAINS = ("", "com.microsoft")
ROUNDED_OPERATOR = ("::", "Rounded")  # domain and name of our own operator, which no file can hold
TAKEN_OPERATOR = ("::", "Taken")  # another: a tensor, as long as others hold the values that they had
INTEGER_PRODUCT = "::product"  # marks a product of integers, whose scale is applied by later nodes
_MOVES = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Concat", "Gather",
          "GatherElements", "GatherND", "Expand", "Tile", "MaxPool", "Pad", "DepthToSpace", "SpaceToDepth", "Resize",
          "ArgMax", "Shape", "Size")  # fmt: skip
_FP4_BY_BITS = (
    0,
    1 / 192,
    2 / 3,
    1,
    1 / 3,
    1 / 2,
    1 / 6,
    1 / 4,
)  # of bitsandbytes; the fourth bit is the sign
# Quantiles of a normal distribution (Dettmers et al. 2023, QLoRA, appendix E).
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FOUR_BIT_CODES = (np.array([*_FP4_BY_BITS, *(-x for x in _FP4_BY_BITS)], np.float32), np.array(_NF4, np.float32))
_QUANTISED_NAME = re.compile(r"_(quantized|quant|Q\d|Bnb4)$")  # what onnxruntime's tools put behind a weight's name
_MOST_STEPS = 4  # nodes from a product of integers to the last multiplication by its scales


class UnreadOperator(Exception):
    """Raised for an operator on integers that can't be read; its text is the reason."""


@dataclass(slots=True, eq=False)
class Rewriting:
    """The rewriting of a quantised graph into one of floating-point operators, node by node."""

    graph: Graph  # the graph of the file
    rewrites: Mapping[str, Callable[[Rewriting, GraphNode], None]]  # adds the replacement of a node, by operator
    initializers: dict[str, Any]  # constants of the file, and dequantised weights
    nodes: list[GraphNode] = field(default_factory=list)  # nodes of the new graph
    # integer tensors that hold floating-point values in the new graph, each with the name of its scale
    integer_scales: dict[str, str] = field(default_factory=dict)
    # multiplications of a product by quantisation scales, and whether each is the last one of its product
    dropped: dict[GraphNode, bool] = field(default_factory=dict)
    of_scales: set[GraphNode] = field(default_factory=set)  # multiplications of scales with each other
    _weights: dict[tuple[str, ...], str] = field(default_factory=dict)

    def take(self, node: GraphNode) -> None:
        """Add to the new graph what stands for a node of the quantised one."""
        rewrite = self.rewrites.get(node.op) if node.domain in REWRITTEN_DOMAINS else None
        source = next((name for name in node.inputs if name in self.integer_scales), None)
        if node in self.dropped:
            product = next(name for name in node.inputs if self.integer_scales.get(name) == INTEGER_PRODUCT)
            self.add(node, "Identity", (product,), {})
            if not self.dropped[node]:
                self.integer_scales[node.outputs[0]] = INTEGER_PRODUCT
        elif rewrite is not None:
            try:
                rewrite(self, node)
            except UnreadOperator as error:
                self.nodes.append(replace(node, op=f"{node.op} {error}"))
        elif source is not None and not (
            node.op == "Cast" and self.integer_scales.get(node.inputs[0]) == INTEGER_PRODUCT
        ):
            moves = node.op in _MOVES and not node.domain
            self.nodes.append(node if moves else replace(node, op=f"{node.op} of quantised integers"))
            self.integer_scales |= {name: self.integer_scales[source] for name in node.outputs if name and moves}
        else:
            self.nodes.append(node)
            if source is not None:  # Cast(MatMulInteger(...)), followed by a Mul with the scales
                self.integer_scales[node.outputs[0]] = self.integer_scales[source]

    # -- what the rewrites of operators are made of --------------------------------------------------------------------

    def add(self, node: GraphNode, op: str, inputs: Sequence[str], attributes: dict[str, Any] | None = None) -> None:
        """Add a floating-point operator that stands for a node.

        Args:
            node: The quantised node, whose outputs and place it gets.
            op: The operator.
            inputs: Names of its inputs; omitted ones at the end are dropped.
            attributes: Its attributes; None: those of the node.
        """
        names = [*inputs]
        while names and not names[-1]:
            names.pop()
        domain = "com.microsoft" if op in ("Attention", "EmbedLayerNormalization") else ""
        given = node.attributes if attributes is None else attributes
        outputs = node.outputs[:1] if op not in ("EmbedLayerNormalization", "Attention") else node.outputs
        self.nodes.append(replace(node, op=op, domain=domain, inputs=tuple(names), outputs=outputs, attributes=given))

    def rounded(self, node: GraphNode, name: str, of: Sequence[str] = ()) -> None:
        """Add a node that rounds a tensor to the grid of integers.

        Args:
            node: The quantised node, whose output it computes.
            name: The tensor.
            of: Names of the scale and the zero point; without them, the grid covers the range of the tensor's own
                values.
        """
        from onnx.helper import tensor_dtype_to_np_dtype

        scale, zero = (self.graph.array(source) if source else None for source in (*of, "", "")[:2])
        if not "".join(of[1:]):
            zero = np.zeros((), tensor_dtype_to_np_dtype(int(node.attributes.get("output_dtype", 0)) or 2))
        attributes = {"scale": scale, "zero": zero, "fixed": bool(of)}
        made = replace(node, inputs=(name,), outputs=node.outputs[:1], attributes=attributes)
        self.nodes.append(replace(made, domain=ROUNDED_OPERATOR[0], op=ROUNDED_OPERATOR[1]))

    def requantised(self, node: GraphNode, scale: str, zero: str) -> None:
        """Round the output of the operator that was added last, to the scale and zero point of the quantised node."""
        exact = f"{node.outputs[0]}::exact"
        self.nodes[-1] = replace(self.nodes[-1], outputs=(exact, *self.nodes[-1].outputs[1:]))
        self.rounded(node, exact, (scale, zero))
        self.carry(node, scale)

    def floating(self, quantised: Sequence[str], axis: int = 0, block: int = 0) -> str:
        """Return the name of the floating-point tensor for (integers, scale, zero point).

        Scales differ along `axis`, with one scale for each `block` values, or one for each index if `block` is 0.
        """
        name, scale, zero = quantised
        if name in self.integer_scales:
            return name
        whole = self.graph.array(name)
        if whole is None:
            raise UnreadOperator("of integers that are computed")
        graph = self.graph

        def compute() -> Array:
            offset = graph.array(zero) if zero else None
            factor = graph.array(scale)
            return dequantised_blocks(
                integers(graph.array(name)), factor, 0 if offset is None else integers(offset), axis, block
            )

        return self.constant(name, whole.shape, self.dtype(scale), compute, (name, scale, zero, str(axis)))

    def constant(
        self, name: str, dims: Sequence[int], dtype: int, compute: Callable[[], Array], key: tuple[str, ...]
    ) -> str:
        """Return the name of a new constant.

        It is "w" for "w_quantized" if "w" is free, so that reports show the weight's own name.

        Args:
            name: Name of the quantised constant.
            dims: Shape of the new one.
            dtype: ONNX's number of its dtype.
            compute: Computes its value when it is read.
            key: What it is made from; an equal key gives the same constant again.
        """
        if key not in self._weights:
            before = _QUANTISED_NAME.sub("", name)
            free = before if before not in self.initializers and before not in self.graph.made_by else f"{name}::float"
            self._weights[key] = free if free not in self.initializers else f"{free}::{len(self._weights)}"
            self.initializers[self._weights[key]] = Computed(self._weights[key], tuple(dims), dtype, compute)
        return self._weights[key]

    def dtype(self, name: str) -> int:
        """Return ONNX's number of a scale's dtype; 1 (float32) if it is unknown.

        It is also the dtype of the dequantised tensor.
        """
        proto = self.graph.initializers.get(name)
        return int(proto.data_type) if proto is not None else 1

    def carry(self, node: GraphNode, scale: str) -> None:
        """Note that the first output of a node holds integers in the file, and floating-point numbers here."""
        self.integer_scales |= {name: scale for name in node.outputs[:1] if name}

    def scales_of(self, name: str, own: set[str]) -> list[str] | None:
        """Return the constants in a product of scales without the activations' scales in `own`.

        Returns None if the tensor is not such a product.
        """
        if name in own:
            return []
        node = self.graph.made_by.get(name)
        if node is not None and node.op == "Mul":
            parts = [self.scales_of(source, own) for source in node.inputs]
            self.of_scales.add(node)
            return None if None in parts else [n for part in parts for n in part or ()]
        if node is not None and node.op in ("Reshape", "Unsqueeze", "Squeeze", "Identity", "Cast"):
            return self.scales_of(node.inputs[0], own)
        return None if self.graph.array(name) is None else [name]

    def weight_scale(self, node: GraphNode, own: set[str], wanted: int) -> list[str]:
        """Return the names of the scales by which the result of an integer product is multiplied.

        The file has `Cast(MatMulInteger(x_q, w_q)) * (x_scale * w_scale)`, in one or two multiplications.

        Args:
            node: The product.
            own: Names that are scales of the activations, x_scale; these are not returned.
            wanted: Number of scales to find.
        """
        found: list[str] = []
        # Cast(MatMulInteger(x_q, w_q)) * (x_scale * w_scale), or * x_scale * w_scale in two steps.
        name, dropped = node.outputs[0], []
        for _ in range(_MOST_STEPS):
            taker, *more = self.graph.taken_by.get(name) or (None,)
            if taker is None or more:
                break
            if taker.op == "Mul":
                factor = taker.inputs[1] if taker.inputs[0] == name else taker.inputs[0]
                scales = self.scales_of(factor, own)
                if scales is None or len(found) + len(scales) > wanted:
                    break
                found += scales
                dropped.append(taker)
            elif taker.op != "Cast":
                break
            name = taker.outputs[0]
        if len(found) != wanted or not dropped:
            raise UnreadOperator("without the scales of its operands")
        self.dropped |= {taker: taker is dropped[-1] for taker in dropped}
        return found


# -- integers as the numbers that they stand for, in numpy -------------------------------------------------------------


def integers(array: Any) -> Array:
    """Return integers of any width (4 bits included) as int32, and float8 numbers as float32."""
    array = np.asarray(array)
    made: Array = array.astype(np.float32 if "float" in array.dtype.name else np.int32)
    return made


def dequantised_blocks(values: Array, scale: Any, zero: Any, axis: int, block: int) -> Array:
    """Return (values - zero) * scale, in the dtype of the scale.

    Args:
        values: Integers.
        scale: One number; (n,) for an axis of size n; or of the weight's rank, one for each `block` values.
        zero: Zero points, in the shape of the scale; or 0.
        axis: Axis along which scales differ.
        block: Number of values that share a scale along it; 0: one scale for each index.

    Example:
        >>> dequantised_blocks(np.array([[1, 3], [5, 7]]), np.float32([0.5, 2.0]), 1, axis=0, block=0).tolist()
        [[0.0, 1.0], [8.0, 12.0]]
    """
    factor, offset = (_placed(np.asarray(part), values.shape, axis, block) for part in (scale, zero))
    made: Array = (values - offset) * factor
    return made.astype(np.asarray(scale).dtype)


def _placed(part: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    if block:
        whole = np.repeat(part, block, axis)
        return whole[tuple(slice(0, size) for size in shape)] if whole.ndim == len(shape) else whole
    if part.size == 1:
        return part.reshape(())
    if part.ndim > 1 or not shape:
        return part
    return part.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])


def few_bits(
    packed: Any, scales: Any, zeros: Any, groups: Any, *, rows: int, columns: int, bits: int, block: int
) -> Array:
    """Return the dequantised weight (K, N) of a `MatMulNBits`, in the dtype of the scales.

    Each number is (q - zero) * scale.

    Args:
        packed: The integers q, (N, blocks, bytes per block), lowest bits of a byte first.
        scales: One scale per column and block.
        zeros: Zero points, packed like q or in the scales' dtype; None means 2^(bits - 1).
        groups: The block of each of the K rows; None means consecutive blocks.
        rows: K.
        columns: N.
        bits: Bits per number: 2, 4 or 8.
        block: Number of rows per block.
    """
    count = -(-rows // block)
    values = _unpacked(np.asarray(packed).reshape(columns, count, -1), bits)[..., :block]
    whole = values.reshape(columns, count * block)[:, :rows].astype(np.float32)
    factor = np.asarray(scales).reshape(columns, count)
    if zeros is None:
        offset = np.full((columns, count), float(2 ** (bits - 1)), np.float32)
    elif np.asarray(zeros).dtype == np.uint8:
        offset = _unpacked(np.asarray(zeros).reshape(columns, -1), bits)[:, :count].astype(np.float32)
    else:
        offset = np.asarray(zeros).reshape(columns, count).astype(np.float32)
    of = np.arange(rows) // block if groups is None else np.asarray(groups).flatten()[:rows]
    made: Array = (whole - offset[:, of]) * factor.astype(np.float32)[:, of]
    weight: Array = made.T.astype(factor.dtype)
    return weight


def four_bit_floats(packed: Any, largest: Any, *, rows: int, columns: int, kind: int, block: int) -> Array:
    """Return the dequantised weight (K, N) of a `MatMulBnb4`, in the dtype of the blocks' largest numbers.

    Each number is CODE[q] * largest, in blocks over the flattened (N, K).

    Args:
        packed: The numbers q of a code, two in a byte, highest bits first.
        largest: The largest |number| of each block.
        rows: K.
        columns: N.
        kind: 0 for the code FP4, 1 for NF4.
        block: Numbers per block.
    """
    whole = np.asarray(packed).flatten()
    codes = FOUR_BIT_CODES[kind][np.stack((whole >> 4, whole & 15), -1).flatten()[: rows * columns]]
    factor = np.asarray(largest).flatten()
    made: Array = codes * factor.astype(np.float32)[np.arange(rows * columns) // block]
    turned: Array = made.reshape(columns, rows).T.astype(factor.dtype)
    return turned


def _unpacked(array: Array, bits: int) -> Array:
    """Return bytes split into numbers of `bits` bits, along the last axis."""
    if bits == 8:
        return array
    each = [(array >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)]
    return np.stack(each, -1).reshape(*array.shape[:-1], -1)
