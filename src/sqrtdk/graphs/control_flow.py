"""Writes the branches of an ONNX graph out, and the loops around an attention: an equal graph without them.

    If(c)        the nodes of the branch that c chooses
    Loop(M, c)   the nodes of the body, once for each iteration, each reading what the one before it made
    Scan(x)      the nodes of the body, once for each entry of x along its axis

Which branch runs, and how often a body, is read from values: from a run of onnxruntime on the inputs, or, without
inputs, from numbers that the graph computes of constants and shapes. Where nothing says it, the operator stays, and is
not read. A number that depends on the inputs is held to at each later run: other inputs that would take another branch
are an error, and no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sqrtdk import _extras
from sqrtdk.errors import ModelError
from sqrtdk.graphs.graph import MOST_NODES, Graph, GraphNode, read_graph
from sqrtdk.graphs.model_file import MAX_GRAPH_DEPTH, ONNX_EXTRA, graphs_of
from sqrtdk.graphs.onnx_walk import attends
from sqrtdk.graphs.rewriting import TAKEN_OPERATOR

Array = np.ndarray[Any, Any]
_OPERATORS = ("If", "Loop", "Scan")
_MOST_ITERATIONS = 1024
_ITERATIONS = "::count"  # name of an output that counts the iterations of a loop, behind that of its first output
_INT64 = 7


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What is known of tensors of a graph: values, and shapes; a name that is in neither is unknown."""

    values: Mapping[str, Array]
    shapes: Mapping[str, tuple[int, ...]]


Ask = Callable[[Graph, Sequence[str]], Known]


def without_control_flow(file: Graph, ask: Ask, *, counts: bool) -> Graph:
    """Return a graph without branches and without loops around an attention, or the same object if there are none.

    Args:
        file: The graph.
        ask: Returns what is known of tensors of a graph, by their names.
        counts: Whether `ask` runs the graph, so that a loop can count its iterations.

    Raises:
        ModelError: The graph would have too many nodes.
    """
    if not any(_is_written(proto) for proto in file.model.graph.node):
        return file
    model = type(file.model)()
    model.CopyFrom(file.model)
    held: dict[str, list[tuple[str, Any]]] = {}
    graph = file
    for _ in range(MAX_GRAPH_DEPTH):
        protos = [proto for proto in model.graph.node if _is_written(proto)]
        if counts:
            for proto in protos:
                _count(proto)
        graph = read_graph(model, file.folder)
        known = ask(graph, [*dict.fromkeys(name for proto in protos for name in _wanted(proto))])
        writing = _Writing(known, graph, model, held)
        nodes = [node for proto in model.graph.node for node in writing.of(proto)]
        if len(nodes) > MOST_NODES:
            raise ModelError(
                f"the graph has {len(nodes)} operations with its loops written out; at most {MOST_NODES} are read",
                hint="Export it for shorter inputs.",
            )
        if not writing.written:
            break
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        graph = read_graph(model, file.folder)
    return replace(graph, nodes=tuple(_with_checks(node, held) for node in graph.nodes))


def _with_checks(node: GraphNode, held: Mapping[str, list[tuple[str, Any]]]) -> GraphNode:
    checks = held.get(node.outputs[0] if node.outputs else "")
    if not checks:
        return node
    names, values = zip(*checks, strict=True)
    (domain, op), inputs = TAKEN_OPERATOR, (*node.inputs, *names)
    return replace(node, domain=domain, op=op, inputs=inputs, attributes={"values": values})


def _is_written(proto: Any) -> bool:
    """Return whether a node is a branch, or a loop around an attention; any other loop is computed by onnxruntime."""
    if proto.op_type not in _OPERATORS or proto.domain not in ("", "ai.onnx"):
        return False
    if proto.op_type == "If":
        return True
    graphs = (graph for body in _bodies(proto) for graph in graphs_of(body))
    return any(attends(node.domain, node.op_type) for graph in graphs for node in graph.node)


def _bodies(proto: Any) -> Iterator[Any]:
    return (attribute.g for attribute in proto.attribute if attribute.HasField("g"))


def _wanted(proto: Any) -> list[str]:
    """Return the names of tensors that say how an operator runs."""
    if proto.op_type == "Scan":
        return [*proto.input]
    names = [*proto.input[: 1 if proto.op_type == "If" else 2]]
    names += [name for name in proto.output if name.endswith(_ITERATIONS)]
    return [name for name in names if name]


def _count(proto: Any) -> None:
    """Let a loop count its iterations in one more output."""
    if proto.op_type != "Loop" or any(name.endswith(_ITERATIONS) for name in proto.output):
        return
    onnx = _extras.load_extra("onnx", ONNX_EXTRA)
    (body,) = _bodies(proto)
    name = f"{proto.output[0]}{_ITERATIONS}"
    body.node.append(onnx.helper.make_node("Identity", [body.input[0].name], [f"{name}:each"]))
    body.output.append(onnx.helper.make_tensor_value_info(f"{name}:each", _INT64, None))
    proto.output.append(name)


