"""Finds the constants of an ONNX graph that are weights, by their names and by the operators that use them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from sqrtdk.errors import ModelError
from sqrtdk.frontends.regions import is_module_path
from sqrtdk.graphs.graph import Graph
from sqrtdk.graphs.onnx_shapes import RANDOM_NODES
from sqrtdk.graphs.onnx_step import ONNX_DTYPES
from sqrtdk.messages import Message

MOST_FOLDED = 2**12  # largest constant that is folded, in elements
MOST_ELEMENTS = 2**40  # largest tensor on the meta device, in elements

_WEIGHT_INPUTS = {"MatMul": (1,), "Gemm": (1,), "Conv": (1,), "ConvTranspose": (1,), "FusedConv": (1,),
                  "FusedGemm": (1,), "FusedMatMul": (1,), "LayerNormalization": (1, 2),
                  "RMSNormalization": (1,), "SimplifiedLayerNormalization": (1,), "Gather": (0,),
                  "Attention": (1,), **dict.fromkeys(("RNN", "GRU", "LSTM"), (1, 2, 3))}  # fmt: skip
_MOST_WHOLE = 2**16  # largest width whose root a scale may be
_MOVED = ("Transpose", "Cast", "Identity", "Reshape", "Mul", "Div", "Unsqueeze", "Squeeze", "Expand")
_FLOATING = (1, 10, 11, 16)  # ONNX's numbers of the floating-point dtypes that torch has


class GraphConstants:
    """The constants of a graph, with values or on the meta device.

    Args:
        graph: The graph.
        on_meta: Whether they have shapes alone.

    Attributes:
        learned: Names of the weights.
        queries: Names of the constants that are queries.
        renamed: Parameter names of weights that the file renamed.
        known: Values of small constants.
        shapes: Shapes and dtypes by name, of constants and of what is declared.
        lost: Names of those that torch does not have, each with the reason.
    """

    def __init__(self, graph: Graph, on_meta: bool) -> None:
        self.graph, self.on_meta = graph, on_meta
        self.learned, folded, self.renamed = find_weights(graph)
        self.shapes: dict[str, tuple[list[int], torch.dtype]] = {}
        self.lost: dict[str, str] = {}
        declared = [
            name
            for name, proto in graph.initializers.items()
            if self.declare("tensor", name, [int(size) for size in proto.dims], int(proto.data_type))
        ]
        self.queries = [name for name in declared if name in folded]
        small = [name for name in declared if name not in folded | self.learned and self.size(name) <= MOST_FOLDED]
        self.known = {name: graph.tensor(name) for name in small}

    def declare(self, what: str, name: str, shape: list[int], data_type: int) -> bool:
        """Note shape and dtype of a tensor; return False, and note it as lost, if torch has no such dtype.

        Raises:
            ModelError: The shape is larger than memory.
        """
        if data_type not in ONNX_DTYPES:
            self.lost[name] = Message("graphs.input_type", type=data_type)
            return False
        if math.prod(shape) > MOST_ELEMENTS or any(size < 0 for size in shape):
            raise ModelError(f"the {what} {name[:100]!r} has the shape {shape[:8]}", hint="Export it again.")
        self.shapes[name] = shape, ONNX_DTYPES[data_type]
        return True

    def size(self, name: str) -> int:
        """Return the number of elements of a declared tensor."""
        return math.prod(self.shapes[name][0])

    def empty(self, name: str) -> Tensor:
        """Return a declared tensor without values, on the meta device."""
        shape, dtype = self.shapes[name]
        return torch.empty(shape, dtype=dtype, device="meta")

    def tensor(self, name: str) -> Tensor:
        """Return a constant."""
        if self.on_meta:
            return self.empty(name)
        return self.known[name] if name in self.known else self.graph.tensor(name)


def find_weights(graph: Graph) -> tuple[set[str], set[str], dict[str, str]]:
    """Return the names of the weights, of constant queries, and parameter names for renamed weights.

    Weights are operands of projections, and floating-point constants with the name of a parameter. A constant query is
    one that the exporter computed because it is equal for all inputs, such as a learned query times its projection.
    The last result maps a name in the file to a parameter's: "onnx::MatMul_31" to "attn.q_proj.weight".
    """
    initializers = graph.initializers
    named = {name: proto for name, proto in initializers.items() if "." in name and is_module_path(name)}
    floating = {name: math.prod(proto.dims) for name, proto in named.items() if int(proto.data_type) in _FLOATING}
    places = _places(graph, floating)
    learned = {name for name, size in floating.items() if size != 1 or _is_learned_number(graph, name, places)}
    names: dict[str, str] = {}
    for node in graph.nodes:
        for index in _WEIGHT_INPUTS.get(node.op, ()):
            source = _source(graph, node.input(index))
            if source in initializers and len(initializers[source].dims) > (node.op == "Gather"):
                learned.add(source)
                if "." not in source and node.scope and is_module_path(node.scope):
                    names.setdefault(source, f"{node.scope}.weight")
    constant = _constants(graph)
    # MatMul(q, k.T) with a constant on the left and a computed tensor on the right: q does not depend on the inputs.
    folded = {
        source
        for node in graph.nodes
        if node.op == "MatMul" and not node.domain and node.input(1) not in constant
        if (source := _source(graph, node.input(0), _MOVED)) in initializers
        and source not in learned
        and len(initializers[source].dims) > 1
    }
    return learned, folded, names


def _constants(graph: Graph) -> set[str]:
    """Return the tensors that are equal for all inputs: computed from constants or shapes alone."""
    found = {*graph.initializers, ""}
    for node in graph.nodes:
        if (
            node.op not in RANDOM_NODES
            and not node.inner
            and (node.op in ("Shape", "Size") or found.issuperset(node.inputs))
        ):
            found.update(node.outputs)
    return found


def _places(graph: Graph, floating: Mapping[str, int]) -> set[str]:
    """Return the paths of modules, from the scopes of operations and the names of weights, with all parents."""
    paths = {name.rpartition(".")[0] for name, size in floating.items() if size > 1}
    paths |= {node.scope for node in graph.nodes if node.scope}
    return {".".join(path.split(".")[:depth]) for path in paths for depth in range(1, path.count(".") + 2)}


def _is_learned_number(graph: Graph, name: str, places: set[str]) -> bool:
    """Return whether a single number is a parameter, such as a temperature.

    Its name must be that of a parameter of an existing module; "auto.cast.74" is a name that an optimiser invented.
    A number that equals an integer or a root of one to the last bit was written in the code (64 ** -0.5 as
    "attn.scale") or never trained, and does not count.
    """
    path, _, last = name.rpartition(".")
    if not last.isidentifier() or path not in places:
        return False
    exact = graph.tensor(name).abs().flatten()
    value = float(exact.double()[0])
    return not any(bool(exact == torch.tensor(root, dtype=exact.dtype)) for root in _roots(value))


def _roots(value: float) -> Iterable[float]:
    """Yield the nearest number of each form n^(1/p) with an integer n and p = 1, 2, 4, -1, -2 or -4, in float64."""
    for power in (1.0, 2.0, 4.0, -1.0, -2.0, -4.0):
        if 1 / _MOST_WHOLE < value < _MOST_WHOLE and value**power < _MOST_WHOLE and round(value**power):
            yield round(value**power) ** (1 / power)


def _source(graph: Graph, name: str, through: tuple[str, ...] = ("Transpose", "Cast", "Identity")) -> str:
    """Return the name of the constant behind a tensor, followed back through the operators in `through`."""
    while (node := graph.made_by.get(name)) is not None and node.op in through:
        data = [i for i in node.inputs if i not in graph.initializers or len(graph.initializers[i].dims) > 1]
        name = (data or [*node.inputs])[0]
    return name
