"""Walks an ONNX graph as torch operations, on the meta device or on values.

Each graph is walked twice. The first walk finds shapes and folds small constants (sizes, axes, a scale) into numbers.
The second walk uses these numbers and runs under the caller's trace. On values the first walk is in float64, which
gives the result of the graph without the rounding of its own dtypes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import INTERRUPTS, ModelError, UnsupportedError, kind_and_text
from sqrtdk.frontends import regions
from sqrtdk.graphs import places
from sqrtdk.graphs.counts import count_of_graph
from sqrtdk.graphs.graph import Graph, GraphNode, UnreadAttention, load_graph, refuse_many
from sqrtdk.graphs.inputs import PADDING_MASK_NAME, onnx_input_shape, shown_sizes
from sqrtdk.graphs.onnx_attention import ATTENTION_OPERATIONS
from sqrtdk.graphs.onnx_ops import ONNX_OPERATIONS, operate
from sqrtdk.graphs.onnx_shapes import RANDOM_NODES
from sqrtdk.graphs.onnx_step import ONNX_DTYPES, OnnxStep, torch_dtype
from sqrtdk.graphs.onnx_weights import find_weights
from sqrtdk.graphs.quantised import without_quantisation
from sqrtdk.messages import Message
from sqrtdk.models.modules import is_finite
from sqrtdk.models.records import LoadedModel

MOST_FOLDED = 2**12  # largest constant folded in the first walk, in elements
MOST_SEARCHED_ELEMENTS = 2**28  # largest weight searched for NaN, in elements
MOST_ELEMENTS = 2**40  # largest tensor on the meta device, in elements
Tensors = dict[str, Tensor]
# Operators after which the weights of a softmax are none any more, and those that only change or move them.
_ENDS_OF_WEIGHTS = frozenset({"CumSum", "Shape", "Size", "ArgMax", "ArgMin", "TopK", "NonZero", "Greater", "Less"})
_ONLY_MOVED = frozenset({"Add", "Sub", "Mul", "Div", "Cast", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze",
                         "Slice", "Split", "Concat", "Pad", "Expand", "Where", "Gather", "GatherND", "Neg",
                         "Dropout"})  # fmt: skip


def walkable(file: Graph) -> Graph:
    """Return the graph of a file without quantised operators.

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
    return without_quantisation(file)


def walk_onnx(path: str | os.PathLike[str], config: Any, larger: bool) -> places.GraphModel:
    """Return an ONNX graph as a model whose forward pass walks the graph on the device "meta".

    Nothing is computed there: the walk gives shapes and operations.

    Args:
        path: The file.
        config: Config of the model that was exported, or None.
        larger: As for `number_for`.
    """
    file = load_graph(path)
    walk = Walk(walkable(file), larger=larger)
    walk.first()
    root = regions.class_of(walk.graph.root_class, places.GraphRoot)(walk.again, config)
    values = walk.place(root)
    notes: tuple[str, ...] = (shown_sizes(walk.sizes),) if walk.sizes else ()
    notes += tuple(Message("graphs.mask_of_ones", name=name) for name in walk.masks)
    if walk.unread:
        ops = ", ".join(sorted(walk.unread)[:5])
        what = Message("graphs.and_more", names=ops) if len(walk.unread) > 5 else ops
        notes += (Message("graphs.unread", what=what),)
    if walk.folded:
        notes += (Message("graphs.folded", count=len(walk.folded)),)
    loaded = LoadedModel(root, tuple(walk.inputs.values()), str(path), "onnx", config, notes=notes, masks=values)
    unread = tuple(sorted(walk.unread))
    missing, numbers = tuple(walk.missing), count_of_graph(file)
    return places.GraphModel(loaded, numbers, missing, walk.sizes, walk.operators(), unread, walk.sick)


