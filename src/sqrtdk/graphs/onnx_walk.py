"""An ONNX graph walked as torch operations: on tensors that have shapes and no values, or on values.

It is walked twice. The first time for shapes, and for what is computed of few constants (sizes, axes, a scale); the
second time under the caller's trace, with these numbers in their places. On values the first walk is in float64: it
says what the graph computes but for rounding.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import INTERRUPTS, ModelError, UnsupportedError, kind_and_text
from sqrtdk.graphs.graph import Graph, Missing, Node, load_graph, refuse_many
from sqrtdk.graphs.inputs import MASK, shape_of, shown_sizes
from sqrtdk.graphs.onnx_attention import ATTENTIONS
from sqrtdk.graphs.onnx_ops import OPERATIONS
from sqrtdk.graphs.onnx_step import Step, dtype_of
from sqrtdk.graphs.onnx_weights import find_weights
from sqrtdk.graphs.places import (
    GraphRoot,
    Walked,
    class_of,
    is_finite,
    place_in_code,
    place_modules,
    place_tensor,
    weight,
)
from sqrtdk.graphs.quantised import without_quantisation
from sqrtdk.models.records import LoadedModel
from sqrtdk.tracing.watch.constants import LARGEST

MOST_FOLDED = 2**12  # elements of a constant that is computed with in the first walk
MOST_LEARNED = 2**12  # elements of a weight whose values are looked at: gains, temperatures
MOST_LOOKED_AT = 2**28  # elements of a weight that is looked at for NaN
MOST_ELEMENTS = 2**40  # of a tensor without values


def walkable(file: Graph) -> Graph:
    """A graph of a file as it is walked: in floating-point numbers.

    Raises:
        ModelError: it has too many operations, or they are newer than those which the installed onnx knows.
    """
    from onnx.defs import onnx_opset_version

    refuse_many(len(file.nodes))
    newest = onnx_opset_version()
    if not 1 <= file.opset <= newest:
        raise ModelError(
            f"the graph is of opset {file.opset}; the installed onnx knows 1 to {newest}",
            hint="Update onnx, or export with an opset that it knows.",
        )
    return without_quantisation(file)


def walk_onnx(path: str | os.PathLike[str], config: Any, larger: bool) -> Walked:
    """An ONNX graph as a model whose forward walks it on the meta device.

    Raises:
        MissingExtraError: onnx is not installed.
        ModelError: the file can't be read.
    """
    walk = Walk(walkable(load_graph(path)), larger=larger)
    walk.first()
    root = class_of(walk.graph.root_class, GraphRoot)(walk.again, config)
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


class Walk:
    """The two walks of a graph.

    Args:
        graph: in floating-point numbers.
        larger: give what the graph leaves free other sizes than otherwise.
        values: of the inputs, by name; None: the walks are on the meta device.
        wanted: names of tensors to keep.

    Attributes:
        env: tensors by name; those of the walk that is going on.
        known: values of constants of few elements, by name.
        learned: names of constants that are weights.
        inputs: of the graph, without values.
        masks: inputs that are taken as ones, without values.
        sizes: numbers for what the graph leaves free.
        missing: attentions that are not read.
        unread: operators that are not.
        folded: constants that are queries.
        exact: tensors that are wanted, by the first walk: in float64 where it is on values.
        made: the same by the second walk, in the dtypes of the file.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        larger: bool = False,
        values: Mapping[str, Tensor] | None = None,
        wanted: Collection[str] = (),
    ) -> None:
        self.graph = graph
        self.exact: dict[str, Tensor] = {}
        self.made: dict[str, Tensor] = {}
        self.env: dict[str, Tensor] = {}
        self.known: dict[str, Tensor] = {}
        self.learned: set[str] = set()
        self.inputs: dict[str, Tensor] = {}
        self.masks: dict[str, Tensor] = {}
        self.sizes: dict[str, int] = {}
        self.missing: list[Missing] = []
        self.unread: set[str] = set()
        self.folded: set[str] = set()
        self._names: dict[str, str] = {}
        self._larger = larger
        self._values = values
        self._wanted = frozenset(wanted)
        self._device = "meta" if values is None else "cpu"
        self._constants: dict[str, Tensor] = {}
        self._lost: dict[str, str] = {}  # tensors that are not known, and the operator that made them so
        self._modules: dict[str, nn.Module] = {}
        self._readable: list[Node] = []

    # -- the first walk ------------------------------------------------------------------------------------------------

    def first(self) -> None:
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
            if self._values is None:
                self.env[name] = torch.empty(shape, dtype=dtype, device="meta")
            if name in self.folded:
                self.inputs[name] = self._tensor(name)
            elif name not in self.learned and math.prod(shape) <= MOST_FOLDED:
                self.known[name] = self.graph.tensor(name)
        left = _last_uses(self.graph.nodes)
        for node in self.graph.nodes:
            self._size(node)
            for name in left.get(node, ()) if self._values is not None else ():
                self.env.pop(name, None)
        self.env = {}

    def _input(self, value: Any) -> None:
        if self._values is not None:
            self.inputs[value.name] = self._values[value.name]
            self.env[value.name] = _wide(self._values[value.name])
            return
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            self._lost[value.name] = "an input that says no shape, or is no tensor"
            return
        try:
            dtype = dtype_of(int(kind.elem_type))
        except UnsupportedError as error:
            self._lost[value.name] = str(error)
            return
        shape = shape_of(value, self.sizes, self._larger)
        if any(size < 0 for size in shape) or math.prod(shape) > MOST_ELEMENTS:
            raise ModelError(f"the input {value.name[:100]!r} has the shape {shape[:8]}", hint="Export it again.")
        tensor = self.env[value.name] = torch.empty(shape, dtype=dtype, device="meta")
        if MASK.search(value.name) and len(shape) == 2:
            self.masks[value.name] = tensor
        else:
            self.inputs[value.name] = tensor

    def _size(self, node: Node) -> None:
        lost = next((self._lost[name] for name in node.inputs if name in self._lost), None)
        operation = OPERATIONS.get((node.domain, node.op))
        if lost is None and (operation is None or node in self.graph.hidden):
            lost = node.op
            self.unread.add(f"{node.domain}::{node.op}"[:60] if node.domain else node.op[:60])
        if lost is None:
            try:
                for name, tensor in self._made(node, self.env, wide=self._values is not None):
                    self.env[name] = tensor
                    if name in self._wanted:
                        self.exact[name] = tensor
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
        inner = next((op for domain, op in self.graph.hidden.get(node, ()) if attends(domain, op)), None)
        if inner is not None:
            self.missing.append(Missing(node.site, f"{inner} inside of {node.op}: branches and loops are not read"))
        elif attends(node.domain, node.op):
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
            for name, tensor in self._made(node, self.known, folds=True):
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
        for name, mask in self.masks.items():
            self._constants[name] = mask
            values.given[place_tensor(self._modules, name, mask)] = torch.ones(mask.shape, dtype=mask.dtype)
        return values

    @property
    def sick(self) -> tuple[str, ...]:
        """Names of weights that hold NaN or infinity, among those that are read and lie in memory once more."""
        used = {name for node in self._readable for name in node.inputs} & self.learned & {*self.graph.initializers}
        sizes = {name: math.prod(self.graph.initializers[name].dims) for name in used}
        small = [name for name in used if sizes[name] <= MOST_LOOKED_AT]
        sick = [name for name in small if not is_finite(self.graph.tensor(name))]
        return tuple(sorted(self._names.get(name, name) for name in sick))

    def operators(self) -> dict[str, tuple[str, ...]]:
        """By site the operators that attend there, in order: "Softmax", or one that is an attention by itself."""
        found: dict[str, tuple[str, ...]] = {}
        for node in self._readable:
            if attends(node.domain, node.op):
                site = node.scope if node.scope in self._modules else ""
                name = "Softmax" if node.op == "Softmax" else f"{node.domain or 'ai.onnx'}.{node.op}"
                found[site or ""] = (*found.get(site or "", ()), name)
        return found

    def _hold(self, name: str, values: _Values) -> None:
        if name in self.graph.initializers:
            proto = self.graph.initializers[name]
            shape, dtype = tuple(int(size) for size in proto.dims), dtype_of(int(proto.data_type))
        else:
            shape, dtype = tuple(self.known[name].shape), self.known[name].dtype
        learned = name in self.learned
        if self._values is not None:
            own = self.known[name] if name in self.known else self.graph.tensor(name)
            twin = nn.Parameter(own, requires_grad=False) if learned else own
        else:
            twin = weight(shape, dtype) if learned else torch.empty(shape, dtype=dtype, device="meta")
        self._constants[name] = twin
        label = place_tensor(self._modules, self._names.get(name, name), twin)
        if self._values is not None:
            return
        if name in self.known:
            values.given[label] = self.known[name]
        elif math.prod(shape) <= (MOST_LEARNED if learned else LARGEST):
            values.later[label] = name

    def again(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Walk the graph; its outputs are of no use, `made` has what is wanted."""
        self.env = {**self._constants, **dict(zip(self.inputs, inputs, strict=True))}
        left = _last_uses(self._readable)
        for node in self._readable:
            if all(name in self._constants or not name for name in node.outputs):
                continue
            place = self._modules.get(node.scope or "", self._modules[""])
            run = partial(place_in_code(node.stack, node.number + 1), self._made, node, self.env)
            made = run() if place is self._modules[""] else place(run)
            for name, tensor in made:
                self.env.setdefault(name, tensor)
                if name in self._wanted:
                    self.made[name] = tensor
            for name in left.get(node, ()):
                if name not in self._constants:
                    self.env.pop(name, None)
        return {}

    def _made(
        self, node: Node, sources: Mapping[str, Tensor], *, folds: bool = False, wide: bool = False
    ) -> list[tuple[str, Tensor]]:
        """What an operation gives.

        Args:
            node: the operation.
            sources: tensors by name; those of the walk where it has no such.
            folds: it is computed of constants.
            wide: it is computed in float64.
        """
        given = tuple(
            (sources[name] if name in sources else self._tensor(name)) if name else None for name in node.inputs
        )
        first = given[0] if given else None
        if wide and first is not None and _only_rounds(node, first):
            return [(node.outputs[0], first)]
        if wide and node.op != "Gather":  # of a table few rows are taken
            given = tuple(None if tensor is None else _wide(tensor) for tensor in given)
        device = "cpu" if folds else self._device
        step = Step(node, self.graph, given, self.known, device, self.learned, as_numbers=not folds)
        result = OPERATIONS[node.domain, node.op](step)
        results = result if isinstance(result, tuple) else (result,)
        made = [(name, tensor) for name, tensor in zip(node.outputs, results, strict=False) if name]
        return [(name, _wide(tensor)) for name, tensor in made] if wide else made

    def _tensor(self, name: str) -> Tensor:
        """A tensor of the walk, or a constant of the file."""
        if name in self.env or self._values is None:
            return self.env[name]
        return self.known[name] if name in self.known else self.graph.tensor(name)


def _only_rounds(node: Node, tensor: Tensor) -> bool:
    """Whether an operation brings floating-point numbers to another dtype of such."""
    return node.op == "Cast" and tensor.is_floating_point() and dtype_of(int(node.attributes["to"])).is_floating_point


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


class _Values(Mapping[str, Tensor]):
    """Values of constants by their names in the model; those of the file are read when they are asked for."""

    def __init__(self, graph: Graph) -> None:
        self.given: dict[str, Tensor] = {}
        self.later: dict[str, str] = {}
        self._graph = graph

    def __getitem__(self, name: str) -> Tensor:
        if name in self.given:
            return self.given[name]
        return self._graph.tensor(self.later[name])

    def __iter__(self) -> Iterator[str]:
        return iter((*self.given, *self.later))

    def __len__(self) -> int:
        return len(self.given) + len(self.later)


def attends(domain: str, op: str) -> bool:
    """Whether an operator is a softmax, or an attention by itself."""
    return op in ("Softmax", "BiasSoftmax") or (domain, op) in ATTENTIONS or op.endswith("Attention")


def _last_uses(nodes: Sequence[Node]) -> dict[Node, list[str]]:
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
