"""The nodes of an ONNX graph as flat steps, on the meta device or on values of its inputs.

A walk through the nodes finds shapes and dtypes, and folds small constants (sizes, axes, a scale) into numbers. Each
node that is left is a step. An operator that is not read is an opaque step where the shapes of its results are known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sqrtdk.errors import INTERRUPTS, ModelError, UnsupportedError, kind_and_text
from sqrtdk.frontends.opaque import UnreadStep
from sqrtdk.frontends.program import FlatProgram, FlatStep, RunDtypes
from sqrtdk.graphs.graph import Graph, GraphNode, UnreadAttention
from sqrtdk.graphs.onnx_attention import ATTENTION_OPERATIONS
from sqrtdk.graphs.onnx_opaque import opaque_step, reads_of
from sqrtdk.graphs.onnx_ops import ONNX_OPERATIONS, operate
from sqrtdk.graphs.onnx_shapes import RANDOM_NODES
from sqrtdk.graphs.onnx_step import OnnxStep, torch_dtype
from sqrtdk.graphs.onnx_weights import MOST_FOLDED, GraphConstants
from sqrtdk.graphs.places import code_line, place_of
from sqrtdk.messages import Message

_NOWHERE = "?"  # path of a step whose module the exporter did not note
Tensors = dict[str, Tensor]
# Operators after which the weights of a softmax are none any more, and those that only change or move them.
_ENDS_OF_WEIGHTS = frozenset({"CumSum", "Shape", "Size", "ArgMax", "ArgMin", "TopK", "NonZero", "Greater", "Less"})
_ONLY_MOVED = frozenset({"Add", "Sub", "Mul", "Div", "Cast", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze",
                         "Slice", "Split", "Concat", "Pad", "Expand", "Where", "Gather", "GatherND", "Neg",
                         "Dropout"})  # fmt: skip


class Walk:
    """One walk through the nodes of a graph.

    Args:
        constants: The graph and its constants.
        env: Its inputs by name.
        masks: Padding masks, which are ones, on the meta device.
        sizes: Numbers chosen for free sizes.
        wanted: Names of tensors to keep.

    Attributes:
        known: Values of small constants, folded ones included.
        made: The wanted tensors, in the dtypes of the file.
        refs: References of the tensors that steps read or give, by name.
        origins: Names of the module's tensors, each with the name of the constant that it is.
        read: The nodes that are read.
        steps: The steps; nodes that are folded have none.
        nodes: The node of each step.
        missing: Attentions that are not read.
        unread: Operators that are not read, each with its place.
    """

    def __init__(
        self, constants: GraphConstants, env: Tensors, masks: Tensors, sizes: Mapping[str, int], wanted: Collection[str]
    ) -> None:
        self.source, self.graph, self.sizes = constants, constants.graph, sizes
        self.env = env | masks
        self.known = dict(constants.known)
        self.lost = dict(constants.lost)
        self.made: Tensors = {}
        self.refs: dict[str, int] = {}
        self.origins: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.read: list[GraphNode] = []
        self.steps: list[FlatStep] = []
        self.nodes: list[GraphNode] = []
        self.missing: list[UnreadAttention] = []
        self.unread: dict[str, str] = {}
        self.inputs = tuple(self.ref(name) for name in env)
        self.parameters: dict[int, str] = {}
        self.folded: dict[int, Tensor] = {}
        self.numbers = RunDtypes(device=torch.device("meta" if constants.on_meta else "cpu"))
        left = {} if constants.on_meta else _last_uses(self.graph)  # on the meta device memory costs nothing
        for node in self.graph.nodes:
            self._take(node)
            self.made |= {name: self.env[name] for name in node.outputs if name in wanted and name in self.env}
            for name in left.get(node, ()):
                self.env.pop(name, None)
        self.steps = _with_paths(self.steps)
        self.own = [value.name for value in self.graph.model.graph.output if value.name in self.refs]
        self._place_constants()
        self.env.clear()

    def ref(self, name: str) -> int:
        """Return the reference of a tensor."""
        return self.refs.setdefault(name, len(self.refs))

    def program(self, outputs: Sequence[str]) -> FlatProgram:
        """Return the program that gives these tensors."""
        every = tuple(self.refs[name] for name in outputs)
        return FlatProgram(self.inputs, self.parameters, self.folded, tuple(self.steps), every)

    def _take(self, node: GraphNode) -> None:
        """Add the step of a node, or note its outputs as lost."""
        lost = next((self.lost[name] for name in node.inputs if name in self.lost), None)
        if lost is None:
            count = len(self.steps)
            lost = self._add(node) or ""
            if not lost:
                self.read.append(node)
                if self._fold(node):
                    del self.steps[count:], self.nodes[count:]
                return
            path, (file, line) = node.scope or "", code_line(node.stack, node.number + 1)
            self.unread.setdefault(lost[:80], place_of(path, file, line))
            stands = self._add_opaque(node)
        else:
            stands = False
        inner = next((op for domain, op in node.inner if attends(domain, op)), None)
        if inner is not None:
            self._miss(node, Message("graphs.inside", name=inner, other=node.op))
        elif attends(node.domain, node.op) and may_weigh(self.graph, node):
            self._miss(node, Message("graphs.after_unread", name=node.op, what=lost))
        if not stands:
            self.lost |= dict.fromkeys(filter(None, node.outputs), lost)

    def _miss(self, node: GraphNode, reason: str) -> None:
        self.missing.append(UnreadAttention(node.site, reason))

    def _add(self, node: GraphNode) -> str | None:
        """Add the step of a node, and its outputs to `env`; return what is not read, if it is not."""
        if (node.domain, node.op) not in ONNX_OPERATIONS or node.inner:
            return f"{node.domain}::{node.op}"[:60] if node.domain else node.op[:60]
        try:
            run, given = _Operator(node, self.graph, self.known, self.source.learned), self._values(node)
            made = run.results(self.numbers, given)
            if not self._is_same(node, given, made):
                self._keep(node, [name for name in node.inputs if name], run, made)
        except (*INTERRUPTS, ModelError):
            raise
        except Exception as error:  # torch raises many types for shapes that do not fit
            return str(error) if isinstance(error, UnsupportedError) else f"{node.op}: {kind_and_text(error, 120)}"
        return None

    def _is_same(self, node: GraphNode, given: tuple[Tensor | None, ...], made: Tensors) -> bool:
        """Note that the output of a node is one of its inputs, if it is: a Cast to its own dtype, an Identity.

        An exporter lets all readers of x share one such Cast(x), as that of a norm. Without a step, a residual sum
        reads x itself, and not what a norm gives.
        """
        if len(made) != 1:
            return False
        ((output, tensor),) = made.items()
        name = next((name for name, x in zip(node.inputs, given, strict=True) if x is tensor), None)
        if name is None:
            return False
        self.refs[output], self.env[output] = self.ref(name), tensor
        return True

    def _keep(self, node: GraphNode, reads: Sequence[str], run: Any, made: Tensors) -> None:
        self.env |= made
        self.nodes.append(node)
        file, line = code_line(node.stack, node.number + 1)
        self.steps.append(FlatStep(
            node.op, partial(run, tuple(made)), tuple(map(self.ref, reads)), tuple(map(self.ref, made)),
            tuple(tensor.dtype for tensor in made.values()), _NOWHERE if node.scope is None else node.scope, file, line,
        ))  # fmt: skip

    def _add_opaque(self, node: GraphNode) -> bool:
        """Add an opaque step for a node, if its results are known."""
        reads = reads_of(self.graph, node)
        if any(name in self.lost for name in reads):
            return False
        try:
            values = {name: self._tensor(name) for name in reads}
            stands = opaque_step(self.graph, node, values, self.known, self._size)
            if stands is None:
                return False
            made = dict(zip(filter(None, node.outputs), stands(*values.values()), strict=True))
        except (*INTERRUPTS, ModelError):
            raise
        except Exception:  # onnxruntime has its own types of errors
            return False
        self._keep(node, reads, partial(_run_opaque, stands), made)
        return True

    def _size(self, symbol: str) -> int | None:
        return self.sizes.get(symbol)

    def _values(self, node: GraphNode) -> tuple[Tensor | None, ...]:
        return tuple(self._tensor(name) if name else None for name in node.inputs)

    def _tensor(self, name: str) -> Tensor:
        return self.env[name] if name in self.env else self.source.tensor(name)

    def _fold(self, node: GraphNode) -> bool:
        """Add the outputs of a node to `known` if its inputs are known, or it reads only a shape; return whether."""
        # 1 / sqrt(q.shape[-1]) may be exported as Shape, Slice, Cast, Sqrt, Div: all of it folds to one number.
        constant = node.op in ("Shape", "Size") or all(name in self.known for name in node.inputs if name)
        large = any(self.env[name].numel() > MOST_FOLDED for name in node.outputs if name in self.env)
        if not constant or large or node.op in RANDOM_NODES or (node.domain, node.op) in ATTENTION_OPERATIONS:
            return False
        given = self._values(node) if node.op in ("Shape", "Size") else tuple(map(self.known.get, node.inputs))
        try:
            run = _Operator(node, self.graph, self.known, self.source.learned, folds=True)
            self.known |= run.results(RunDtypes(), given)
        except INTERRUPTS:
            raise
        except Exception:  # the CPU may have no kernel for the dtype
            return False
        return {*filter(None, node.outputs)} <= self.known.keys()

    def _place_constants(self) -> None:
        """Make what no step gives a tensor of the module; with values, numbers and folded constants are the program's.

        The audit takes a number of a module for an attribute that the author wrote, which a graph has not.
        """
        given = {*self.inputs, *(ref for step in self.steps for ref in step.gives)}
        reads = {ref for step in self.steps for ref in step.reads} | {self.refs[name] for name in self.own}
        for name, ref in self.refs.items():
            if ref in given or ref not in reads:
                continue
            given.add(ref)  # two names of one tensor
            own = name not in self.graph.initializers or (name in self.known and self.known[name].numel() == 1)
            if own and not self.source.on_meta:
                self.folded[ref] = self.known[name]
                continue
            label = self.source.renamed.get(name, name)
            label = label if label not in self.origins else name
            self.origins[label] = name, ()
            self.parameters[ref] = label


@dataclass(frozen=True, slots=True, eq=False)
class _Operator:
    """Runs a node that is read.

    Attributes:
        node: The node.
        graph: Its graph.
        known: Values of small constants.
        learned: Names of weights.
        folds: Whether all of its inputs are constants.
    """

    node: GraphNode
    graph: Graph
    known: Mapping[str, Tensor] = field(repr=False)
    learned: set[str] = field(repr=False)
    folds: bool = False

    def __call__(self, names: Sequence[str], numbers: RunDtypes, *reads: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of these names, from the inputs that are not omitted."""
        given = iter(reads)
        made = self.results(numbers, tuple(next(given) if name else None for name in self.node.inputs))
        return tuple(made[name] for name in names)

    def results(self, numbers: RunDtypes, given: tuple[Tensor | None, ...]) -> Tensors:
        """Return the outputs by name. A run in float64 leaves out casts between floating-point dtypes, which round."""
        node, wide = self.node, numbers.wide
        if wide is not None:
            first = given[0] if given else None
            rounds = node.op == "Cast" and torch_dtype(node.attributes["to"]).is_floating_point
            if rounds and first is not None and first.is_floating_point():
                return {node.outputs[0]: first.to(wide)}
            if node.op != "Gather":  # a lookup takes a few rows, so the whole table is not widened
                given = tuple(None if x is None else numbers.cast(x, x.dtype) for x in given)
        device = str(numbers.device)
        return operate(OnnxStep(node, self.graph, given, self.known, device, self.learned, as_numbers=not self.folds))


