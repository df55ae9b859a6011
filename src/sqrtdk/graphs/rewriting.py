"""The rewriting of a quantised graph: the nodes so far, which tensors stand for what, and the numbers of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sqrtdk.graphs.graph import Computed, Graph, Node

Array = np.ndarray[Any, Any]
DOMAINS = ("", "com.microsoft")
ROUNDED = ("::", "Rounded")  # domain and name of an operator of no file
PRODUCT = "::product"  # in place of the scale of a product of integers
_MOVES = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Concat", "Gather",
          "GatherElements", "GatherND", "Expand", "Tile", "MaxPool", "Pad", "DepthToSpace", "SpaceToDepth", "Resize",
          "ArgMax", "Shape", "Size")  # fmt: skip
_MOST_STEPS = 4  # from a product of integers to the last of its scales


class Unread(Exception):
    """Why an operator on integers is not read."""


@dataclass(slots=True, eq=False)
class Rewriting:
    """The nodes so far."""

    graph: Graph  # as it is in the file
    rewrites: Mapping[str, Callable[[Rewriting, Node], None]]  # by operator, what it is of floating-point numbers
    initializers: dict[str, Any]  # with the weights that were dequantised
    nodes: list[Node] = field(default_factory=list)  # of the new graph
    # names of integer tensors that are floating-point ones now, each with the name of its scale
    carried: dict[str, str] = field(default_factory=dict)
    # multiplications by scales of rounding alone, and whether it is the last of a product
    dropped: dict[Node, bool] = field(default_factory=dict)
    of_scales: set[Node] = field(default_factory=set)  # products of scales
    _weights: dict[tuple[str, ...], str] = field(default_factory=dict)

    def take(self, node: Node) -> None:
        """Add what a node is to the new graph."""
        rewrite = self.rewrites.get(node.op) if node.domain in DOMAINS else None
        source = next((name for name in node.inputs if name in self.carried), None)
        if node in self.dropped:
            kept = next(name for name in node.inputs if self.carried.get(name) == PRODUCT)
            self.add(node, "Identity", (kept,), {})
            if not self.dropped[node]:
                self.carried[node.outputs[0]] = PRODUCT
        elif rewrite is not None:
            try:
                rewrite(self, node)
            except Unread as error:
                self.nodes.append(replace(node, op=f"{node.op} {error}"))
        elif source is not None and not (node.op == "Cast" and self.carried.get(node.inputs[0]) == PRODUCT):
            moves = node.op in _MOVES and not node.domain
            self.nodes.append(node if moves else replace(node, op=f"{node.op} of quantised integers"))
            self.carried |= {name: self.carried[source] for name in node.outputs if name and moves}
        else:
            self.nodes.append(node)
            if source is not None:  # a Cast of a product of integers, whose scales come next
                self.carried[node.outputs[0]] = self.carried[source]

    # -- what the rewrites of operators are made of --------------------------------------------------------------------

    def add(self, node: Node, op: str, inputs: Sequence[str], attributes: dict[str, Any] | None = None) -> None:
        """Put a floating-point operator in the place of a node; trailing inputs that are left out are dropped."""
        names = [*inputs]
        while names and not names[-1]:
            names.pop()
        domain = "com.microsoft" if op in ("Attention", "EmbedLayerNormalization") else ""
        given = node.attributes if attributes is None else attributes
        outputs = node.outputs[:1] if op not in ("EmbedLayerNormalization", "Attention") else node.outputs
        self.nodes.append(replace(node, op=op, domain=domain, inputs=tuple(names), outputs=outputs, attributes=given))

    def rounded(self, node: Node, name: str, of: Sequence[str] = ()) -> None:
        """Put what a node makes as `name`, rounded: to a scale and a zero point, or to those of its own values."""
        from onnx.helper import tensor_dtype_to_np_dtype

        scale, zero = (self.graph.array(source) if source else None for source in (*of, "", "")[:2])
        if not "".join(of[1:]):
            zero = np.zeros((), tensor_dtype_to_np_dtype(int(node.attributes.get("output_dtype", 0)) or 2))
        attributes = {"scale": scale, "zero": zero, "fixed": bool(of)}
        made = replace(node, inputs=(name,), outputs=node.outputs[:1], attributes=attributes)
        self.nodes.append(replace(made, domain=ROUNDED[0], op=ROUNDED[1]))

    def requantised(self, node: Node, scale: str, zero: str) -> None:
        """Round what the last operator makes, to the scale and the zero point that the node has for it."""
        exact = f"{node.outputs[0]}::exact"
        self.nodes[-1] = replace(self.nodes[-1], outputs=(exact, *self.nodes[-1].outputs[1:]))
        self.rounded(node, exact, (scale, zero))
        self.carry(node, scale)

    def floating(self, quantised: Sequence[str], axis: int = 0, block: int = 0) -> str:
        """Name of the floating-point tensor that integers stand for, with the names of their scale and zero point.

        Scales differ along an axis, in blocks of so many values; 0 where all of the axis share one.
        """
        name, scale, zero = quantised
        if name in self.carried:
            return name
        whole = self.graph.array(name)
        if whole is None:
            raise Unread("of integers that are computed")
        graph = self.graph

        def compute() -> Array:
            offset = graph.array(zero) if zero else None
            factor = graph.array(scale)
            return blocks(integers(graph.array(name)), factor, 0 if offset is None else integers(offset), axis, block)

        return self.constant(name, whole.shape, self.dtype(scale), compute, (name, scale, zero, str(axis)))

    def constant(
        self, name: str, dims: Sequence[int], dtype: int, compute: Callable[[], Array], key: tuple[str, ...]
    ) -> str:
        """Name of a new constant; that of the weight before it was quantised, where the quantiser kept it."""
        if key not in self._weights:
            before = name.removesuffix("_quantized").removesuffix("_Q4").removesuffix("_Q8").removesuffix("_quant")
            free = before if before not in self.initializers and before not in self.graph.made_by else f"{name}::float"
            self._weights[key] = free if free not in self.initializers else f"{free}::{len(self._weights)}"
            self.initializers[self._weights[key]] = Computed(self._weights[key], tuple(dims), dtype, compute)
        return self._weights[key]

    def dtype(self, name: str) -> int:
        """ONNX's number for the dtype of a scale, which is that of what it scales; float32 where it is not known."""
        proto = self.graph.initializers.get(name)
        return int(proto.data_type) if proto is not None else 1

    def carry(self, node: Node, scale: str) -> None:
        """Note that what a node makes is of integers in the file, and of floating-point numbers here."""
        self.carried |= {name: scale for name in node.outputs[:1] if name}

    def scales_of(self, name: str, own: set[str]) -> list[str] | None:
        """Constants in a product of scales, but for those of activations; None where it is something else."""
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

    def weight_scale(self, node: Node, own: set[str], wanted: int) -> list[str]:
        """Scales of the constants in a product of integers: found where the product is multiplied by them."""
        found: list[str] = []
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
            raise Unread("without the scales of its operands")
        self.dropped |= {taker: taker is dropped[-1] for taker in dropped}
        return found


# -- integers as the numbers that they stand for, in numpy -------------------------------------------------------------


def integers(array: Any) -> Array:
    """Whole numbers of any width, of 4 bits as well, as 32 bits; floating-point ones of 8 bits as float32."""
    array = np.asarray(array)
    made: Array = array.astype(np.float32 if "float" in array.dtype.name else np.int32)
    return made


def blocks(values: Array, scale: Any, zero: Any, axis: int, block: int) -> Array:
    """`(values - zero) * scale`; zero is of the scale's shape, or 0.

    The scale is one number; (n,) for an axis of n; of the weight's rank where `block` values of the axis share one.
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
    """The weight (K, N) of a `MatMulNBits`: 2, 4 or 8 bits a number, the lowest bits of a byte first.

    `packed` is (N, blocks, bytes of a block), with one scale a column and block. Zero points are packed alike, or of
    the scales' dtype; None is the middle of the range. `groups` is the block of each row, None where they follow.
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
    return made.T.astype(factor.dtype)


def _unpacked(array: Array, bits: int) -> Array:
    """Bytes as numbers of few bits, along the last axis."""
    if bits == 8:
        return array
    each = [(array >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)]
    return np.stack(each, -1).reshape(*array.shape[:-1], -1)
