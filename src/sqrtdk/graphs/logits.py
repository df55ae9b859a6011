"""From a softmax back to the product of q and k, and on to where its weights meet values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from sqrtdk.graphs.graph import SAME, Graph, Node

_MOST_LINKS = 48
_RESHAPES = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
PRODUCTS = ("MatMul", "Einsum", "FusedMatMul")


@dataclass(frozen=True, slots=True, eq=False)
class LogitLink:
    """One operation between product and softmax.

    Attributes:
        node: the operation.
        source: name of the logits that go in.
        other: name of what they meet; "" where they meet nothing.
        condition: of a choice, the name of its condition.
        kept: of a choice, the logits stay where the condition holds.
    """

    node: Node
    source: str
    other: str = ""
    condition: str = ""
    kept: bool = True

    @property
    def made(self) -> str:
        """Name of what it makes."""
        return self.node.outputs[0]


@dataclass(frozen=True, slots=True, eq=False)
class Weighing:
    """A softmax with its product of q and k, and its product with values.

    Attributes:
        softmax: the node.
        product: of q and k.
        links: from the product to the softmax.
        weights: name of the weights as they meet the values.
        after: operations from the softmax to there.
        values: the product with the values.
    """

    softmax: Node
    product: Node
    links: tuple[LogitLink, ...]
    weights: str
    after: tuple[Node, ...]
    values: Node


@dataclass(slots=True)
class _Search:
    """What was found of tensors that may be logits: the product and the links to it, or None."""

    graph: Graph
    found: dict[str, tuple[Node, tuple[LogitLink, ...]] | None] = field(default_factory=dict)
    lost: str = ""  # the operation at which the first path ended


def read_weighing(graph: Graph, softmax: Node) -> Weighing | str | None:
    """The attention of a softmax; None where it is none; a reason where it is one that can't be read."""
    search = _Search(graph)
    found = _product(search, softmax.inputs[0], 0)
    met = _meeting(graph, softmax)
    if found is None:
        if met is None or not _is_activation_product(graph, softmax.inputs[0]):
            return None
        return f"its logits were not followed back to a product of q and k: {search.lost or 'an input'}"
    product, links = found
    if met is None:
        return "its weights were not followed to a product with values"
    values, weights, after = met
    return Weighing(softmax, product, links, weights, after, values)


def written_out(graph: Graph, node: Node) -> Node | None:
    """exp(z) / sum(exp(z)) as the softmax that it is; None where a node divides something else."""
    if node.op != "Div" or node.domain:
        return None
    exponential, total = (graph.made_by.get(graph.through(name)) for name in node.inputs)
    if exponential is None or total is None or exponential.op != "Exp" or total.op != "ReduceSum":
        return None
    if graph.through(total.inputs[0]) != exponential.outputs[0] or not total.attributes.get("keepdims", 1):
        return None
    over = graph.array(total.inputs[1]) if total.input(1) else total.attributes.get("axes")
    axes = [] if over is None else [int(axis) for axis in np.asarray(over).flatten()]
    if len(axes) != 1:
        return None
    return replace(node, op="Softmax", inputs=exponential.inputs, attributes={"axis": axes[0]})


def _product(search: _Search, name: str, depth: int) -> tuple[Node, tuple[LogitLink, ...]] | None:
    """The product from which logits are made, and what happens to it."""
    if name in search.found:
        return search.found[name]
    search.found[name] = None  # also stops a path that is too long
    node = search.graph.made_by.get(name)
    if node is None or depth > _MOST_LINKS:
        return None
    if is_product(search.graph, node):
        search.found[name] = (node, ())
        return search.found[name]
    links = _ways_in(search.graph, node)
    if not links and depth < 2 and not search.lost:
        search.lost = node.op
    for link in links:
        inner = _product(search, link.source, depth + 1)
        if inner is not None:
            search.found[name] = (inner[0], (*inner[1], link))
            break
    return search.found[name]


def is_product(graph: Graph, node: Node) -> bool:
    """Whether two tensors that are computed from the inputs are multiplied."""
    if node.op not in PRODUCTS or len(node.inputs) != 2:
        return False
    return not any(graph.is_constant(name) for name in node.inputs)


def _ways_in(graph: Graph, node: Node) -> list[LogitLink]:
    """Which inputs of an operation may be the logits."""
    if node.domain:
        return []
    op, inputs = node.op, node.inputs
    if op in SAME or op in _RESHAPES or op in ("Tanh", "Clip"):
        return [LogitLink(node, inputs[0])]
    if op in ("Mul", "Add", "Max", "Min") and len(inputs) == 2:
        pairs = [(0, 1), (1, 0)]
        return [LogitLink(node, inputs[i], inputs[j]) for i, j in pairs if not graph.is_constant(inputs[i])]
    if op in ("Div", "Sub"):
        return [LogitLink(node, inputs[0], inputs[1])]
    if op == "Where":
        first = LogitLink(node, inputs[1], inputs[2], inputs[0], True)
        return [first, LogitLink(node, inputs[2], inputs[1], inputs[0], False)]
    if op == "Concat" and len(inputs) == 2:  # a sink beside the logits
        return [LogitLink(node, inputs[0], inputs[1])]
    return []


def _is_activation_product(graph: Graph, name: str) -> bool:
    """Whether a product of activations is among the last operations before a tensor: it may be logits."""
    pending: list[str] = [name]
    seen: set[str] = set()
    while pending and len(seen) < _MOST_LINKS:
        last = pending.pop(0)
        node = graph.made_by.get(last)
        if node is None or last in seen or graph.is_constant(last):
            continue
        seen.add(last)
        if is_product(graph, node):
            return True
        if node.op in ("MatMul", "Gemm", "Conv", "Softmax", "LayerNormalization"):
            continue
        pending += [i for i in node.inputs if i]
    return False


def _meeting(graph: Graph, softmax: Node) -> tuple[Node, str, tuple[Node, ...]] | None:
    """Where the weights of a softmax meet values: the product, the weights' name there, what happens before."""
    pending: list[tuple[str, tuple[Node, ...]]] = [(softmax.outputs[0], ())]
    seen: set[str] = set()
    while pending:
        name, after = pending.pop(0)
        if name in seen or len(after) > _MOST_LINKS:
            continue
        seen.add(name)
        for node in graph.taken_by.get(name, ()):
            if node.op in PRODUCTS and (node.inputs[0] == name or node.op == "Einsum"):
                return node, name, after
            if node.op in (*SAME, *_RESHAPES, "Slice") and node.inputs[0] == name and not node.domain:
                pending.append((node.outputs[0], (*after, node)))
            if node.op == "Where" and _cleans(graph, node, name):
                pending.append((node.outputs[0], (*after, node)))
    return None


def _cleans(graph: Graph, node: Node, name: str) -> bool:
    """Whether a choice puts zeros where weights are no numbers, as rows have it that see no key."""
    condition = graph.made_by.get(node.inputs[0])
    is_nan = condition is not None and condition.op == "IsNaN" and condition.inputs[0] == name
    zero = graph.array(node.inputs[1])
    return is_nan and node.inputs[2] == name and zero is not None and not zero.any()
