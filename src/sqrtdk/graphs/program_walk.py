"""A program of torch.export, read without running it: its operations on tensors that have shapes and no values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import INTERRUPTS, ModelError, kind_and_text
from sqrtdk.graphs.guards import Bounds, meet, read_guards
from sqrtdk.graphs.places import GraphRoot, class_of, is_finite, place_in_code, place_modules, place_tensor, weight
from sqrtdk.graphs.program import guards_of, load_program
from sqrtdk.graphs.records import Walked
from sqrtdk.graphs.symbols import MASK, number_for, refuse_many, shown_sizes
from sqrtdk.models.records import LoadedModel
from sqrtdk.tracing.watch.constants import LARGEST

MOST_LEARNED = 2**12  # elements of a parameter whose values are looked at: gains, temperatures


def walk_program(
    path: str | os.PathLike[str], config: Any = None, *, trust_remote_code: bool = False, larger: bool = False
) -> Walked:
    """A program as a model whose forward walks it on the meta device.

    Args:
        path: of the file.
        config: what is declared; None where nothing is.
        trust_remote_code: load it also where that could run code of its author.
        larger: give what the program leaves free other sizes than otherwise.

    Raises:
        ModelError: the file can't be read, could run code, or is of another version of torch; it has too many
            operations.
    """
    program, module = load_program(path, trust_remote_code=trust_remote_code)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    refuse_many(len(nodes))
    inputs, sizes = _inputs(program, module, larger)
    notes: tuple[str, ...] = (shown_sizes(sizes),) if sizes else ()
    unread = read_guards(guards_of(program)).unread
    if unread:
        what = "1 condition" if unread == 1 else f"{unread} conditions"
        notes += (f"{what} on sizes could not be read, so the program may refuse the sizes used here",)
    scopes = {node: _scope(node) for node in nodes}
    classes = {place: kind for stack in scopes.values() for place, kind in stack}
    root_kind = classes.get("", "")
    walker = _Walker(module, {node: stack[-1][0] if stack else "" for node, stack in scopes.items()})
    root = class_of(root_kind, GraphRoot)(walker.walk, config)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers()), **_constants(module)}
    holders = {name.rpartition(".")[0]: "" for name in tensors if name.rpartition(".")[0]}
    modules = place_modules(root, holders | classes)
    values: dict[str, Tensor] = {}
    sick = []
    for name, tensor in tensors.items():
        learned = isinstance(tensor, nn.Parameter)
        sick += [name] if learned and not is_finite(tensor) else []
        twin = weight(tuple(tensor.shape), tensor.dtype) if learned else torch.empty_like(tensor, device="meta")
        placed = place_tensor(modules, name, twin)
        walker.tensors[name] = twin
        if tensor.numel() <= (MOST_LEARNED if learned else LARGEST) and tensor.layout is torch.strided:
            values[placed] = tensor.detach()
    for name, tensor in inputs.items():
        if _is_mask(name, tensor):
            mask = torch.empty_like(tensor, device="meta")
            values[place_tensor(modules, name, mask)] = torch.ones_like(tensor, device="cpu")
            inputs[name] = mask
            notes += (f"the input {name} is taken as ones: no padding",)
    walker.modules = modules
    loaded = LoadedModel(root, tuple(inputs.values()), str(path), "exported", config, notes=notes, masks=values)
    return Walked(loaded, sizes=sizes, sick=tuple(sick))


def _is_mask(name: str, tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and MASK.search(name) is not None and tensor.dim() == 2


class _Walker(torch.fx.Interpreter):
    """Every operation on the meta device, inside the module at which it was noted."""

    def __init__(self, module: torch.fx.GraphModule, scopes: Mapping[torch.fx.Node, str]) -> None:
        super().__init__(module)
        self.tensors: dict[str, Tensor] = {}
        self.modules: dict[str, nn.Module] = {}
        self._scopes = scopes
        self._count = 0

    def walk(self, *inputs: Any) -> Any:
        """Walk the program; what it gives."""
        return self.run(*inputs, enable_io_processing=False)

    def run_node(self, n: torch.fx.Node) -> Any:
        """One operation."""
        if n.op == "get_attr" and n.target in self.tensors:
            return self.tensors[str(n.target)]
        if n.op == "call_module" and n.target == "_guards_fn":  # sizes that it was exported for
            return None
        if n.op != "call_function":
            return super().run_node(n)
        place = self.modules.get(self._scopes.get(n, ""), self.modules[""])
        run = partial(place_in_code(str(n.meta.get("stack_trace") or ""), self._number()), self._call, n)
        return run() if place is self.modules[""] else place(run)

    def _number(self) -> int:
        self._count += 1
        return self._count

    def _call(self, n: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if _cleans(n):  # zeros for the weights of a row that sees no key
            return args[2]
        try:
            return n.target(*_on_meta(args), **_on_meta(kwargs))  # type: ignore[operator]
        except (*INTERRUPTS, ModelError):
            raise
        except Exception as error:
            raise ModelError(
                f"the operation {n.name[:60]!r} of the program, {str(n.target)[:60]}, can't be read without its "
                f"values: {kind_and_text(error, 200)}",
                hint="Export it for fixed sizes, or check the model itself.",
            ) from error


def _cleans(n: torch.fx.Node) -> bool:
    """Whether it is the choice at the end of a softmax that is written out: zeros where a row has nothing to see."""
    if n.target is not torch.ops.aten.where.self:
        return False
    args: Any = n.args
    condition, zeros, weights = args
    aten = torch.ops.aten
    return (
        _calls(condition, aten.logical_not.default)
        and _calls(condition.args[0], aten.any.dim)
        and _calls(zeros, aten.full_like.default, aten.zeros_like.default)
        and zeros.args[0] is weights
        and not any(zeros.args[1:2])
        and _calls(weights, aten._softmax.default, aten.softmax.int)
    )


def _calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.target in targets


def _on_meta(value: Any) -> Any:
    """Arguments with the meta device in the place of any other."""
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, tuple | list):
        return type(value)(map(_on_meta, value))
    return {name: _on_meta(item) for name, item in value.items()} if isinstance(value, dict) else value


def _constants(module: torch.fx.GraphModule) -> dict[str, Tensor]:
    """Tensors that are attributes of the module, and neither parameters nor buffers."""
    names = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    found = {}
    for name in names:
        value: Any = module
        for part in name.split("."):
            value = getattr(value, part, None)
        if isinstance(value, Tensor):
            found[name] = value
    return found


def _scope(node: torch.fx.Node) -> list[tuple[str, str]]:
    """Paths and class names of the modules around an operation, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    found = []
    for entry in stack.values() if isinstance(stack, dict) else ():
        path, kind = entry[0], entry[1] if len(entry) > 1 else ""
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        found.append((str(path).removeprefix("L['self']").lstrip(".").partition("@")[0], str(name)))
    return found


