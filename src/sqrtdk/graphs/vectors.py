"""q, k and v from where they are used back to their projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.graphs.graph import Graph, Node
from sqrtdk.graphs.layout import Values, is_layout, replay, wanted
from sqrtdk.graphs.patterns import read_norm, read_rotation
from sqrtdk.tracing.tensors import Projection, Vector, Waypoint

_MOST_LINKS = 256
_QUANTISED = ("MatMulNBits", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulBnb4")
Arrange = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One step of the way from a projection to where a vector is used.

    Attributes:
        kind: "layout", "factor", "step", or "cache" for keys and values of earlier tokens that are put before.
        node: the operation; the last of a step.
        made: name of what it makes.
        other: of a factor, the name of the number; of a cache, its name.
        name: of a step.
        detail: of a step.
    """

    kind: str
    node: Node
    made: str
    other: str = ""
    name: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Affine:
    """A projection in a graph.

    Attributes:
        made: name of what it makes, its bias included.
        input: name of what goes in.
        weight: name of the matrix; "" where it is not known.
        bias: name of the bias; "" where there is none.
        transposed: the matrix is (F, D), else (D, F).
        label: name of the parameter.
    """

    made: str
    input: str
    weight: str
    bias: str
    transposed: bool
    label: str


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """The way of a vector.

    Attributes:
        used: name of the tensor that meets others.
        links: from the source on.
        affine: None where it begins at what is no projection, or was not followed.
        lost: operator where it was lost; "" where it was not.
    """

    used: str
    links: tuple[Link, ...]
    affine: Affine | None
    lost: str = ""

    def wanted(self, graph: Graph) -> tuple[list[str], list[str]]:
        """Names of tensors, and of shapes, that its reading needs."""
        tensors: list[str] = [self.used]
        shapes: list[str] = []
        for link in self.links:
            if link.kind == "layout":
                more, sizes = wanted(link.node)
                tensors += more
                shapes += sizes
            tensors += [link.other] if link.kind == "factor" else [link.made] if link.kind == "step" else []
            shapes += [link.made] if link.kind == "step" else [link.other] if link.kind == "cache" else []
        if self.affine is not None:
            tensors += [self.affine.made, self.affine.input]
            tensors += [name for name in (self.affine.weight, self.affine.bias) if name and graph.array(name) is None]
            shapes.append(self.affine.made)
        return [name for name in tensors if graph.array(name) is None], shapes


def walk(graph: Graph, used: str) -> Way:
    """The way of the vector that a tensor is."""
    links: list[Link] = []
    name = used
    for _ in range(_MOST_LINKS):
        node = graph.made_by.get(name)
        if node is None:
            break
        affine = read_affine(graph, name)
        if affine is not None:
            return Way(used, tuple(reversed(links)), affine)
        if is_layout(graph, node):
            links.append(Link("layout", node, name))
            name = node.inputs[0]
            continue
        if (past := _cache(graph, node)) is not None:
            links.append(Link("cache", node, name, past))
            name = node.inputs[1]
            continue
        if (factor := _factor(graph, node)) is not None:
            name, other = factor
            links.append(Link("factor", node, node.outputs[0], other))
            continue
        step = read_norm(graph, name) or read_rotation(graph, name)
        if step is None:
            return Way(used, tuple(reversed(links)), None, node.op)
        links.append(Link("step", node, name, name=step.name, detail=step.detail))
        name = step.source
    return Way(used, tuple(reversed(links)), None)


def _cache(graph: Graph, node: Node) -> str | None:
    """Of keys or values that are put after those of earlier tokens, the name of the latter: an input of the graph."""
    if node.op != "Concat" or node.domain or len(node.inputs) != 2:
        return None
    first = graph.through(node.inputs[0])
    while (before := graph.made_by.get(first)) is not None and before.op == "Concat" and len(before.inputs) == 1:
        first = graph.through(before.inputs[0])
    return first if any(value.name == first for value in graph.inputs) else None


def _factor(graph: Graph, node: Node) -> tuple[str, str] | None:
    """Names of what is multiplied, and of a number, or of one a head."""
    if node.op not in ("Mul", "Div") or node.domain:
        return None
    for data, other in (node.inputs, node.inputs[::-1])[: 2 if node.op == "Mul" else 1]:
        if graph.is_constant(data) or not graph.is_constant(other):
            continue
        array = graph.array(other)
        if array is None or array.size == 1 or (array.ndim >= 3 and array.size == max(array.shape[:-2])):
            return data, other
    return None


def read_affine(graph: Graph, made: str) -> Affine | None:
    """The projection that makes a tensor; None where none does."""
    node = graph.made_by[made]
    if node.op == "Add" and not node.domain:
        for data, bias in (node.inputs, node.inputs[::-1]):
            inner = graph.made_by.get(data)
            if inner is None or not graph.is_constant(bias) or not _is_vector(graph, bias):
                continue
            affine = _matrix(graph, inner)
            if affine is not None and not affine.bias:
                return Affine(made, affine.input, affine.weight, bias, affine.transposed, affine.label)
        return None
    return _matrix(graph, node)


