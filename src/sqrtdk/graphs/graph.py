"""An ONNX graph with its nodes indexed by the tensors they produce and consume, and the values of its constants."""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import _extras
from sqrtdk.errors import INTERRUPTS, ModelError, kind_and_text
from sqrtdk.graphs.model_file import ONNX_EXTRA, folder_of, graphs_of, load_file

_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_NODES_SEARCHED_FOR_CLASS = 64  # nodes searched for the class of the model
_STACK = "pkg.torch.onnx.stack_trace"
_MAX_SCOPE = 2**14  # longest text that is parsed, in characters
MOST_NODES = 2**15  # largest number of operations: each takes about 10 ms over all walks and the trace


@dataclass(frozen=True, slots=True, eq=False)
class GraphNode:
    """One operation of a graph: its operator, inputs, outputs and attributes, and where the model's code called it."""

    number: int  # index in the graph, whose nodes are in an order that can be executed
    op: str  # operator, such as "MatMul"
    domain: str  # domain of the operator, "" for ONNX's own
    name: str  # name of the node; may be ""
    inputs: tuple[str, ...]  # names of tensors, "" for an omitted one
    outputs: tuple[str, ...]  # names of tensors, "" for an omitted one
    attributes: dict[str, Any]  # by name; tensors are arrays
    scope: str | None  # module path, if the exporter wrote one
    kind: str = ""  # class of that module, or "" if the exporter wrote none
    stack: str = ""  # traceback into the model's code, or "" if the exporter wrote none
    # (domain, operator) of the nodes inside its branches or its loop body, which are not read
    inner: tuple[tuple[str, str], ...] = ()

    def input(self, index: int) -> str:
        """Return the name of an input; "" if it is omitted."""
        return self.inputs[index] if index < len(self.inputs) else ""

    @property
    def site(self) -> str:
        """The module path of the node; without one, its name; without a name, that of its first output."""
        return self.scope if self.scope is not None else self.name or self.outputs[0]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A constant that is computed from other constants when it is read.

    It has those fields of a `TensorProto` that are read, so that it can stand in its place.
    """

    name: str  # name of the constant
    dims: tuple[int, ...]  # shape
    data_type: int  # ONNX's number for the dtype
    compute: Callable[[], np.ndarray[Any, Any]]  # returns the values


@dataclass(frozen=True, slots=True)
class UnreadAttention:
    """An attention that could not be read; it was found as a softmax or as a fused attention operator."""

    site: str  # module path, or name of the node
    reason: str  # half a sentence that names the obstacle


@dataclass(slots=True, eq=False)
class Graph:
    """A graph whose nodes are in an order in which they can run; each tensor is the output of one node at most."""

    nodes: tuple[GraphNode, ...]  # in order of execution
    initializers: dict[str, Any]  # constants of the file, by name
    model: Any  # the `onnx.ModelProto`
    inputs: tuple[Any, ...]  # inputs that the caller supplies, as `ValueInfoProto`s
    folder: Path  # folder of the external tensor files
    opset: int  # version of ONNX's own operators
    root_class: str = ""  # class of the whole model, or "" if the exporter wrote none
    made_by: dict[str, GraphNode] = field(init=False)  # the node that produces each tensor
    taken_by: dict[str, list[GraphNode]] = field(init=False)  # the nodes that consume each tensor, in order

    def __post_init__(self) -> None:
        self.made_by, self.taken_by = {}, defaultdict(list)
        given = {value.name for value in self.model.graph.input}
        for node in self.nodes:
            for name in filter(None, node.inputs):
                self.taken_by[name].append(node)
            for name in filter(None, node.outputs):
                if name in self.made_by or (name in self.taken_by and name not in given):
                    raise ModelError(
                        f"the graph is in no order: {name[:100]!r} is used, or made, before the node that makes it",
                        hint="Sort it with onnx.checker or onnx_graphsurgeon, or export it again.",
                    )
                self.made_by[name] = node

    def array(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the value of a constant as a NumPy array; None if the tensor is not a constant.

        A constant is an initializer or the output of a Constant node, and may pass through Identity nodes. It is read
        from the file at each call.
        """
        # A constant is an initializer, or the output of a Constant node, and may pass through Identity nodes.
        while name not in self.initializers:
            node = self.made_by.get(name)
            if node is not None and node.op == "Constant":
                values = (value for key, value in node.attributes.items() if key.startswith("value"))
                return next((np.asarray(value) for value in values), None)
            if node is None or node.op != "Identity":
                return None
            name = node.inputs[0]
        tensor = self.initializers[name]
        return tensor.compute() if isinstance(tensor, Computed) else _to_array(tensor, self.folder)

    def tensor(self, name: str) -> Tensor:
        """Return the value of a constant as a tensor, with memory of its own.

        Raises:
            ModelError: torch has no such dtype.
        """
        return to_tensor(self.array(name))


def load_graph(path: str | os.PathLike[str]) -> Graph:
    """Return the graph of an ONNX file.

    Args:
        path: The file; `load_file` says what it refuses.

    Raises:
        ModelError: The file is refused, or is no ONNX file.
    """
    return read_graph(load_file(path), folder_of(path))