def _run_opaque(stands: UnreadStep, names: Sequence[str], numbers: RunDtypes, *reads: Tensor) -> tuple[Tensor, ...]:
    return tuple(stands(*reads))


def _with_paths(steps: Sequence[FlatStep]) -> list[FlatStep]:
    """Return the steps with a module for those that have none: the innermost that the steps around them share.

    An optimiser that writes two Slices of q as one Split notes no module at it. It is in the middle of an attention, as
    the steps before and behind it.
    """
    behind = [""] * len(steps)
    for at in range(len(steps) - 2, -1, -1):
        behind[at] = steps[at + 1].path if steps[at + 1].path != _NOWHERE else behind[at + 1]
    made: list[FlatStep] = []
    before = ""
    for step, after in zip(steps, behind, strict=True):
        if step.path == _NOWHERE:
            step = replace(step, path=_shared_module(before.split("."), after.split(".")))
        else:
            before = step.path
        made.append(step)
    return made


def _shared_module(one: Sequence[str], other: Sequence[str]) -> str:
    """Return the innermost module around two modules; a list of layers is none.

    Example:
        >>> _shared_module(["h", "0", "attn"], ["h", "0", "mlp"]), _shared_module(["h", "0"], ["h", "1"])
        ('h.0', '')
    """
    count = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    while count and any(part.isdigit() for part in (*one[count : count + 1], *other[count : count + 1])):
        count -= 1
    return ".".join(one[:count])


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


def _last_uses(graph: Graph) -> dict[GraphNode, list[str]]:
    """Return for each node the tensors that no later node uses, which can be freed after it."""
    last = {name: node for node in graph.nodes for name in (*reads_of(graph, node), *node.outputs) if name}
    left: dict[GraphNode, list[str]] = {}
    for name, node in last.items():
        left.setdefault(node, []).append(name)
    return left
