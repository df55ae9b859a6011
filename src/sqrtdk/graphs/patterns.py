"""What is done to q and k in several operations: a normalisation that is written out, a rotation."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.graphs.graph import SAME, Graph, Node
from sqrtdk.graphs.layout import LAYOUT

NORMS = {
    "LayerNormalization": "layer",
    "SimplifiedLayerNormalization": "rms",
    "RMSNormalization": "rms",
    "LpNormalization": "l2",
}
MEANS = ("ReduceMean", "ReduceSum", "ReduceL2", "ReduceSumSquare")
_TO_MEAN = ("Cast", "Identity", "Reciprocal", "Sqrt", "Add", "Max", "Clip", "Pow", "Expand", "Div", "Abs", "Mul")
_ROTATES = (*LAYOUT, "Add", "Sub", "Mul", "Neg", "Concat")
_TABLE = ("Cast", "Identity", "Mul", "Neg", "Concat", "Unsqueeze", "Squeeze", "Slice", "Gather", "Reshape", "Expand",
          "Transpose", "Split", "Tile", "Div")  # fmt: skip
_MOST_NODES = 64  # of a rotation, or of its table
_MOST_STEPS = 12  # of a normalisation


@dataclass(frozen=True, slots=True)
class Pattern:
    """Operations that are one step.

    Attributes:
        name: "norm", "rope", "unknown".
        detail: kind of the normalisation, or the operator.
        source: name of the tensor that goes in.
    """

    name: str
    detail: str
    source: str


def read_norm(graph: Graph, made: str) -> Pattern | None:
    """The normalisation that makes a tensor, with its gain and shift; None where none does."""
    node = graph.made_by.get(made)
    if node is not None and node.op in NORMS and (node.op != "LpNormalization" or node.attributes.get("p", 2) == 2):
        return Pattern("norm", NORMS[node.op], node.inputs[0])
    name = made
    for _ in range(_MOST_STEPS):
        node = graph.made_by.get(name)
        if node is None or node.domain:
            return None
        found = _core(graph, node)
        if found is not None:
            return found
        if node.op in SAME:
            name = node.inputs[0]
            continue
        data = [i for i in node.inputs if not graph.is_constant(i)]
        if node.op not in ("Add", "Mul") or len(data) != 1:
            return None
        name = data[0]
    return None


def _core(graph: Graph, node: Node) -> Pattern | None:
    """Read x / length(x), or x times the reciprocal, or (x - mean(x)) / deviation(x)."""
    if node.op not in ("Mul", "Div"):
        return None
    for x, length in (node.inputs, node.inputs[::-1])[: 2 if node.op == "Mul" else 1]:
        mean = _mean_behind(graph, length, graph.through(x))
        if mean is None:
            continue
        if mean.op != "ReduceMean":
            return Pattern("norm", "l2", x)
        centred = graph.made_by.get(graph.through(x))
        if centred is not None and centred.op == "Sub":
            middle = graph.made_by.get(graph.through(centred.inputs[1]))
            if middle is not None and middle.op == "ReduceMean":
                return Pattern("norm", "layer", centred.inputs[0])
        return Pattern("norm", "rms", x)
    return None


def _mean_behind(graph: Graph, name: str, x: str) -> Node | None:
    """The mean, sum or length from which a divisor is made, of the squares of x."""
    mean = None
    for _ in range(_MOST_STEPS):
        if graph.through(name) == x:
            return mean
        node = graph.made_by.get(name)
        if node is None:
            return None
        if node.op in MEANS:
            mean, name = node, node.inputs[0]
            continue
        data = {i for i in node.inputs if i and not graph.is_constant(i)}
        if node.op not in _TO_MEAN or len(data) != 1:
            return None
        name = data.pop()
    return None


def read_rotation(graph: Graph, made: str) -> Pattern | None:
    """The rotation that makes a tensor: sums of products of one tensor's parts with tables of sines and cosines."""
    node = graph.made_by.get(made)
    if node is None:
        return None
    if node.op == "RotaryEmbedding":
        return Pattern("rope", "", node.inputs[0])
    if node.op not in ("Add", "Sub", "Concat"):
        return None
    source, by_table = _single_source(graph, made)
    if source is None:
        return None
    return Pattern("rope" if by_table else "unknown", "" if by_table else node.op, source)


def _single_source(graph: Graph, made: str) -> tuple[str | None, bool]:
    """The tensor whose parts alone make another one, and whether tables are among what they meet."""
    frontier, merged, by_table = {made: graph.made_by[made].number}, False, False
    for _ in range(_MOST_NODES):
        name = max(frontier, key=lambda i: frontier[i])
        if merged and len(frontier) == 1:
            return name, by_table
        node = graph.made_by.get(name)
        if node is None or node.op not in _ROTATES:
            return None, False
        taken = node.inputs[:1] if node.op in LAYOUT else node.inputs
        data = [i for i in taken if not is_table(graph, i)]
        by_table |= node.op == "Mul" and len(data) < len(taken)
        if not data:
            return None, False
        del frontier[name]
        frontier |= {i: graph.made_by[i].number if i in graph.made_by else -1 for i in data}
        merged |= len(data) > 1
    return None, False


def is_table(graph: Graph, name: str) -> bool:
    """Whether a tensor is made of constants, sines and cosines alone."""
    pending, seen = [name], set()
    while pending:
        last = pending.pop()
        if last in seen or graph.is_constant(last):
            continue
        seen.add(last)
        node = graph.made_by.get(last)
        if node is None or len(seen) > _MOST_NODES:
            return False
        if node.op in ("Cos", "Sin") or (node.op == "Gather" and graph.is_constant(node.inputs[0])):
            continue
        if node.op not in _TABLE:
            return False
        pending += node.inputs[:1] if node.op in LAYOUT else node.inputs
    return True
