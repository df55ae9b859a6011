"""An ONNX graph, read without running it: its operations on tensors that have shapes and no values.

It is walked twice. The first time for shapes, and for what is computed of few constants (sizes, axes, a scale); the
second time under the caller's trace, with these numbers in their places.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import INTERRUPTS, ModelError, UnsupportedError, kind_and_text
from sqrtdk.graphs.graph import Graph, Node, read_graph
from sqrtdk.graphs.model_file import folder_of, load_file
from sqrtdk.graphs.onnx_attention import ATTENTIONS, ROTATIONS
from sqrtdk.graphs.onnx_ops import OPERATIONS
from sqrtdk.graphs.onnx_step import Step, dtype_of
from sqrtdk.graphs.onnx_weights import find_weights, value_of
from sqrtdk.graphs.places import GraphRoot, class_of, is_finite, place_in_code, place_modules, place_tensor, weight
from sqrtdk.graphs.quantised import without_quantisation
from sqrtdk.graphs.records import Missing, Walked
from sqrtdk.graphs.symbols import MASK, refuse_many, shown_sizes, size_of
from sqrtdk.models.records import LoadedModel
from sqrtdk.tracing.watch.constants import LARGEST

MOST_FOLDED = 2**12  # elements of a constant that is computed with in the first walk
MOST_LEARNED = 2**12  # elements of a weight whose values are looked at: gains, temperatures
MOST_LOOKED_AT = 2**28  # elements of a weight that is looked at for NaN
MOST_ELEMENTS = 2**40  # of a tensor without values
_OPERATIONS = OPERATIONS | ATTENTIONS | ROTATIONS


def walk_onnx(path: str | os.PathLike[str], config: Any = None, *, larger: bool = False) -> Walked:
    """A graph as a model whose forward walks it on the meta device.

    Args:
        path: of the file.
        config: what is declared; None where nothing is.
        larger: give what the graph leaves free other sizes than otherwise.

    Raises:
        MissingExtraError: onnx is not installed.
        ModelError: the file can't be read, is too large, or names a file out of its folder.
    """
    model = load_file(path)
    refuse_many(len(model.graph.node))
    graph = without_quantisation(read_graph(model, folder_of(path)))
    _refuse_opset(graph)
    walk = _Walk(graph, larger)
    walk.first(model)
    root = class_of(graph.root_class, GraphRoot)(walk.again, config)
    values = walk.place(root)
    notes: tuple[str, ...] = (shown_sizes(walk.sizes),) if walk.sizes else ()
    notes += tuple(f"the input {name} is taken as ones: no padding" for name in walk.masks)
    if walk.unread:
        ops = ", ".join(sorted(walk.unread)[:5])
        notes += (f"not read: {ops}{' and more' if len(walk.unread) > 5 else ''}; nor what comes after",)
    if walk.folded:
        notes += (
            f"{len(walk.folded)} queries are constants that the exporter worked out: their projections are not in it",
        )
    loaded = LoadedModel(root, tuple(walk.inputs.values()), str(path), "onnx", config, notes=notes, masks=values)
    return Walked(loaded, tuple(walk.missing), walk.sizes, walk.operators(), tuple(sorted(walk.unread)), walk.sick)


def _refuse_opset(graph: Graph) -> None:
    from onnx.defs import onnx_opset_version

    newest = onnx_opset_version()
    if not 1 <= graph.opset <= newest:
        raise ModelError(
            f"the graph is of opset {graph.opset}; the installed onnx knows 1 to {newest}",
            hint="Update onnx, or export with an opset that it knows.",
        )


class _Walk:
    """The two walks of a graph.

    Attributes:
        env: tensors on the meta device, by name; those of the walk that is going on.
        known: values of constants of few elements, by name.
        learned: names of constants that are weights.
        inputs: of the graph, without values.
        masks: names of inputs that are taken as ones.
        sizes: numbers for what the graph leaves free.
        missing: attentions that are not read.
        unread: operators that are not.
        folded: constants that are queries.
    """

    def __init__(self, graph: Graph, larger: bool) -> None:
        self.graph = graph
        self.env: dict[str, Tensor] = {}
        self.known: dict[str, Tensor] = {}
        self.learned: set[str] = set()
        self.inputs: dict[str, Tensor] = {}
        self.masks: list[str] = []
        self.sizes: dict[str, int] = {}
        self.missing: list[Missing] = []
        self.unread: set[str] = set()
        self.folded: set[str] = set()
        self._names: dict[str, str] = {}
        self._larger = larger
        self._constants: dict[str, Tensor] = {}
        self._lost: dict[str, str] = {}  # tensors that are not known, and the operator that made them so
        self._modules: dict[str, nn.Module] = {}
        self._readable: list[Node] = []

    # -- the first walk ------------------------------------------------------------------------------------------------

    def first(self, model: Any) -> None:
        """Shapes, numbers, and what is not read."""
        for value in self.graph.inputs:
            self._input(value)
        weights = find_weights(self.graph)
        self.learned, self.folded, self._names = weights.learned, weights.folded, weights.names
        for name, proto in self.graph.initializers.items():
            shape = tuple(int(size) for size in proto.dims)
            try:
                dtype = dtype_of(int(proto.data_type))
            except UnsupportedError as error:
                self._lost[name] = str(error)
                continue
            if math.prod(shape) > MOST_ELEMENTS or any(size < 0 for size in shape):
                raise ModelError(f"the tensor {name[:100]!r} has the shape {shape[:8]}", hint="The file is damaged.")
            self.env[name] = torch.empty(shape, dtype=dtype, device="meta")
            if name in self.folded:
                self.inputs[name] = self.env[name]
            elif name not in self.learned and math.prod(shape) <= MOST_FOLDED:
                self.known[name] = value_of(self.graph, name)
        for node in self.graph.nodes:
            self._size(node)
        self.env = {}

    def _input(self, value: Any) -> None:
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            self._lost[value.name] = "an input that says no shape, or is no tensor"
            return
        try:
            dtype = dtype_of(int(kind.elem_type))
        except UnsupportedError as error:
            self._lost[value.name] = str(error)
            return
        shape = [
            int(d.dim_value)
            if d.HasField("dim_value")
            else size_of(d.dim_param, value.name, axis, self.sizes, self._larger)
            for axis, d in enumerate(kind.shape.dim)
        ]
        if any(size < 0 for size in shape) or math.prod(shape) > MOST_ELEMENTS:
            raise ModelError(f"the input {value.name[:100]!r} has the shape {shape[:8]}", hint="Export it again.")
        tensor = self.env[value.name] = torch.empty(shape, dtype=dtype, device="meta")
        if MASK.search(value.name) and len(shape) == 2:
            self.masks.append(value.name)
        else:
            self.inputs[value.name] = tensor

    def _size(self, node: Node) -> None:
        lost = next((self._lost[name] for name in node.inputs if name in self._lost), None)
        operation = _OPERATIONS.get((node.domain, node.op))
        if lost is None and (operation is None or node in self.graph.hidden):
            lost = node.op
            self.unread.add(f"{node.domain}::{node.op}"[:60] if node.domain else node.op[:60])
        if lost is None:
            try:
                for name, tensor in self._made(node, "meta"):
                    self.env[name] = tensor
                self._readable.append(node)
            except (*INTERRUPTS, ModelError):
                raise
            except Exception as error:  # whatever torch raises of shapes that do not fit
                lost = str(error) if isinstance(error, UnsupportedError) else f"{node.op}: {kind_and_text(error, 120)}"
                self.unread.add(lost[:80])
        if lost is not None:
            self._lose(node, lost)
            return
        self._fold(node)

    def _lose(self, node: Node, why: str) -> None:
        for name in filter(None, node.outputs):
            self._lost[name] = why
        inner = next((op for domain, op in self.graph.hidden.get(node, ()) if _attends(domain, op)), None)
        if inner is not None:
            self.missing.append(Missing(node.site, f"{inner} inside of {node.op}: branches and loops are not read"))
        elif _attends(node.domain, node.op):
            self.missing.append(Missing(node.site, f"{node.op} comes after what is not read: {why}"))

    def _fold(self, node: Node) -> None:
        """Compute what is made of few constants."""
        by_shape = node.op in ("Shape", "Size")
        constant = by_shape or all(name in self.known for name in node.inputs if name)
        outputs = [name for name in node.outputs if name]
        if not constant or any(self.env[name].numel() > MOST_FOLDED for name in outputs if name in self.env):
            return
        if node.op.startswith("Random") or (node.domain, node.op) in ATTENTIONS:
            return
        try:
            for name, tensor in self._made(node, "cpu"):
                self.known[name] = tensor
        except INTERRUPTS:
            raise
        except Exception:  # a dtype that the CPU has no kernel for
            return

    # -- the second walk -----------------------------------------------------------------------------------------------

    def place(self, root: nn.Module) -> Mapping[str, Tensor]:
        """Put modules and constants below the root; the values of those that are read."""
        classes = {node.scope: node.kind for node in self._readable if node.scope is not None}
        names = [self._names.get(name, name) for name in self.graph.initializers]
        holders = {name.rpartition(".")[0]: "" for name in names if "." in name}
        self._modules = place_modules(root, holders | classes)
        values = _Values(self.graph)
        used = {name for node in self._readable for name in node.inputs}
        for name in self.graph.initializers:
            if name in used and name not in self._lost and name not in self.folded:
                self._hold(name, values)
        for node in self._readable:
            for name in node.outputs:
                if name in self.known and name in used and name not in self.graph.initializers:
                    self._hold(name, values)
        for name in self.masks:
            shape = self._mask_shape(name)
            mask = self._constants[name] = torch.empty(shape, dtype=self._mask_dtype(name), device="meta")
            values.given[place_tensor(self._modules, name, mask)] = torch.ones(shape, dtype=mask.dtype)
        return values

    @property
    def sick(self) -> tuple[str, ...]:
        """Names of weights that hold NaN or infinity, among those that are read and lie in memory once more."""
        used = {name for node in self._readable for name in node.inputs} & self.learned & {*self.graph.initializers}
        sizes = {name: math.prod(self.graph.initializers[name].dims) for name in used}
        small = [name for name in used if sizes[name] <= MOST_LOOKED_AT]
        sick = [name for name in small if not is_finite(value_of(self.graph, name))]
        return tuple(sorted(self._names.get(name, name) for name in sick))

    def operators(self) -> dict[str, tuple[str, ...]]:
        """By site the operators that attend there, in order: "Softmax", or one that is an attention by itself."""
        found: dict[str, tuple[str, ...]] = {}
        for node in self._readable:
            if _attends(node.domain, node.op):
                site = node.scope if node.scope in self._modules else ""
                name = "Softmax" if node.op == "Softmax" else f"{node.domain or 'ai.onnx'}.{node.op}"
                found[site or ""] = (*found.get(site or "", ()), name)
        return found

    def _mask_shape(self, name: str) -> tuple[int, ...]:
        value = next(value for value in self.graph.inputs if value.name == name)
        return tuple(
            int(d.dim_value) if d.HasField("dim_value") else size_of(d.dim_param, name, axis, self.sizes, self._larger)
            for axis, d in enumerate(value.type.tensor_type.shape.dim)
        )

    def _mask_dtype(self, name: str) -> torch.dtype:
        return dtype_of(int(next(v for v in self.graph.inputs if v.name == name).type.tensor_type.elem_type))

    def _hold(self, name: str, values: _Values) -> None:
        if name in self.graph.initializers:
            proto = self.graph.initializers[name]
            shape, dtype = tuple(int(size) for size in proto.dims), dtype_of(int(proto.data_type))
        else:
            shape, dtype = tuple(self.known[name].shape), self.known[name].dtype
        learned = name in self.learned
        twin = weight(shape, dtype) if learned else torch.empty(shape, dtype=dtype, device="meta")
        self._constants[name] = twin
        label = place_tensor(self._modules, self._names.get(name, name), twin)
        if name in self.known:
            values.given[label] = self.known[name]
        elif math.prod(shape) <= (MOST_LEARNED if learned else LARGEST):
            values.later[label] = name

    def again(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Walk the graph; its outputs are of no use."""
        self.env = {**self._constants, **dict(zip(self.inputs, inputs, strict=True))}
        left = _last_uses(self._readable)
        for node in self._readable:
            if all(name in self._constants or not name for name in node.outputs):
                continue
            place = self._modules.get(node.scope or "", self._modules[""])
            run = partial(place_in_code(node.stack, node.number + 1), self._made, node, "meta")
            made = run() if place is self._modules[""] else place(run)
            for name, tensor in made:
                self.env.setdefault(name, tensor)
            for name in left.get(node, ()):
                if name not in self._constants:
                    self.env.pop(name, None)
        return {}

    def _made(self, node: Node, device: str) -> list[tuple[str, Tensor]]:
        """What an operation gives."""
        sources: Mapping[str, Tensor] = self.env if device == "meta" else self.known
        given = tuple(sources[name] if name in sources else self.env[name] if name else None for name in node.inputs)
        step = Step(node, self.graph, given, self.known, device, self.learned)
        result = _OPERATIONS[node.domain, node.op](step)
        results = result if isinstance(result, tuple) else (result,)
        return [(name, tensor) for name, tensor in zip(node.outputs, results, strict=False) if name]


class _Values(Mapping[str, Tensor]):
    """Values of constants by their names in the model; those of the file are read when they are asked for."""

    def __init__(self, graph: Graph) -> None:
        self.given: dict[str, Tensor] = {}
        self.later: dict[str, str] = {}
        self._graph = graph

    def __getitem__(self, name: str) -> Tensor:
        if name in self.given:
            return self.given[name]
        return value_of(self._graph, self.later[name])

    def __iter__(self) -> Iterator[str]:
        return iter((*self.given, *self.later))

    def __len__(self) -> int:
        return len(self.given) + len(self.later)


def _attends(domain: str, op: str) -> bool:
    return op in ("Softmax", "BiasSoftmax") or (domain, op) in ATTENTIONS or op.endswith("Attention")


def _last_uses(nodes: list[Node]) -> dict[Node, list[str]]:
    """By node the tensors that no later one takes."""
    last: dict[str, Node] = {}
    for node in nodes:
        for name in (*node.inputs, *node.outputs):
            if name:
                last[name] = node
    left: dict[Node, list[str]] = {}
    for name, node in last.items():
        left.setdefault(node, []).append(name)
    return left