@dataclass(slots=True, eq=False)
class _Writing:
    """One pass over the nodes, in which operators whose values are known are written out.

    Attributes:
        known: What is known of tensors.
        graph: The graph.
        model: Its proto, which gets the constants of the bodies.
        held: For each output of an operator that was written out, what must hold at a run: a tensor and its value.
        written: Number of operators that were written out.
    """

    known: Known
    graph: Graph
    model: Any
    held: dict[str, list[tuple[str, Any]]]
    written: int = 0
    nodes: list[Any] = field(default_factory=list)

    def of(self, proto: Any) -> list[Any]:
        """Return the nodes that stand for a node: itself, or those inside it."""
        if not _is_written(proto):
            return [proto]
        self.nodes = []
        write = {"If": self._branch, "Loop": self._loop, "Scan": self._scan}[proto.op_type]
        if not write(proto):
            return [proto]
        self.written += 1
        for node in self.nodes:
            if not node.metadata_props:
                node.metadata_props.extend(proto.metadata_props)
        return self.nodes

    def _value(self, name: str) -> Any:
        """Return the number that a tensor holds; None if it is not known."""
        array = self.known.values.get(name)
        array = self.graph.array(name) if array is None and name else array
        return None if array is None or np.size(array) != 1 else np.asarray(array).reshape(()).item()

    def _depends(self, name: str) -> bool:
        """Return whether a value must be held to: it is no constant of the file."""
        return bool(name) and self.graph.array(name) is None

    # -- the three operators -------------------------------------------------------------------------------------------

    def _branch(self, proto: Any) -> bool:
        taken = self._value(proto.input[0])
        if taken is None:
            return False
        wanted = "then_branch" if taken else "else_branch"
        body = next(attribute.g for attribute in proto.attribute if attribute.name == wanted)
        checks = [(proto.input[0], bool(taken))] if self._depends(proto.input[0]) else []
        results = self._written(body, {}, f"{proto.output[0]}/{wanted}")
        self._give(proto.output, results, checks)
        return True

    def _loop(self, proto: Any) -> bool:
        (body,) = _bodies(proto)
        most = self._value(proto.input[0]) if proto.input[0] else None
        condition = proto.input[1] if len(proto.input) > 1 else ""
        counter = next((name for name in proto.output if name.endswith(_ITERATIONS)), "")
        if counter in self.known.shapes:
            count = self.known.shapes[counter][0]
        elif most is not None and (not condition or self._value(condition) is True) and _goes_on(body):
            count = most
        else:
            return False
        if not 1 <= count <= _MOST_ITERATIONS:
            return False
        checks = [(proto.input[0], int(most))] if most is not None and self._depends(proto.input[0]) else []
        checks += [(condition, True)] if self._depends(condition) else []
        carried, rows = [*proto.input[2:]], list[list[str]]()
        kept = len(carried)
        for turn in range(count):
            at = f"{proto.output[0]}/{turn}"
            self._constant(f"{at}::turn", np.asarray(turn, np.int64))
            if not condition:
                condition = f"{at}::on"
                self._constant(condition, np.asarray(True))
            given = [f"{at}::turn", condition, *carried]
            go_on, *results = self._written(body, dict(zip((x.name for x in body.input), given, strict=False)), at)
            if not _goes_on(body):
                last = turn == count - 1
                checks += [] if last and count == most else [(go_on, not last)]
            condition, carried = go_on, results[:kept]
            rows.append(results[kept:])
        self._give([*proto.output[:kept]], carried, checks)
        for name, parts in zip(proto.output[kept:], zip(*rows, strict=True), strict=True):
            self._stack(name, parts, 0, checks)
        return True

    def _scan(self, proto: Any) -> bool:
        (body,) = _bodies(proto)
        many = next(int(x.i) for x in proto.attribute if x.name == "num_scan_inputs")
        numbers = {x.name: [*x.ints] for x in proto.attribute}
        states, scanned = [*proto.input[: len(proto.input) - many]], [*proto.input[len(proto.input) - many :]]
        outputs = len(proto.output) - len(states)
        shapes = [self.known.shapes.get(name) for name in scanned]
        axes, ways = numbers.get("scan_input_axes", [0] * many), numbers.get("scan_input_directions", [0] * many)
        out_axes = numbers.get("scan_output_axes", [0] * outputs)
        out_ways = numbers.get("scan_output_directions", [0] * outputs)
        if any(shape is None for shape in shapes) or self.graph.opset < 9:
            return False
        count = shapes[0][axes[0]]  # type: ignore[index]
        if not 1 <= count <= _MOST_ITERATIONS:
            return False
        rows: list[list[str]] = []
        first, kept = proto.output[0], len(states)
        for turn in range(count):
            at, entries = f"{first}/{turn}", []
            for number, (name, axis, way) in enumerate(zip(scanned, axes, ways, strict=True)):
                index = f"{at}::at{number}"
                self._constant(index, np.asarray(count - 1 - turn if way else turn, np.int64))
                self._node("Gather", [name, index], f"{at}::in{number}", axis=int(axis))
                entries.append(f"{at}::in{number}")
            results = self._written(body, dict(zip((x.name for x in body.input), [*states, *entries], strict=True)), at)
            states = results[:kept]
            rows.append(results[kept:])
        self._give([*proto.output[:kept]], states, [])
        for name, parts, axis, way in zip(
            proto.output[kept:], zip(*rows, strict=True), out_axes, out_ways, strict=True
        ):
            self._stack(name, parts[::-1] if way else parts, int(axis), [])
        return True

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _written(self, body: Any, given: dict[str, str], at: str) -> list[str]:
        """Add the nodes of a body under names of their own, and return the names of its outputs.

        Args:
            body: The graph of the body.
            given: For each of its inputs, the name of the tensor that it is.
            at: What the names of its tensors begin with.
        """
        names = dict(given)
        known = {tensor.name for tensor in self.model.graph.initializer}
        for tensor in body.initializer:  # a weight keeps its name, unless another constant has it
            names[tensor.name] = tensor.name if tensor.name not in known else f"{at}/{tensor.name}"
            same = next((x for x in self.model.graph.initializer if x.name == tensor.name), None)
            if same is not None and same == tensor:
                names[tensor.name] = tensor.name
                continue
            self.model.graph.initializer.append(tensor)
            self.model.graph.initializer[-1].name = names[tensor.name]
        names |= {name: f"{at}/{name}" for node in body.node for name in node.output if name}
        for node in body.node:
            copy = type(node)()
            copy.CopyFrom(node)
            _rename(copy, names)
            copy.output[:] = [names.get(name, name) for name in node.output]
            copy.name = f"{node.name}::{at.replace('/', '.')}" if node.name else ""  # unique, with the module in front
            self.nodes.append(copy)
        return [names.get(value.name, value.name) for value in body.output]

    def _give(self, outputs: Sequence[str], results: Sequence[str], checks: list[tuple[str, Any]]) -> None:
        for name, result in zip(outputs, results, strict=True):
            if name:
                self._node("Identity", [result], name)
                self.held |= {name: checks} if checks else {}

    def _stack(self, name: str, parts: Sequence[str], axis: int, checks: list[tuple[str, Any]]) -> None:
        """Add the nodes that join what the iterations gave along a new axis."""
        if not name:
            return
        self._constant(f"{name}::axis", np.asarray([axis], np.int64))
        rows = []
        for turn, part in enumerate(parts):
            rows.append(f"{name}::row{turn}")
            inputs, attributes = ([part, f"{name}::axis"], {}) if self.graph.opset >= 13 else ([part], {"axes": [axis]})
            self._node("Unsqueeze", inputs, rows[-1], **attributes)
        self._node("Concat", rows, f"{name}::rows", axis=axis)
        self._give([name], [f"{name}::rows"], checks)

    def _node(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> None:
        onnx = _extras.load_extra("onnx", ONNX_EXTRA)
        self.nodes.append(onnx.helper.make_node(op, inputs, [output], **attributes))

    def _constant(self, name: str, value: Array) -> None:
        onnx = _extras.load_extra("onnx", ONNX_EXTRA)
        self.model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))