@dataclass(eq=False)
class Walk:
    """Both walks of a graph in floating-point numbers, on the meta device or on `values` of the inputs.

    `wanted` names the tensors to keep. With `larger`, free sizes get other numbers than without it.
    """

    graph: Graph
    larger: bool = False
    values: Mapping[str, Tensor] | None = None
    wanted: Collection[str] = ()
    exact: Tensors = field(default_factory=dict)  # wanted tensors of the first walk, in float64 if it is on values
    made: Tensors = field(default_factory=dict)  # wanted tensors of the second walk, in the dtypes of the file
    inputs: Tensors = field(default_factory=dict)  # inputs of the graph, and constants that are queries
    masks: Tensors = field(default_factory=dict)  # padding masks, assumed to be ones; on the meta device
    sizes: dict[str, int] = field(default_factory=dict)  # numbers chosen for free sizes
    missing: list[UnreadAttention] = field(default_factory=list)  # attentions that are not read
    unread: set[str] = field(default_factory=set)  # operators that are not read
    learned: set[str] = field(default_factory=set)  # names of constants that are weights
    folded: set[str] = field(default_factory=set)  # names of constants that are queries
    _names: dict[str, str] = field(default_factory=dict)  # parameter names of weights that the file renamed
    _env: Tensors = field(default_factory=dict)  # tensors of the current walk
    _known: Tensors = field(default_factory=dict)  # values of small constants
    _empty: Tensors = field(default_factory=dict)  # constants of the file, on the meta device
    _constants: Tensors = field(default_factory=dict)  # tensors that the model's modules hold
    _lost: dict[str, str] = field(default_factory=dict)  # unreadable tensors, each with the reason
    _modules: dict[str, nn.Module] = field(default_factory=dict)
    _readable: list[GraphNode] = field(default_factory=list)

    # -- the first walk ------------------------------------------------------------------------------------------------

    def first(self) -> None:
        """Walk the graph for the first time: find shapes, fold constants, and list operators that can't be read."""
        self.learned, self.folded, self._names = find_weights(self.graph)
        for value in self.graph.inputs:
            self._input(value)
        for name, proto in self.graph.initializers.items():
            empty = self._declared("tensor", name, [int(size) for size in proto.dims], int(proto.data_type))
            if empty is None:
                continue
            self._empty[name] = empty
            if name in self.folded:
                self.inputs[name] = self._tensor(name)
            elif name not in self.learned and empty.numel() <= MOST_FOLDED:
                self._known[name] = self.graph.tensor(name)
        left = _last_uses(self.graph.nodes)
        for node in self.graph.nodes:
            lost = next((self._lost[name] for name in node.inputs if name in self._lost), None) or self._sized(node)
            if lost is None:
                self._readable.append(node)
                self._fold(node)
            else:
                self._lose(node, lost)
            # On values, memory is freed after the last use. On the meta device it costs nothing.
            for name in left.get(node, ()) if self.values is not None else ():
                self._env.pop(name, None)

    def _declared(self, what: str, name: str, shape: list[int], data_type: int) -> Tensor | None:
        """Return a meta tensor of the declared shape and dtype.

        Returns None, and notes the tensor as lost, if torch has no such dtype.
        """
        if data_type not in ONNX_DTYPES:
            self._lost[name] = Message("graphs.input_type", type=data_type)
            return None
        if math.prod(shape) > MOST_ELEMENTS or any(size < 0 for size in shape):
            raise ModelError(f"the {what} {name[:100]!r} has the shape {shape[:8]}", hint="Export it again.")
        return torch.empty(shape, dtype=ONNX_DTYPES[data_type], device="meta")

    def _input(self, value: Any) -> None:
        name, kind = value.name, value.type.tensor_type
        if self.values is not None:
            self.inputs[name], self._env[name] = self.values[name], _wide(self.values[name])
            return
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            self._lost[name] = Message("graphs.input_shape")
            return
        tensor = self._declared("input", name, onnx_input_shape(value, self.sizes, self.larger), int(kind.elem_type))
        if tensor is not None:
            (self.masks if PADDING_MASK_NAME.search(name) and tensor.dim() == 2 else self.inputs)[name] = self._env[
                name
            ] = tensor

    def _sized(self, node: GraphNode) -> str | None:
        """Adds the outputs of an operation to `_env`. Returns the reason if it is not read, else None."""
        if (node.domain, node.op) not in ONNX_OPERATIONS or node.inner:
            self.unread.add(f"{node.domain}::{node.op}"[:60] if node.domain else node.op[:60])
            return node.op
        try:
            made = self._made(node, self._env, wide=self.values is not None)
        except (*INTERRUPTS, ModelError):
            raise
        except Exception as error:  # torch raises many types for shapes that do not fit
            lost = str(error) if isinstance(error, UnsupportedError) else f"{node.op}: {kind_and_text(error, 120)}"
            self.unread.add(lost[:80])
            return lost
        self._env |= made
        self.exact |= {name: tensor for name, tensor in made.items() if name in self.wanted}
        return None

    def _lose(self, node: GraphNode, why: str) -> None:
        self._lost |= dict.fromkeys(filter(None, node.outputs), why)
        inner = next((op for domain, op in node.inner if attends(domain, op)), None)
        if inner is not None:
            self.missing.append(UnreadAttention(node.site, Message("graphs.inside", name=inner, other=node.op)))
        elif attends(node.domain, node.op) and may_weigh(self.graph, node):
            self.missing.append(UnreadAttention(node.site, Message("graphs.after_unread", name=node.op, what=why)))

    def _fold(self, node: GraphNode) -> None:
        """Adds the outputs of an operation to `_known` if it has only known inputs, or reads only a shape."""
        # 1 / sqrt(q.shape[-1]) may be exported as Shape, Slice, Cast, Sqrt, Div: all of it folds to one number.
        constant = node.op in ("Shape", "Size") or all(name in self._known for name in node.inputs if name)
        large = any(self._env[name].numel() > MOST_FOLDED for name in node.outputs if name in self._env)
        if not constant or large or node.op in RANDOM_NODES or (node.domain, node.op) in ATTENTION_OPERATIONS:
            return
        try:
            self._known |= self._made(node, self._known, folds=True)
        except INTERRUPTS:
            raise
        except Exception:  # the CPU may have no kernel for the dtype
            return

    # -- the second walk -----------------------------------------------------------------------------------------------

    def place(self, root: nn.Module) -> dict[str, Tensor]:
        """Add the modules and constants of the graph to a root module.

        Returns:
            The values of small constants, by their names in the root.
        """
        self._env = {}
        classes = {node.scope: node.kind for node in self._readable if node.scope is not None}
        names = [self._names.get(name, name) for name in self.graph.initializers]
        holders = {name.rpartition(".")[0]: "" for name in names if "." in name}
        self._modules = regions.place_modules(root, holders | classes)
        used = {name for node in self._readable for name in node.inputs}
        held = [name for name in self._empty if name not in self.folded]
        held += [name for node in self._readable for name in node.outputs if name in self._known]
        values: dict[str, Tensor] = {}
        for name in filter(used.__contains__, dict.fromkeys(held)):
            stored = self.values is not None or name in self._empty
            twin = self._tensor(name) if stored else torch.empty_like(self._known[name], device="meta")
            twin = nn.Parameter(twin, requires_grad=False) if name in self.learned else twin
            self._constants[name] = twin
            label = regions.place_tensor(self._modules, self._names.get(name, name), twin)
            if self.values is None and (name in self._known or places.is_looked_at(twin)):
                values[label] = self._known[name] if name in self._known else self.graph.tensor(name)
        for name, mask in self.masks.items():
            self._constants[name] = mask
            values[regions.place_tensor(self._modules, name, mask)] = torch.ones(mask.shape, dtype=mask.dtype)
        return values

    @property
    def sick(self) -> tuple[str, ...]:
        """Names of the weights that hold NaN or infinity, among those small enough to be loaded."""
        used = {name for node in self._readable for name in node.inputs if name in self.learned}
        small = [name for name in used if name in self._empty and self._empty[name].numel() <= MOST_SEARCHED_ELEMENTS]
        return tuple(sorted(self._names.get(name, name) for name in small if not is_finite(self.graph.tensor(name))))

    def operators(self) -> dict[str, tuple[str, ...]]:
        """Return the attention operators of each module path in order: "Softmax", or the name of a fused attention."""
        found: dict[str, tuple[str, ...]] = {}
        for node in self._readable:
            if attends(node.domain, node.op):
                site = (node.scope or "") if node.scope in self._modules else ""
                name = "Softmax" if node.op == "Softmax" else f"{node.domain or 'ai.onnx'}.{node.op}"
                found[site] = (*found.get(site, ()), name)
        return found

    def again(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Walk the graph for the second time, inside the modules that `place` made; a trace records this walk.

        Returns:
            No outputs, {}; the tensors that were asked for are in `made`.
        """
        self._env = {**self._constants, **dict(zip(self.inputs, inputs, strict=True))}
        left = _last_uses(self._readable)
        for node in self._readable:
            if all(name in self._constants or not name for name in node.outputs):  # folded in the first walk
                continue
            at = (node.scope or "", node.stack, node.number + 1)
            made = places.run_inside(self._modules, *at, self._made, node, self._env)
            for name, tensor in made.items():
                self._env.setdefault(name, tensor)
                if name in self.wanted:
                    self.made[name] = tensor
            for name in left.get(node, ()):
                if name not in self._constants:
                    self._env.pop(name, None)
        return {}

    def _made(
        self, node: GraphNode, sources: Mapping[str, Tensor], *, folds: bool = False, wide: bool = False
    ) -> dict[str, Tensor]:
        """Return the outputs of an operation by name.

        With `folds` all inputs are constants and the operation runs on the CPU. With `wide` it runs in float64.
        """
        given = tuple(sources[n] if n in sources else self._tensor(n) if n else None for n in node.inputs)
        first = given[0] if given else None
        # In the float64 walk, a Cast between floating-point dtypes would round: it is left out.
        rounds = wide and node.op == "Cast" and torch_dtype(node.attributes["to"]).is_floating_point
        if rounds and first is not None and first.is_floating_point():
            return {node.outputs[0]: first}
        if wide and node.op != "Gather":  # a lookup takes a few rows, so the whole table is not widened
            given = tuple(None if tensor is None else _wide(tensor) for tensor in given)
        device = "cpu" if folds or self.values is not None else "meta"
        step = OnnxStep(node, self.graph, given, self._known, device, self.learned, as_numbers=not folds)
        made = operate(step)
        return {name: _wide(tensor) for name, tensor in made.items()} if wide else made

    def _tensor(self, name: str) -> Tensor:
        """Return a tensor of the walk or a constant of the file, on the meta device unless the walk has values."""
        if name in self._env:
            return self._env[name]
        if self.values is None:
            return self._empty[name]
        return self._known[name] if name in self._known else self.graph.tensor(name)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def attends(domain: str, op: str) -> bool:
    """Return whether an ONNX operator is a softmax or a fused attention.

    Example:
        >>> attends("", "Softmax"), attends("com.microsoft", "GroupQueryAttention"), attends("", "MatMul")
        (True, True, False)
    """
    return op in ("Softmax", "BiasSoftmax") or (domain, op) in ATTENTION_OPERATIONS or op.endswith("Attention")


def may_weigh(graph: Graph, softmax: GraphNode) -> bool:
    """Return whether the result of a softmax may be attention weights: a product or a sum with values follows.

    The softmax of a spline does not: it gives the widths of its bins, which are cumulated, softmax(w).cumsum(-1).
    """
    if softmax.op not in ("Softmax", "BiasSoftmax"):
        return True
    queue, visited = list(softmax.outputs), set[str]()
    while queue:
        name = queue.pop()
        if name in visited:
            continue
        visited.add(name)
        for node in graph.taken_by.get(name, ()):
            if node.op not in _ENDS_OF_WEIGHTS and (node.op not in _ONLY_MOVED or node.inner):
                return True
            queue += [] if node.op in _ENDS_OF_WEIGHTS else node.outputs
    return False


def _last_uses(nodes: Sequence[GraphNode]) -> dict[GraphNode, list[str]]:
    """Return for each node the tensors that no later node uses, which can be freed after it."""
    last = {name: node for node in nodes for name in (*node.inputs, *node.outputs) if name}
    left: dict[GraphNode, list[str]] = {}
    for name, node in last.items():
        left.setdefault(node, []).append(name)
    return left