def _inputs(program: Any, module: torch.fx.GraphModule, larger: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """What the program takes, without values, and numbers for the sizes that it leaves free."""
    values = {str(n.target): n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"}
    sizes: dict[str, int] = {}
    bounds = {str(symbol): _bounds(edges) for symbol, edges in program.range_constraints.items()}
    for value in values.values():
        for axis, size in enumerate(value.shape) if isinstance(value, Tensor) else ((1, value),):
            if not isinstance(size, int) and isinstance(size, torch.SymInt):
                _name_sizes(size, sizes, bounds, axis, larger)
    guards = read_guards(guards_of(program))
    if sizes and guards.read:
        sizes = meet(guards, sizes, lambda numbers: _shapes(values, numbers), bounds)
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            shape = [_number(size, sizes) for size in value.shape]
            found[name] = torch.empty(shape, dtype=value.dtype, device="meta")
        else:
            found[name] = _number(value, sizes) if isinstance(value, torch.SymInt) else value
    return found, sizes


def _shapes(values: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return {name: tuple(_number(size, sizes) for size in value.shape) for name, value in tensors.items()}


def _name_sizes(size: Any, sizes: dict[str, int], bounds: Mapping[str, Bounds], axis: int, larger: bool) -> None:
    """Give each symbol of a size a number."""
    for symbol in size.node.expr.free_symbols:
        if str(symbol) not in sizes:
            sizes[str(symbol)] = _allowed(bounds.get(str(symbol), (None, None)), number_for(axis, sizes, larger))


def _number(size: Any, sizes: Mapping[str, int]) -> int:
    """A size as a number: its own, or what its symbols make."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression.is_Symbol:
        return sizes[str(expression)]
    return int(expression.subs({symbol: sizes[str(symbol)] for symbol in expression.free_symbols}))


def _allowed(bounds: Bounds, wanted: int) -> int:
    """The number, or the nearest that the program takes."""
    low, high = bounds
    least = wanted if low is None else max(wanted, low)
    return least if high is None else min(least, high)


def _bounds(edges: Any) -> Bounds:
    """The least and the largest number of a symbol, as `range_constraints` has them."""
    return _finite(edges.lower), _finite(edges.upper)


def _finite(edge: Any) -> int | None:
    return int(edge) if getattr(edge, "is_Integer", False) and abs(edge) < 2**31 else None
