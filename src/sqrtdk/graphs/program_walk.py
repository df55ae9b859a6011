"""A program of torch.export as flat steps: torch's own operators, each with the module and the line that it came from.

Bodies of `torch.no_grad()` are written out. On the meta device, where a walk has shapes alone, an operation that needs
the values of its inputs becomes an opaque step if the exporter noted the shapes of its results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten

from sqrtdk.errors import INTERRUPTS, UnsupportedError, kind_and_text
from sqrtdk.frontends.module import Bound, TracedProgram
from sqrtdk.frontends.opaque import UnreadStep
from sqrtdk.frontends.program import FlatProgram, FlatStep, RunDtypes
from sqrtdk.graphs.graph import UnreadAttention
from sqrtdk.graphs.places import code_line, place_of
from sqrtdk.messages import Message

_ON_META = RunDtypes(device=torch.device("meta"))
_INNER = {"wrap_with_set_grad_enabled": 1}  # operators that run a graph, with the index of the graph in their arguments
Size = Callable[[Any], int | None]


@dataclass(frozen=True, slots=True)
class _Ref:
    """Stands in the arguments of an operation for a result of another one."""

    number: int


class ProgramSource:
    """A program of torch.export that is walked on values, or on the device "meta".

    Args:
        module: `program.module()`.
        names: Names of the arguments of the exported forward.
        size: On the meta device, returns the number for a size that the program leaves free, None for an unknown one.

    Attributes:
        signature: The arguments by name; those that are no tensors have the values of the export as defaults.
        tensors: Parameters, buffers and other constants by name; without values on the meta device.
        missing: Attentions that are not read.
        unread: Operations that are not read, each with its place.
    """

    def __init__(self, module: torch.fx.GraphModule, names: Sequence[str], size: Size | None = None) -> None:
        self.graph = module
        self.size = size
        codegen: Any = module.graph._codegen
        self.in_spec, self.out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        self.placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        examples = self.nested([_value(node) for node in self.placeholders])
        fixed = [not any(isinstance(leaf, Tensor) for leaf in tree_flatten(example)[0]) for example in examples]
        # from the first argument on behind which no tensor comes, arguments may be left out
        first = max((at + 1 for at, is_fixed in enumerate(fixed) if not is_fixed), default=0)
        self.signature = inspect.Signature([
            inspect.Parameter(name, kind, default=none if at < first else example)
            for at, (name, example) in enumerate(zip(names, examples, strict=True))
        ])  # fmt: skip
        self.held = {**dict(module.named_parameters()), **dict(module.named_buffers()), **_constants(module)}
        self.tensors: Mapping[str, Tensor] = self.held
        if size is not None:
            self.tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in self.held.items()}
        self.missing: list[UnreadAttention] = []
        self.unread: dict[str, str] = {}

    def tensor(self, name: str, indices: tuple[int, ...]) -> Tensor:
        """Return a parameter, buffer or other constant; see `Source.tensor`."""
        return self.tensors[name]

    def nested(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of the exported forward, in order, from the inputs of its graph."""
        args, kwargs = tree_unflatten(list(leaves), self.in_spec)
        return (*args, *kwargs.values())

    def bind(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Bound:
        """Return the inputs of a call, in the order of the graph's.

        Args:
            args: Arguments of the exported forward by position.
            named: Arguments by name.

        Raises:
            TypeError: They do not fit the signature, or nest otherwise than those of the export.
        """
        arguments = self.signature.bind(*args, **named)
        arguments.apply_defaults()
        given = [*arguments.arguments.values()]
        positional, keywords = self.in_spec.child(0), self.in_spec.child(1)
        count = positional.num_children
        nested = tuple(given[:count]), dict(zip(keywords.context, given[count:], strict=True))
        leaves, spec = tree_flatten(nested)
        if spec != self.in_spec:
            raise TypeError("the inputs nest otherwise than those of the export")
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        settings = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        key = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        pairs = zip(self.placeholders, leaves, strict=True)
        dtypes = tuple(_value(node).dtype for node, leaf in pairs if isinstance(leaf, Tensor))
        return Bound(tensors, dtypes, key, (tensors, settings))

    def trace(self, bound: Bound, dtypes: Mapping[str, torch.dtype]) -> TracedProgram:
        """Return the program, whose steps are the same for all inputs but those that are no tensors.

        Args:
            bound: The inputs.
            dtypes: Not used: a program names the dtypes of its conversions itself.
        """
        tensors, settings = bound.spec
        walk = _Walk(self, dict(zip(range(len(tensors)), tensors, strict=True)) if self.size is not None else None)
        refs = iter(range(len(tensors)))
        for node, setting in zip(self.placeholders, settings, strict=True):
            walk.placed[node] = _Ref(next(refs)) if isinstance(_value(node), Tensor) else setting
        walk.count = len(tensors)
        results = walk.take(self.graph, [])
        outputs, _ = tree_flatten(results)
        reads = [leaf.number for leaf in outputs if type(leaf) is _Ref and leaf.number not in walk.lost]
        kept = dict.fromkeys(reads)

        def nest(values: Sequence[Any]) -> Any:
            by_ref = dict(zip(kept, values, strict=True))
            filled = [by_ref.get(leaf.number) if type(leaf) is _Ref else leaf for leaf in outputs]
            return tree_unflatten(filled, self.out_spec)

        program = FlatProgram(tuple(range(len(tensors))), walk.parameters, {}, tuple(walk.steps), tuple(kept))
        buffers = {name for name, tensor in self.held.items() if not isinstance(tensor, torch.nn.Parameter)}
        origins = {name: (name, ()) for name in self.tensors}
        return TracedProgram(program, nest, origins, walk.classes, buffers)


class _Walk:
    """Writes the nodes of a graph, and of the graphs inside it, as flat steps.

    Attributes:
        placed: What stands for the result of each node: a reference, a list of them, or a value.
        steps: The steps so far.
        parameters: Names of parameters by reference.
        classes: Class names of modules by path.
        lost: References that no step gives, each with the name of what is not read.
        count: Number of references so far.
    """

    def __init__(self, source: ProgramSource, known: dict[int, Any] | None) -> None:
        self.source = source
        self.known = known  # on the meta device, tensors by reference
        self.placed: dict[Node, Any] = {}
        self.steps: list[FlatStep] = []
        self.parameters: dict[int, str] = {}
        self.classes: dict[str, str] = {}
        self.lost: dict[int, str] = {}
        self.count = 0
        self.nodes = 0

    def take(self, module: torch.fx.GraphModule, operands: Sequence[Any]) -> Any:
        """Write the nodes of a graph, whose inputs are `operands` unless they are placed; return what it returns."""
        given = iter(operands)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                if node not in self.placed:
                    self.placed[node] = next(given)
            elif node.op == "get_attr":
                self.placed[node] = self._attribute(module, str(node.target))
            elif node.op == "output":
                return map_arg(node.args[0], self.placed.__getitem__)
            elif node.op == "call_function":
                self._call(node)
            elif node.target != "_guards_fn":  # it checks the sizes that the program was exported for
                raise UnsupportedError(f"the operation {node.name[:60]!r} of the program")
        return None

    def _attribute(self, module: torch.fx.GraphModule, name: str) -> Any:
        if name not in self.source.tensors:
            value: Any = module
            for part in name.split("."):
                value = getattr(value, part)
            return value
        ref = next((ref for ref, other in self.parameters.items() if other == name), None)
        if ref is None:
            (ref,) = self._refs(1)
            self.parameters[ref] = name
            if self.known is not None:
                self.known[ref] = self.source.tensors[name]
        return _Ref(ref)

    def _refs(self, count: int) -> tuple[int, ...]:
        self.count += count
        return tuple(range(self.count - count, self.count))

    def _call(self, node: Node) -> None:
        self.nodes += 1
        args: Any
        args, kwargs = map_arg((node.args, node.kwargs), self.placed.__getitem__)
        target: Any = node.target
        if target is getitem and isinstance(args[0], list | tuple):
            self.placed[node] = args[0][args[1]]
            return
        if _is_idle(node):
            self.placed[node] = args[0]
            return
        inner = _INNER.get(getattr(target, "__name__", ""))
        if inner is not None:
            self.placed[node] = self.take(args[inner], args[inner + 1 :])
            return
        leaves, spec = tree_flatten((args, kwargs))
        reads = tuple(leaf.number for leaf in leaves if type(leaf) is _Ref)
        value = _value(node)
        several = isinstance(value, list | tuple)
        gives = self._refs(len(value) if several else 1)
        self.placed[node] = [_Ref(ref) for ref in gives] if several else _Ref(gives[0])
        stack = scope_of(node)
        self.classes |= dict(stack)
        path = stack[-1][0] if stack else ""
        file, line = code_line(str(node.meta.get("stack_trace") or ""), self.nodes)
        kinds = tuple(getattr(item, "dtype", None) for item in (value if several else (value,)))
        name = str(getattr(getattr(target, "_schema", None), "name", node.name)).rpartition("::")[2]
        step = FlatStep(name, partial(_run, target, leaves, spec), reads, gives, kinds, path, file, line)
        read = step if self.known is None else self._sized(step, node, value)
        if read is not None:
            self.steps.append(read)

    def _sized(self, step: FlatStep, node: Node, value: Any) -> FlatStep | None:
        """Return the step, or an opaque one in its place; None if the shapes of its results are not known."""
        known: Any = self.known
        lost = next((self.lost[ref] for ref in step.reads if ref in self.lost), "")
        made: Any = None
        if not lost:
            try:
                made = step.run(_ON_META, *(known[ref] for ref in step.reads))
            except INTERRUPTS:
                raise
            except Exception as error:  # torch raises many types for an operation without values
                lost = step.name
                place = place_of(step.path, step.file, step.line)
                self.source.unread.setdefault(f"{step.name}: {kind_and_text(error, 120)}", place)
        if lost:
            step, made = self._opaque(step, node, value, lost)
        if made is not None:
            known.update(zip(step.gives, made if isinstance(made, list | tuple) else (made,), strict=True))
            return step
        self.lost |= dict.fromkeys(step.gives, lost)
        if "softmax" in step.name or "attention" in step.name:
            reason = Message("graphs.after_unread", name=step.name, what=lost)
            self.source.missing.append(UnreadAttention(step.path, reason))
        return None

    def _opaque(self, step: FlatStep, node: Node, value: Any, name: str) -> tuple[FlatStep, Any]:
        """Return an opaque step for an operation, and its results; None if their shapes are not known.

        Args:
            step: The step.
            node: Its node.
            value: What the exporter noted of its results.
            name: Name of what is not read: the operation, or the one that gives what it reads.
        """
        size: Any = self.source.size
        values = value if isinstance(value, list | tuple) else [value]
        shapes = [[size(n) for n in item.shape] for item in values if isinstance(item, Tensor)]
        attends = "softmax" in step.name or "attention" in step.name
        if attends or len(shapes) < len(values) or any(None in shape for shape in shapes):
            return step, None
        results = [(shape, item.dtype) for shape, item in zip(shapes, values, strict=True)]
        stands = UnreadStep("exported", name, results)
        reads = tuple(ref for ref in step.reads if ref not in self.lost)
        step = replace(step, name=name, reads=reads, run=partial(_run_opaque, stands))
        return step, step.run(_ON_META, *(self.known[ref] for ref in reads))  # type: ignore[index]


def _run(target: Callable[..., Any], leaves: Sequence[Any], spec: Any, numbers: RunDtypes, *reads: Any) -> Any:
    """Run an operation on what it reads; dtypes and devices among its arguments become those of the run."""
    given, filled = iter(reads), []
    for leaf in leaves:
        if type(leaf) is _Ref:
            leaf = next(given)
        elif isinstance(leaf, torch.dtype):
            leaf = numbers.dtype(leaf)
        elif isinstance(leaf, torch.device):
            leaf = numbers.device
        filled.append(leaf)
    args, kwargs = tree_unflatten(filled, spec)
    return target(*args, **kwargs)


def _run_opaque(stands: UnreadStep, numbers: RunDtypes, *reads: Any) -> list[Tensor]:
    return stands(*(item for item in reads if isinstance(item, Tensor)))


def _is_idle(node: Node) -> bool:
    """Return whether an operation is a conversion to the dtype that its input has: `x.to(torch.float32)` in a norm.

    Without a step, what reads the result elsewhere, as a residual sum may, reads x itself, and not what a norm gives.
    """
    if node.target is not torch.ops.aten.to.dtype or len(node.args) > 2 or node.kwargs:
        return False
    before, after = (_value(one) if isinstance(one, Node) else None for one in (node.args[0], node))
    return isinstance(before, Tensor) and isinstance(after, Tensor) and before.dtype is after.dtype


def _value(node: Node) -> Any:
    """Return what the exporter noted of a result: a tensor without values, a size, or a list of them."""
    return node.meta.get("val")


def _constants(module: torch.fx.GraphModule) -> dict[str, Tensor]:
    """Return the tensors that the graph reads as attributes of the module, by name."""
    found = {}
    for name in {str(node.target): None for node in module.graph.nodes if node.op == "get_attr"}:
        value: Any = module
        for part in name.split("."):
            value = getattr(value, part, None)
        if isinstance(value, Tensor):
            found[name] = value
    return found


def scope_of(node: Node) -> list[tuple[str, str]]:
    """Return paths and class names of the modules around an operation, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    found = []
    for entry in stack.values() if isinstance(stack, dict) else ():
        path, kind = entry[0], entry[1] if len(entry) > 1 else ""
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        # "L['self'].layers.0.attn@1" is the second call of the module "layers.0.attn".
        found.append((str(path).removeprefix("L['self']").lstrip(".").partition("@")[0], str(name)))
    return found