def read_graph(model: Any, folder: Path) -> Graph:
    """Return the graph of an `onnx.ModelProto`.

    Args:
        model: The proto.
        folder: Folder of its file, in which external tensors are looked for.
    """
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    return Graph(
        tuple(_node(number, proto, folder) for number, proto in enumerate(model.graph.node)),
        initializers,
        model,
        inputs=tuple(value for value in model.graph.input if value.name not in initializers),
        folder=folder,
        opset=max((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1),
        root_class=next(filter(None, map(_root_class, model.graph.node[:_NODES_SEARCHED_FOR_CLASS])), ""),
    )


def refuse_many(count: int) -> None:
    """Check that a graph has few enough operations to be walked.

    Raises:
        ModelError: There are more than `MOST_NODES`.
    """
    if count > MOST_NODES:
        raise ModelError(
            f"the graph has {count} operations; at most {MOST_NODES} are read", hint="Export a smaller part of it."
        )


def _root_class(proto: Any) -> str:
    """Return the class of the whole model as noted at one node, or "" if it is missing or one of the exporter's."""
    classes = _listed(next((prop.value for prop in proto.metadata_props if prop.key == _CLASSES), ""))
    return "" if len(classes) < 2 or classes[0].startswith("_") else classes[0]


def _node(number: int, proto: Any, folder: Path) -> GraphNode:
    attributes = {
        attribute.name: _value(attribute, folder)
        for attribute in proto.attribute
        if not attribute.HasField("g") and not attribute.graphs
    }
    inner = [graph for attribute in proto.attribute if attribute.HasField("g") for graph in graphs_of(attribute.g)]
    properties = {prop.key: prop.value for prop in proto.metadata_props}
    return GraphNode(
        number, proto.op_type, "" if proto.domain == "ai.onnx" else proto.domain, proto.name, (*proto.input,),
        (*proto.output,), attributes, _scope(properties, proto.name),
        kind=next(iter(_listed(properties.get(_CLASSES, ""))[-2:-1]), ""), stack=properties.get(_STACK, ""),
        inner=tuple((node.domain, node.op_type) for graph in inner for node in graph.node),
    )  # fmt: skip


def _value(attribute: Any, folder: Path) -> Any:
    if attribute.HasField("t"):
        return _to_array(attribute.t, folder)
    value = _extras.load_extra("onnx", ONNX_EXTRA).helper.get_attribute_value(attribute)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _to_array(tensor: Any, folder: Path) -> np.ndarray[Any, Any]:
    helper = _extras.load_extra("onnx.numpy_helper", ONNX_EXTRA)
    try:
        array: np.ndarray[Any, Any] = helper.to_array(tensor, str(folder))
    except INTERRUPTS:
        raise
    except Exception as error:  # onnx and numpy raise many types for bytes that do not fit a shape
        raise ModelError(
            f"the tensor {tensor.name[:100]!r} of the graph can't be read: {kind_and_text(error)}",
            hint="The file is damaged: export it again.",
        ) from error
    return array


def _listed(text: str) -> list[str]:
    """Return the strings of a list written as a Python literal, or [] if `text` is anything else."""
    if not text.startswith("[") or len(text) >= _MAX_SCOPE:
        return []
    try:
        items = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return items if all(isinstance(item, str) for item in items) else []


def _scope(properties: dict[str, str], name: str) -> str | None:
    """Return the module path that an exporter noted at a node, or None.

    Exporters write it as a list of scopes, as a "namespace" text, or into the name of the node.

    Example:
        >>> _scope({}, "/model/layers.0/self_attn/Softmax"), _scope({}, "Softmax_12")
        ('model.layers.0.self_attn', None)
        >>> _scope({"pkg.torch.onnx.name_scopes": "['', 'h', 'h.0', 'h.0.attn', 'softmax']"}, "node_softmax")
        'h.0.attn'
        >>> _scope({"namespace": ": Net/h.0: Block/h.0.attn: Attention/softmax: aten.softmax.int"}, "node_softmax")
        'h.0.attn'
    """
    path = _listed(properties.get(_SCOPES, ""))
    if len(path) > 1:  # the last scope is the operation, the one before it the module
        return path[-2]
    namespace = properties.get("namespace", "")
    if "/" in namespace and len(namespace) < _MAX_SCOPE:
        return namespace.split("/")[-2].split(": ")[0].strip()
    if name.startswith("/"):
        return ".".join(name.split("/")[1:-1])
    return None


def to_tensor(array: Any) -> Tensor:
    """Return an array, of onnxruntime or of a file, as a tensor with memory of its own.

    Raises:
        ModelError: torch has no such dtype.

    Example:
        >>> to_tensor([1.0, 2.0]).dtype
        torch.float64
    """
    array = np.asarray(array)
    try:
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.array(array))  # a copy, because the source is read-only or shared
    except TypeError as error:
        raise ModelError(f"a tensor of the graph has dtype {array.dtype}", hint="Export in float32.") from error