def _rename(node: Any, names: Mapping[str, str]) -> None:
    """Rename what a node reads, in the graphs inside it too; a graph's own tensors hide those around it."""
    node.input[:] = [names.get(name, name) for name in node.input]
    for body in _bodies(node):
        own = {name for inner in body.node for name in inner.output} | {tensor.name for tensor in body.initializer}
        own |= {value.name for value in body.input}
        outer = {name: new for name, new in names.items() if name not in own}
        for inner in body.node:
            _rename(inner, outer)
        for value in body.output:
            value.name = outer.get(value.name, value.name)


def _goes_on(body: Any) -> bool:
    """Return whether the body of a loop never ends it: its condition is that which it was given, or a constant True."""
    name, made = body.output[0].name, {node.output[0]: node for node in body.node if node.output}
    while (node := made.get(name)) is not None and node.op_type in ("Identity", "Cast"):
        name = node.input[0]
    if name == body.input[1].name:
        return True
    numpy_helper = _extras.load_extra("onnx", ONNX_EXTRA).numpy_helper
    constants = [tensor for tensor in body.initializer if tensor.name == name]
    if node is not None and node.op_type == "Constant":
        constants = [attribute.t for attribute in node.attribute if attribute.name == "value"]
    return any(bool(numpy_helper.to_array(tensor).all()) for tensor in constants)
