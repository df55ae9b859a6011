"""A foreign program as a torch module: parameters by their names, regions as modules, a program for each shape."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from sqrtdk.frontends.folding import TABLE_LOOKUPS, folded_weights
from sqrtdk.frontends.program import FlatProgram, FlatStep, Region, RunDtypes, held_tensor, plan, run_regions
from sqrtdk.frontends.regions import class_of, code_between, place_modules, place_tensor, written_in

_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """The inputs of one call.

    Attributes:
        tensors: those that are tensors, in order.
        dtypes: dtypes that the program has for them.
        key: what a program is traced for: shapes, dtypes, and the inputs that are no tensors.
        spec: the front end's own note on how they nest.
    """

    tensors: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    key: Hashable
    spec: Any


@dataclass(frozen=True, slots=True, eq=False)
class TracedProgram:
    """A program for inputs of certain shapes.

    Attributes:
        program: the program.
        outputs: nests its outputs as the framework does.
        origins: of each of its parameters, the source's tensor and the indices of the layer in it.
        classes: class names of modules by path; the last name of the path for any other.
        buffers: names of parameters that are not learned.
        settings: numbers that its modules hold, by path and name, as the eps of a norm.
    """

    program: FlatProgram
    outputs: Callable[[Sequence[Any]], Any]
    origins: Mapping[str, tuple[str, tuple[int, ...]]]
    classes: Mapping[str, str] = field(default_factory=dict)
    buffers: Collection[str] = ()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Source(Protocol):
    """A program of another framework that can be traced for inputs of any shapes.

    Attributes:
        signature: Names of the inputs.
    """

    signature: inspect.Signature

    def tensor(self, name: str, indices: tuple[int, ...]) -> Tensor:
        """Return a parameter or buffer, which the module then owns.

        Args:
            name: The source's tensor.
            indices: Indices of the layer in it.
        """

    def bind(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Bound:
        """Return the inputs of a call, as tensors.

        Args:
            args: Inputs by position.
            named: Inputs by name.
        """

    def trace(self, bound: Bound, dtypes: Mapping[str, torch.dtype]) -> TracedProgram:
        """Return the program for inputs of certain shapes.

        Args:
            bound: The inputs.
            dtypes: Dtypes of parameters by name, in place of their own; {} for none.
        """


@dataclass(slots=True, eq=False)
class _Programs:
    """The programs of a module, which its copies share: tracing takes long, and a program holds no parameters."""

    source: Source
    traced: dict[Hashable, tuple[TracedProgram, Region]] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> _Programs:
        return self


class ForeignModule(nn.Module):
    """The root module of a program of another framework; its forward takes the program's inputs, as tensors or arrays.

    Its submodules and parameters have the paths of the other framework. `to(torch.float64)` makes it compute without
    the program's own rounding, and `to(torch.bfloat16)` traces the program for parameters in bfloat16.

    Attributes:
        vocabularies: Numbers of rows of the tables from which integer inputs pick rows.
        stored_types: Names of the dtypes in which a file holds the parameters, by their names; {} where that is known
            to be the parameters' own.
        rounds: Whether rounding runs that the program does beside its dtypes, as ggml rounds what enters a product.
        own_rounding: How far the framework's outputs are from those without that rounding, relative to the largest.
        config: What the program declares, with the names of a config of transformers; None for nothing.
        unread: Names of the program's weights that it doesn't read for the inputs that it was first traced for.
        example: The inputs that it was first traced for, by name, as tensors or settings.
        framework: The framework and its version, "JAX 0.10.2".
        notes: Sentences on how the framework computes, for reports.
        source_code: Code with the lines of the program's outermost function, which a comparison names.
    """

    stored_types: Mapping[str, str] = {}
    rounds: bool = True
    own_rounding: float = 0.0
    config: Any = None
    vocabularies: frozenset[int]  # numbers of rows of the tables that ids pick rows of
    unread: tuple[str, ...] = ()
    example: Mapping[str, Any] = MappingProxyType({})
    framework: str = ""
    notes: tuple[str, ...] = ()
    source_code: CodeType | None = None
    _programs: tuple[_Programs]
    _names: Mapping[str, str]  # where the module holds the program's parameters
    _dtypes: Mapping[str, tuple[torch.dtype, str]]  # of the parameters in the program, with the source's tensor

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Return the names of the program's own parameters, without the places where its functions share them."""
        return tuple(self._dtypes)

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters by name; for quantised tables and their scales what the program makes of them."""
        modules = dict(self.named_modules(remove_duplicate=False))
        (traced, _), *_ = self._programs[0].traced.values()
        inputs = self._programs[0].source.bind((), self.example).tensors if self.example else ()
        made, parts = folded_weights(traced.program, modules, inputs)
        held = {name: held_tensor(modules, name) for name in self.weight_names if name not in parts}
        return {name: weight for name, weight in held.items() if isinstance(weight, nn.Parameter)} | made

    def run(self, *args: Any, **named: Any) -> Any:
        """Return the outputs for these inputs, nested as the framework nests them.

        The program is traced anew for shapes, settings or parameter dtypes that it was not traced for before.
        """
        programs = self._programs[0]
        bound = programs.source.bind(args, named)
        modules = dict(self.named_modules(remove_duplicate=False))
        wide, narrow, device = self._kept(bound, modules)
        key = bound.key, tuple(narrow.items())
        if key not in programs.traced:
            # tracing computes with the framework's own numbers, which no mode of torch should see
            with _disable_current_modes(), torch.no_grad():
                traced = programs.source.trace(bound, narrow)
                program = _renamed(traced.program, self._names)
                programs.traced[key] = TracedProgram(program, traced.outputs, {}), plan(program, modules.keys())
        traced, block = programs.traced[key]
        numbers = RunDtypes(wide, device, self.rounds)
        inputs = [numbers.cast(x, dtype) for x, dtype in zip(bound.tensors, bound.dtypes, strict=True)]
        return traced.outputs(run_regions(traced.program, block, modules, inputs, numbers))

    def inside(self, bound: Bound, refs: Sequence[int], numbers: RunDtypes) -> list[Any]:
        """Return what a run of the first program gives at some of its references, in the dtypes of `numbers`."""
        traced, _ = self._programs[0].traced[bound.key, ()]
        program = replace(traced.program, outputs=tuple(refs))
        modules = dict(self.named_modules(remove_duplicate=False))
        inputs = [numbers.cast(x, dtype) for x, dtype in zip(bound.tensors, bound.dtypes, strict=True)]
        with torch.no_grad():
            return run_regions(program, plan(program, modules.keys()), modules, inputs, numbers)

    def traced_call(
        self, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Source, Bound, TracedProgram] | None:
        """Return the source, the inputs of a call, and its program with the origins of the parameters.

        Args:
            args: Inputs by position.
            named: Inputs by name.

        Returns:
            None if no such call has run with parameters in the program's own dtypes.
        """
        programs = self._programs[0]
        bound = programs.source.bind(args, named)
        (first, _), *_ = programs.traced.values()
        traced = programs.traced.get((bound.key, ()))
        return None if traced is None else (programs.source, bound, replace(traced[0], origins=first.origins))

    def held(self, name: str) -> str:
        """Return where the module holds a parameter of the program: path of the module and name of the tensor."""
        return self._names[name]

    def _kept(
        self, bound: Bound, modules: Mapping[str, nn.Module]
    ) -> tuple[torch.dtype | None, dict[str, torch.dtype], torch.device]:
        """Return the wider dtype of a run, narrower dtypes of parameters, and the device.

        `module.to(torch.float64)` asks for the program without its rounding, `module.to(torch.bfloat16)` for the
        program of parameters in bfloat16.
        """
        wide: torch.dtype | None = None
        narrow: dict[str, torch.dtype] = {}
        device = torch.device("cpu")
        for name, (own, leaf) in self._dtypes.items():
            held = held_tensor(modules, name)
            device = held.device
            if held.dtype is own:
                continue
            if held.dtype.itemsize > own.itemsize:
                wide = held.dtype
            else:
                narrow[leaf] = held.dtype
        if not self._dtypes:
            finer = [x.dtype for x, dtype in zip(bound.tensors, bound.dtypes, strict=True) if x.is_floating_point()
                     and x.dtype.itemsize > dtype.itemsize]  # fmt: skip
            wide = finer[0] if finer else None
            device = next((x.device for x in bound.tensors), device)
        return wide, narrow, device


def foreign_module(source: Source, bound: Bound, kind_name: str) -> tuple[ForeignModule, TracedProgram]:
    """Make a torch module of a program of another framework.

    Args:
        source: The program.
        bound: Inputs for which it is traced at once.
        kind_name: Name of the module's class.

    Returns:
        The module, in eval mode, with copies of the parameters that need no gradient; and the traced program.
    """
    with _disable_current_modes(), torch.no_grad():
        traced = source.trace(bound, {})
    program = traced.program

    def forward(self: ForeignModule, *args: Any, **named: Any) -> Any:
        return self.run(*args, **named)

    # its arguments are the program's: laws and inputs go by their names
    forward.__signature__ = source.signature.replace(  # type: ignore[attr-defined]
        parameters=[inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *source.signature.parameters.values()]
    )
    kind = class_of(kind_name, ForeignModule)
    root: Any = type(kind.__name__, (kind,), {"forward": forward})()
    homes = {name.rpartition(".")[0]: "" for name in traced.origins if "." in name}
    regions = {step.path: step.path.rpartition(".")[2] for step in program.steps if step.path}
    modules = place_modules(
        root, {**homes, **regions, **{path: traced.classes[path] for path in traced.classes if path}}
    )
    for path, settings in traced.settings.items():
        for name, value in settings.items():
            if path in modules and not hasattr(modules[path], name):
                setattr(modules[path], name, value)
    names: dict[str, str] = {}
    dtypes: dict[str, tuple[torch.dtype, str]] = {}
    with torch.no_grad():
        for name, (leaf, indices) in traced.origins.items():
            tensor = source.tensor(leaf, indices)
            learned = tensor.is_floating_point() and name not in traced.buffers
            held = nn.Parameter(tensor, requires_grad=False) if learned else tensor
            names[name] = place_tensor(modules, name, held)
            if tensor.is_floating_point():
                dtypes[names[name]] = tensor.dtype, leaf
    program = _renamed(program, names)
    traced = TracedProgram(program, traced.outputs, traced.origins)
    root._names, root._dtypes, root.vocabularies = names, dtypes, _vocabularies(program, modules)
    read = {ref for step in program.steps for ref in step.reads if type(ref) is int} | set(program.outputs)
    root.unread = tuple(name for ref, name in program.parameters.items() if ref not in read and name in dtypes)
    root._programs = (_Programs(source, {(bound.key, ()): (traced, plan(program, modules.keys()))}),)
    _share(program, modules)
    _write_lines(program, modules)
    root.eval()
    return root, traced


def _vocabularies(program: FlatProgram, modules: Mapping[str, nn.Module]) -> frozenset[int]:
    firsts = (step.reads[0] for step in program.steps if step.name in TABLE_LOOKUPS)
    names = (program.parameters[ref] for ref in firsts if isinstance(ref, int) and ref in program.parameters)
    tables = (held_tensor(modules, name) for name in names)
    return frozenset(table.shape[0] for table in tables if table.dim() == 2)


def _renamed(program: FlatProgram, names: Mapping[str, str]) -> FlatProgram:
    parameters = {ref: names[name] for ref, name in program.parameters.items()}
    return FlatProgram(program.inputs, parameters, program.constants, program.steps, program.outputs)


def _share(program: FlatProgram, modules: Mapping[str, nn.Module]) -> None:
    """Registers in each region the parameters that it reads.

    A function that is a region holds no parameters of its own, and a comparison pairs modules by the number of theirs.
    """
    for step in program.steps:
        for ref in step.reads:
            name = program.parameters.get(ref) if type(ref) is int else None
            if name is None or step.path not in modules or not step.path:
                continue
            home, _, last = name.rpartition(".")
            region, held = modules[step.path], held_tensor(modules, name)
            inside = home == step.path or home.startswith(f"{step.path}.")
            if isinstance(held, nn.Parameter) and not inside:
                if getattr(region, last, held) is not held:  # "attn_q.weight" beside "attn_k.weight"
                    last = f"{home.rpartition('.')[2]}_{last}"
                if not hasattr(region, last):
                    region.register_parameter(last, held)


def _own_line(step: FlatStep) -> tuple[str, int]:
    """Return the line of a step; of one in an installed package, the innermost line of the user's code around it."""
    if _SITE_PACKAGES not in step.file:
        return step.file, step.line
    own = [frame for frame in step.frames if _SITE_PACKAGES not in frame.file]
    return (own[-1].file, own[-1].line) if own else (step.file, step.line)


def _write_lines(program: FlatProgram, modules: Mapping[str, nn.Module]) -> None:
    """Gives each region's forward the lines of its steps, and the root the lines of the outermost function."""
    lines: dict[str, list[tuple[str, int]]] = {}
    for step in program.steps:
        if step.path in modules:
            lines.setdefault(step.path, []).append(_own_line(step))
    for path, places in lines.items():
        file = places[0][0]
        here = [line for other, line in places if other == file]
        if path:
            written_in(modules[path], file, min(here), max(here))
        else:
            modules[path].source_code = code_between(file, min(here), max(here))  # type: ignore[assignment]
