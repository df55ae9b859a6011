"""Operations that move values and leave them as they are, run again on whatever stands at their input.

So a tensor at an earlier point of a graph is brought to where q stands in the product, and so are the numbers of its
elements: they tell of which feature of the projection each channel of each head was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk.errors import ModelError
from sqrtdk.graphs.graph import Graph, Node
from sqrtdk.graphs.session import to_tensor

BY_SHAPE = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand")  # told by the shape of what they make
BY_NUMBERS = ("Slice", "Split", "Gather", "GatherND", "Tile")  # by their other inputs
ALIKE = ("Identity", "Cast", "Dropout")
LAYOUT = (*BY_SHAPE, *BY_NUMBERS, *ALIKE, "Transpose")


class Values:
    """What a run gave: tensors and shapes by name.

    Args:
        graph: that ran.
        ran: what was exposed.
        shapes: of what was asked for its shape.
    """

    def __init__(self, graph: Graph, ran: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._graph = graph
        self._ran = ran
        self._shapes = shapes
        self._made: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        """Its values; one tensor for all who ask.

        Raises:
            ModelError: they were not exposed.
        """
        if name not in self._made:
            array = self._ran[name] if name in self._ran else self._graph.array(name)
            if array is None:
                raise ModelError(f"the tensor {name[:100]!r} of the graph was not computed", hint="Report this graph.")
            self._made[name] = to_tensor(array)
        return self._made[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape.

        Raises:
            ModelError: it was not asked for.
        """
        if name in self._shapes:
            return self._shapes[name]
        return tuple(self.tensor(name).shape)

    def numbers(self, name: str) -> list[int]:
        """Its values as whole numbers."""
        return [int(number) for number in self.tensor(name).flatten().tolist()]


def is_layout(graph: Graph, node: Node) -> bool:
    """Whether it only moves values; a look-up of what is not written in the graph does not."""
    if node.domain or node.op not in LAYOUT:
        return False
    if node.op == "GatherND" and node.attributes.get("batch_dims", 0):
        return False
    return node.op not in ("Gather", "GatherND") or graph.is_constant(node.inputs[1])


def wanted(node: Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the tensors, and of the shapes, that its replay needs."""
    if node.op in BY_SHAPE:
        return (), (node.outputs[0],)
    if node.op in BY_NUMBERS:
        return tuple(name for name in node.inputs[1:] if name), ()
    return (), ()


def replay(node: Node, made: str, tensor: Tensor, values: Values) -> Tensor:
    """What the operation makes of a tensor.

    Args:
        node: the operation.
        made: which of its outputs.
        tensor: of the shape that its input has.
        values: of the run.

    Raises:
        RuntimeError: the tensor has another shape.
    """
    op = node.op
    if op in ALIKE:
        return tensor
    if op == "Transpose":
        return tensor.permute(node.attributes.get("perm", [*range(tensor.dim())][::-1]))
    if op == "Expand":
        return tensor.expand(values.shape(node.outputs[0]))
    if op in BY_SHAPE:
        return tensor.reshape(values.shape(node.outputs[0]))
    if op == "Tile":
        return tensor.repeat(values.numbers(node.inputs[1]))
    if op == "Gather":
        return _gather(node, tensor, values)
    if op == "GatherND":
        return tensor[tuple(values.tensor(node.inputs[1]).long().unbind(-1))]
    return _split(node, made, tensor, values) if op == "Split" else _slice(node, tensor, values)


def _gather(node: Node, tensor: Tensor, values: Values) -> Tensor:
    axis = node.attributes.get("axis", 0) % tensor.dim()
    indices = values.tensor(node.inputs[1]).long()
    indices = torch.where(indices < 0, indices + tensor.shape[axis], indices)
    taken = tensor.index_select(axis, indices.flatten())
    return taken.reshape(*tensor.shape[:axis], *indices.shape, *tensor.shape[axis + 1 :])


def _split(node: Node, made: str, tensor: Tensor, values: Values) -> Tensor:
    axis = node.attributes.get("axis", 0) % tensor.dim()
    total, count = tensor.shape[axis], len(node.outputs)
    if node.input(1):
        sizes = values.numbers(node.inputs[1])
    elif "split" in node.attributes:
        sizes = [int(size) for size in node.attributes["split"]]
    else:  # equal parts, the last one smaller where they can't be
        most = -(-total // count)
        sizes = [min(most, total - most * i) for i in range(count)]
    return torch.split(tensor, sizes, axis)[node.outputs.index(made)]


def _slice(node: Node, tensor: Tensor, values: Values) -> Tensor:
    if "starts" in node.attributes:  # before opset 10
        starts, ends = node.attributes["starts"], node.attributes["ends"]
        axes, steps = node.attributes.get("axes", [*range(len(starts))]), [1] * len(starts)
    else:
        starts, ends = (values.numbers(name) for name in node.inputs[1:3])
        axes = values.numbers(node.inputs[3]) if node.input(3) else [*range(len(starts))]
        steps = values.numbers(node.inputs[4]) if node.input(4) else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = tensor.shape[axis]
        stop = None if step < 0 and end < -size else end  # before the first: none for Python
        taken = np.arange(size)[slice(start, stop, step)].copy()
        tensor = tensor.index_select(axis, torch.from_numpy(taken))
    return tensor
