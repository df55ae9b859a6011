"""Which constants of an ONNX graph are weights of the model, by their names and by the operators that take them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from sqrtdk.graphs.graph import Graph
from sqrtdk.graphs.places import fits

_WEIGHT_INPUTS = {"MatMul": (1,), "Gemm": (1,), "Conv": (1,), "ConvTranspose": (1,), "FusedConv": (1,),
                  "FusedGemm": (1,), "FusedMatMul": (1,), "LayerNormalization": (1, 2),
                  "RMSNormalization": (1,), "SimplifiedLayerNormalization": (1,), "Gather": (0,),
                  "Attention": (1,)}  # fmt: skip
_MOST_WHOLE = 2**16  # a width of which a scale may be a root
_MOVED = ("Transpose", "Cast", "Identity", "Reshape", "Mul", "Div", "Unsqueeze", "Squeeze", "Expand")
_FLOATING = (1, 10, 11, 16)  # ONNX's numbers of the floating-point dtypes that torch has


def find_weights(graph: Graph) -> tuple[set[str], set[str], dict[str, str]]:
    """Find the weights: operands of projections, and floating-point constants that have the name of a parameter.

    Names of queries that the exporter has worked out, which are the same for all inputs, are second; parameters' names
    of weights that the file calls otherwise are third: "onnx::MatMul_31" is "attn.q_proj.weight".
    """
    initializers = graph.initializers
    named = {name: proto for name, proto in initializers.items() if "." in name and fits(name)}
    floating = {name: math.prod(proto.dims) for name, proto in named.items() if int(proto.data_type) in _FLOATING}
    places = _places(graph, floating)
    learned = {name for name, size in floating.items() if size != 1 or _is_learned_number(graph, name, places)}
    names: dict[str, str] = {}
    for node in graph.nodes:
        for index in _WEIGHT_INPUTS.get(node.op, ()):
            source = _source(graph, node.input(index))
            if source in initializers and len(initializers[source].dims) > (node.op == "Gather"):
                learned.add(source)
                if "." not in source and node.scope and fits(node.scope):
                    names.setdefault(source, f"{node.scope}.weight")
    constant = _constants(graph)
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
    """Tensors that are the same for all inputs: computed of constants alone, or of shapes."""
    found = {*graph.initializers, ""}
    for node in graph.nodes:
        random = node.op.startswith("Random") or node.op in ("Bernoulli", "Multinomial")
        if not random and not node.inner and (node.op in ("Shape", "Size") or found.issuperset(node.inputs)):
            found.update(node.outputs)
    return found


def _places(graph: Graph, floating: Mapping[str, int]) -> set[str]:
    """Paths of modules: those that the exporter noted at operations, those of weights, and all above them."""
    paths = {name.rpartition(".")[0] for name, size in floating.items() if size > 1}
    paths |= {node.scope for node in graph.nodes if node.scope}
    return {".".join(path.split(".")[:depth]) for path in paths for depth in range(1, path.count(".") + 2)}


def _is_learned_number(graph: Graph, name: str, places: set[str]) -> bool:
    """Whether one number is a parameter, a temperature: it has the name of one, in a module that there is.

    "auto.cast.74" is a name that an optimiser made up. One that is a root of a whole number to the last bit, or that
    number, was written in the code (64 ** -0.5 as "attn.scale"), or was never trained.
    """
    path, _, last = name.rpartition(".")
    if not last.isidentifier() or path not in places:
        return False
    exact = graph.tensor(name).abs().flatten()
    value = float(exact.double()[0])
    return not any(bool(exact == torch.tensor(root, dtype=exact.dtype)) for root in _roots(value))


def _roots(value: float) -> Iterable[float]:
    """Whole numbers, and their roots, that a number may be, each to the last bit of float64."""
    for power in (1.0, 2.0, 4.0, -1.0, -2.0, -4.0):
        if 1 / _MOST_WHOLE < value < _MOST_WHOLE and value**power < _MOST_WHOLE and round(value**power):
            yield round(value**power) ** (1 / power)


def _source(graph: Graph, name: str, through: tuple[str, ...] = ("Transpose", "Cast", "Identity")) -> str:
    """The constant that is moved to a tensor."""
    while (node := graph.made_by.get(name)) is not None and node.op in through:
        data = [i for i in node.inputs if i not in graph.initializers or len(graph.initializers[i].dims) > 1]
        name = (data or [*node.inputs])[0]
    return name
