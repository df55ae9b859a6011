"""An ONNX graph as a program that a module runs: its inputs, its constants, and a walk for inputs of any shapes."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sqrtdk.errors import ModelError
from sqrtdk.frontends.module import Bound, TracedProgram
from sqrtdk.graphs.graph import Graph, refuse_many
from sqrtdk.graphs.inputs import PADDING_MASK_NAME, onnx_input_shape
from sqrtdk.graphs.onnx_blocked import without_blocks
from sqrtdk.graphs.onnx_step import ONNX_DTYPES
from sqrtdk.graphs.onnx_walk import Walk, attends
from sqrtdk.graphs.onnx_weights import GraphConstants
from sqrtdk.graphs.quantised import without_quantisation
from sqrtdk.messages import Message
from sqrtdk.models.modules import is_finite

MOST_SEARCHED_ELEMENTS = 2**28  # largest weight searched for NaN, in elements


def walkable(file: Graph) -> Graph:
    """Return the graph of a file without quantised operators and without blocked weights.

    Raises:
        ModelError: The graph is too large, or of an opset that the installed onnx does not know.
    """
    from onnx.defs import onnx_opset_version

    refuse_many(len(file.nodes))
    newest = onnx_opset_version()
    if not 1 <= file.opset <= newest:
        raise ModelError(
            f"the graph is of opset {file.opset}; the installed onnx knows 1 to {newest}",
            hint="Update onnx, or export with an opset that it knows.",
        )
    return without_quantisation(without_blocks(file))


class OnnxSource:
    """An ONNX graph that is walked on values, or on the device "meta".

    Args:
        graph: The graph, without quantised operators.
        on_meta: Whether to walk it on shapes alone.
        larger: Whether free sizes get larger numbers on the meta device; as for `number_for`.
        wanted: Names of tensors that a walk keeps in `last.made`.

    Attributes:
        signature: The inputs by name; constants that are queries come last, and may be left out.
        inputs: Names of the inputs in the graph.
        constants: The constants of the graph; those that are queries are inputs as well.
        masks: Padding masks, which are ones, on the meta device.
        sizes: Numbers chosen for free sizes.
    """

    def __init__(self, graph: Graph, *, on_meta: bool, larger: bool = False, wanted: Collection[str] = ()) -> None:
        self.graph, self.larger, self.wanted = graph, larger, wanted
        self.constants = GraphConstants(graph, on_meta)
        self.masks: dict[str, Tensor] = {}
        self.sizes: dict[str, int] = {}
        self.inputs = [value.name for value in graph.inputs if not on_meta or self._is_input(value)]
        needed = len(self.inputs)
        self.inputs += self.constants.queries
        self.walked: Walk | None = None
        # a name need not be one of Python's: "input.1"
        names = [re.sub(r"\W", "_", name) for name in self.inputs]
        names = [name if name.isidentifier() and name not in names[:at] else f"input_{at}"
                 for at, name in enumerate(names)]  # fmt: skip
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.signature = inspect.Signature([
            inspect.Parameter(name, kind, default=inspect.Parameter.empty if at < needed else None)
            for at, name in enumerate(names)
        ])  # fmt: skip

    def _is_input(self, value: Any) -> bool:
        """Return whether a walk on shapes takes an input: its shape is known, and it is no padding mask."""
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            self.constants.lost[value.name] = Message("graphs.input_shape")
            return False
        shape = onnx_input_shape(value, self.sizes, self.larger)
        if not self.constants.declare("input", value.name, shape, int(kind.elem_type)):
            return False
        if PADDING_MASK_NAME.search(value.name) and len(shape) == 2:
            self.masks[value.name] = self.constants.empty(value.name)
            return False
        return True

    def tensor(self, name: str, indices: tuple[int, ...]) -> Tensor:
        """Return a constant of the file, a mask, or a constant that was folded; see `Source.tensor`."""
        if name in self.graph.initializers:
            return self.constants.tensor(name)
        return self.masks[name] if name in self.masks else torch.empty_like(self.values_of(name), device="meta")

    def values_of(self, name: str) -> Tensor:
        """Return the values of a constant, of a folded constant, or of a padding mask."""
        if name in self.masks:
            return torch.ones_like(self.masks[name], device="cpu")
        known = self.walked.known if self.walked is not None else self.constants.known
        return known[name] if name in known else self.graph.tensor(name)

    def example(self) -> tuple[Tensor, ...]:
        """Return inputs on the meta device."""
        return tuple(map(self.constants.empty, self.inputs))

    def bind(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Bound:
        """Return the inputs of a call as tensors.

        Args:
            args: Inputs by position.
            named: Inputs by name.

        Raises:
            TypeError: They do not fit the signature.
        """
        bound = self.signature.bind(*args, **named)
        bound.apply_defaults()
        given = [
            self.constants.tensor(name) if value is None and name in self.constants.queries else torch.as_tensor(value)
            for name, value in zip(self.inputs, bound.arguments.values(), strict=True)
        ]
        kinds = {value.name: int(value.type.tensor_type.elem_type) for value in self.graph.inputs}
        dtypes = [ONNX_DTYPES.get(kinds.get(name, 0), tensor.dtype)
                  for name, tensor in zip(self.inputs, given, strict=True)]  # fmt: skip
        return Bound(tuple(given), tuple(dtypes), tuple(tensor.shape for tensor in given), None)

    def trace(self, bound: Bound, dtypes: Mapping[str, torch.dtype]) -> TracedProgram:
        """Return the program for inputs of these shapes.

        Args:
            bound: The inputs, with values or on the meta device.
            dtypes: Not used: a graph names the dtypes of its conversions itself.
        """
        env = {name: x.to(dtype) for name, x, dtype in zip(self.inputs, bound.tensors, bound.dtypes, strict=True)}
        walk = self.walked = Walk(self.constants, env, self.masks, self.sizes, self.wanted)
        program = walk.program(walk.own)
        held = program.parameters.values()
        classes = {node.scope: node.kind for node in walk.read if node.scope}
        buffers = {name for name, (source, _) in walk.origins.items() if source not in self.constants.learned}
        origins = {name: walk.origins[name] for name in held}

        def nest(values: Sequence[Any]) -> dict[str, Any]:
            return dict(zip(walk.own, values, strict=True))

        return TracedProgram(program, nest, origins, classes, buffers)

    @property
    def last(self) -> Walk:
        """The last walk."""
        assert self.walked is not None
        return self.walked

    @property
    def sick(self) -> tuple[str, ...]:
        """Names of the weights that hold NaN or infinity, among those small enough to be loaded."""
        used = {source for source, _ in self.last.origins.values() if source in self.constants.learned}
        small = [name for name in used if math.prod(self.constants.shapes[name][0]) <= MOST_SEARCHED_ELEMENTS]
        return tuple(sorted(self.constants.renamed.get(n, n) for n in small if not is_finite(self.graph.tensor(n))))

    def operators(self, paths: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return the attention operators of each module path in order: "Softmax", or the name of a fused attention."""
        found: dict[str, tuple[str, ...]] = {}
        read = set(self.last.read)
        for node, step in zip(self.last.nodes, self.last.steps, strict=True):
            if attends(node.domain, node.op) and node in read:
                site = step.path if step.path in paths else ""
                name = "Softmax" if node.op == "Softmax" else f"{node.domain or 'ai.onnx'}.{node.op}"
                found[site] = (*found.get(site, ()), name)
        return found