def _is_vector(graph: Graph, name: str) -> bool:
    array = graph.array(name)
    return array is None or array.size == max(array.shape, default=1)


def _matrix(graph: Graph, node: Node) -> Affine | None:
    made = node.outputs[0]
    if node.op in _QUANTISED:
        return Affine(made, node.inputs[0], "", "", False, _label(node, node.input(1)))
    if node.op not in ("MatMul", "Gemm") or not graph.is_constant(node.inputs[1]) or graph.is_constant(node.inputs[0]):
        return None
    plain = node.attributes.get("alpha", 1.0) == 1.0 == node.attributes.get("beta", 1.0)
    if not plain or node.attributes.get("transA", 0):
        return None
    weight, bias = node.inputs[1], node.input(2)
    transposed = bool(node.attributes.get("transB", 0))
    return Affine(made, node.inputs[0], weight, bias, transposed, _label(node, weight))


def _label(node: Node, weight: str) -> str:
    """Name of the parameter: exporters fold it, and share the constants that are equal, but keep the module's path."""
    return f"{node.scope}.weight" if node.scope and not weight.startswith(f"{node.scope}.") else weight


def read_vector(way: Way, values: Values, arrange: Arrange) -> Vector:
    """A vector with all that is known of its way.

    Args:
        way: of the vector.
        values: of the run.
        arrange: brings what stands at the vector's place to (B, H, L, E).
    """
    factor: Tensor | float = 1.0
    at_place = arrange(values.tensor(way.used))
    for link in way.links:
        if link.kind == "cache" and 0 not in values.shape(link.other):
            return Vector(at_place, steps=(Waypoint("unknown", "a cache of earlier tokens", None),))
        if link.kind == "factor":
            one = _number(values.tensor(link.other), at_place.shape[1])
            if one is None:
                return Vector(at_place, steps=(Waypoint("unknown", link.node.op, None),))
            factor = factor * (1 / one if link.node.op == "Div" else one)
    try:
        steps = tuple(
            Waypoint(link.name, link.detail, _bring(way, i + 1, values.tensor(link.made), values, arrange))
            for i, link in enumerate(way.links)
            if link.kind == "step"
        )
        if way.affine is None:
            lost = (Waypoint("unknown", way.lost, None),) if way.lost else ()
            return Vector(at_place, factor, steps=(*lost, *steps))
        made = values.tensor(way.affine.made)
        projected = _bring(way, 0, made, values, arrange)
        number = torch.arange(made.numel()).reshape(made.shape)
        projection = _projection(way.affine, values, _bring(way, 0, number, values, arrange), made)
    except (RuntimeError, IndexError):  # a layout that does not take what stands at its input
        return Vector(at_place, factor)
    return Vector(at_place, factor, projected, steps, projection)


def _number(tensor: Tensor, heads: int) -> Tensor | float | None:
    """A factor as a number, or (H, 1, 1)."""
    if tensor.numel() == 1:
        return float(tensor)
    return tensor.reshape(heads, 1, 1) if tensor.numel() == heads else None


def _bring(way: Way, first: int, tensor: Tensor, values: Values, arrange: Arrange) -> Tensor:
    """What stands before link `first`, moved to where the vector is used."""
    for link in way.links[first:]:
        if link.kind == "layout":
            tensor = replay(link.node, link.made, tensor, values)
        elif link.kind == "step" and tensor.shape != values.shape(link.made):
            tensor = tensor.reshape(values.shape(link.made))
    return arrange(tensor)


def _projection(affine: Affine, values: Values, numbers: Tensor, made: Tensor) -> Projection | None:
    """The projection as the heads have it.

    Args:
        affine: where it stands.
        values: of the run.
        numbers: (B, H, L, E), of the elements of what it made.
        made: what it made.

    Returns:
        None where a channel of a head is not the same feature in every row.
    """
    width = made.shape[-1]
    features, rows = numbers[0, :, 0] % width, numbers // width
    batch, length = numbers.shape[0], numbers.shape[2]
    own = torch.arange(batch * length).reshape(batch, 1, length, 1)
    given = values.tensor(affine.input)
    if not bool((numbers % width == features[None, :, None]).all()) or not bool((rows == own).all()):
        return None
    if given.numel() != batch * length * given.shape[-1]:
        return None
    weight = bias = None
    if affine.weight:
        matrix = values.tensor(affine.weight)
        weight = (matrix if affine.transposed else matrix.mT)[features] if matrix.dim() == 2 else None
    if affine.bias:
        vector = values.tensor(affine.bias).flatten()
        bias = vector.expand(width)[features] if vector.numel() in (1, width) else None
    return Projection(affine.label, given.reshape(batch, length, -1), weight, bias, features)
