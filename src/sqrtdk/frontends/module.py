"""A foreign program as a torch module: parameters by their names, regions as modules, a program for each shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from sqrtdk.frontends.program import FlatProgram, Region, RunDtypes, held_tensor, plan, run_regions
from sqrtdk.frontends.regions import class_of, place_modules, place_tensor, written_in

_TABLE_LOOKUPS = ("gather", "Gather", "embedding")  # operations that pick rows of a table


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
    """

    program: FlatProgram
    outputs: Callable[[Sequence[Any]], Any]
    origins: Mapping[str, tuple[str, tuple[int, ...]]]


class Source(Protocol):
    """A program of another framework that can be traced for inputs of any shapes.

    Attributes:
        signature: Names of the inputs.
        tensors: Parameters and buffers by name.
    """

    signature: inspect.Signature
    tensors: Mapping[str, Tensor]  # parameters and buffers by name

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
    """

    vocabularies: frozenset[int]  # numbers of rows of the tables that ids pick rows of
    _programs: tuple[_Programs]
    _names: Mapping[str, str]  # where the module holds the program's parameters
    _dtypes: Mapping[str, tuple[torch.dtype, str]]  # of the parameters in the program, with the source's tensor

    def run(self, *args: Any, **named: Any) -> Any:
        """Return the outputs for these inputs, nested as the framework nests them.

        The program is traced anew for shapes, settings or parameter dtypes that it was not traced for before.
        """
        programs = self._programs[0]
        bound = programs.source.bind(args, named)
        wide, narrow, device = self._kept(bound)
        key = bound.key, tuple(narrow.items())
        modules = dict(self.named_modules(remove_duplicate=False))
        if key not in programs.traced:
            # tracing computes with the framework's own numbers, which no mode of torch should see
            with _disable_current_modes(), torch.no_grad():
                traced = programs.source.trace(bound, narrow)
                program = _renamed(traced.program, self._names)
                programs.traced[key] = TracedProgram(program, traced.outputs, {}), plan(program, modules.keys())
        traced, block = programs.traced[key]
        numbers = RunDtypes(wide, device)
        inputs = [numbers.cast(x, dtype) for x, dtype in zip(bound.tensors, bound.dtypes, strict=True)]
        return traced.outputs(run_regions(traced.program, block, modules, inputs, numbers))

    def _kept(self, bound: Bound) -> tuple[torch.dtype | None, dict[str, torch.dtype], torch.device]:
        """Return the wider dtype of a run, narrower dtypes of parameters, and the device.

        `module.to(torch.float64)` asks for the program without its rounding, `module.to(torch.bfloat16)` for the
        program of parameters in bfloat16.
        """
        wide: torch.dtype | None = None
        narrow: dict[str, torch.dtype] = {}
        device = torch.device("cpu")
        for name, (own, leaf) in self._dtypes.items():
            held = self.get_parameter(name)
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
    modules = place_modules(root, homes | regions)
    names: dict[str, str] = {}
    dtypes: dict[str, tuple[torch.dtype, str]] = {}
    with torch.no_grad():
        for name, (leaf, indices) in traced.origins.items():
            tensor = source.tensors[leaf][indices].clone()
            held = nn.Parameter(tensor, requires_grad=False) if tensor.is_floating_point() else tensor
            names[name] = place_tensor(modules, name, held)
            if tensor.is_floating_point():
                dtypes[names[name]] = tensor.dtype, leaf
    program = _renamed(program, names)
    traced = TracedProgram(program, traced.outputs, traced.origins)
    root._names, root._dtypes, root.vocabularies = names, dtypes, _vocabularies(program, modules)
    root._programs = (_Programs(source, {(bound.key, ()): (traced, plan(program, modules.keys()))}),)
    _share(program, modules)
    _write_lines(program, modules)
    root.eval()
    return root, traced


def _vocabularies(program: FlatProgram, modules: Mapping[str, nn.Module]) -> frozenset[int]:
    firsts = (step.reads[0] for step in program.steps if step.name in _TABLE_LOOKUPS)
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
            if isinstance(held, nn.Parameter) and not inside and not hasattr(region, last):
                region.register_parameter(last, held)


def _write_lines(program: FlatProgram, modules: Mapping[str, nn.Module]) -> None:
    """Gives each region's forward the lines of its steps."""
    lines: dict[str, list[tuple[str, int]]] = {}
    for step in program.steps:
        if step.path in modules and step.path:
            lines.setdefault(step.path, []).append((step.file, step.line))
    for path, places in lines.items():
        file = places[0][0]
        here = [line for other, line in places if other == file]
        written_in(modules[path], file, min(here), max(here))
