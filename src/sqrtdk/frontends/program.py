"""A foreign program as a flat list of torch operations, run as nested calls of modules.

A front end writes each operation of its framework as a `FlatStep`: what it reads and gives, the module path and the
line that it came from. `plan` groups neighbouring steps by module, and a run calls the modules as a torch forward does:

    steps    embed | layers.0: norm | layers.0.attn: q, k, softmax, out | layers.0: add | layers.1: ...
    regions  embed, layers.0(norm, attn(q, k, softmax, out), add), layers.1(...)

A trace, a comparison and the laws then see a torch module. A run in a wider dtype than the program's own widens every
dtype that the program names, conversions included: it is the program without the rounding of its dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.frontends.regions import at_line

_COMPLEX_OF = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@dataclass(frozen=True, slots=True)
class RunDtypes:
    """The dtypes and the device of a run.

    Attributes:
        wide: floating-point dtype that replaces narrower ones; None for the program's own dtypes.
        device: where new tensors are made.
        rounds: whether rounding runs that a program does beside its dtypes, as ggml rounds what enters a product.
    """

    wide: torch.dtype | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    rounds: bool = True

    def dtype(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype of a run in which the program names `own`.

        Example:
            >>> wide = RunDtypes(torch.float64)
            >>> wide.dtype(torch.bfloat16), wide.dtype(torch.complex64), wide.dtype(torch.int32)
            (torch.float64, torch.complex128, torch.int32)
        """
        if self.wide is None:
            return own
        if own.is_complex:
            return max(own, _COMPLEX_OF.get(self.wide, own), key=lambda dtype: dtype.itemsize)
        return self.wide if own.is_floating_point and own.itemsize < self.wide.itemsize else own

    def cast(self, tensor: Tensor, own: torch.dtype) -> Tensor:
        """Return a tensor in the dtype of the run for `own`, the dtype that the program names; see `dtype`."""
        dtype = self.dtype(own)
        return tensor if tensor.dtype is dtype else tensor.to(dtype)


@dataclass(frozen=True, slots=True)
class Literal:
    """A number that an operation reads in place of a tensor, as 0.25 in `0.25 * x`.

    Attributes:
        value: The number.
    """

    value: int | float | complex | bool


Read = int | Literal  # a reference to a tensor, or a number


@dataclass(frozen=True, slots=True, eq=False)
class FlatStep:
    """One operation.

    Attributes:
        name: its name in the framework.
        run: called with the numbers of the run and what is read; returns a tensor, or one for each reference given.
        reads: what it reads, in order.
        gives: references of its results.
        dtypes: dtypes of its results in the program; None for those of what it reads.
        path: module that it belongs to; "" for the root.
        file: source file that it came from.
        line: line of it.
        frames: where it was called from, outermost first; for a front end that finds modules by functions.
    """

    name: str
    run: Callable[..., Any]
    reads: tuple[Read, ...]
    gives: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...]
    path: str
    file: str
    line: int
    frames: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class FlatProgram:
    """Steps in an order in which they can run.

    Attributes:
        inputs: references of the inputs, in order.
        parameters: names of the parameters and buffers by reference.
        constants: other tensors by reference.
        steps: the operations.
        outputs: what the program returns.
    """

    inputs: tuple[int, ...]
    parameters: Mapping[int, str]
    constants: Mapping[int, Tensor]
    steps: tuple[FlatStep, ...]
    outputs: tuple[Read, ...]

    def inline(self, numbers: RunDtypes, *inputs: Tensor) -> list[Any]:
        """Run all steps outside of any module, as for the body of a loop or a branch, and return the outputs.

        Args:
            numbers: Dtypes and device of the run.
            inputs: Values of `self.inputs`, in order.
        """
        known = dict(zip(self.inputs, inputs, strict=True)) | fixed_tensors(self.constants, numbers)
        _run_items(self.steps, known, {}, numbers, {})
        return [_read(known, {}, read) for read in self.outputs]


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Neighbouring steps of one module, and of modules inside it.

    Attributes:
        path: the module.
        items: steps and blocks in order.
        takes: references made outside that it reads, without parameters and constants.
        gives: references made inside that are read outside.
        frees: after each item, references that nobody reads any more.
        file: source file of the line that calls the module.
        line: that line.
    """

    path: str
    items: tuple[FlatStep | Region, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    frees: tuple[tuple[int, ...], ...]
    file: str = ""
    line: int = 0


def plan(program: FlatProgram, modules: AbstractSet[str]) -> Region:
    """Return the steps of a program, in their order, grouped into one region for each run of steps inside a module.

    A step whose module does not exist goes to the nearest module above it.

    Args:
        program: The program.
        modules: Paths of the modules that exist.

    Returns:
        The region of the root, which holds all others.
    """
    steps, fixed = program.steps, program.parameters.keys() | program.constants.keys()
    made_at = dict.fromkeys(program.inputs, -1)
    last_read: dict[int, int] = {}
    for at, step in enumerate(steps):
        made_at |= dict.fromkeys(step.gives, at)
        last_read |= dict.fromkeys(_references(step.reads), at)
    last_read |= dict.fromkeys(_references(program.outputs), len(steps))

    def block(path: str, first: int, end: int) -> Region:
        items: list[FlatStep | Region] = []
        frees: list[tuple[int, ...]] = []
        at = first
        while at < end:
            begin, inner = at, _child(path, steps[at].path, modules)
            at += 1
            if inner is None:
                items.append(steps[begin])
            else:
                while at < end and _child(path, steps[at].path, modules) == inner:
                    at += 1
                items.append(block(inner, begin, at))
            read = {r for step in steps[begin:at] for r in _references(step.reads)}
            given = {r for step in steps[begin:at] for r in step.gives}
            over = {r for r in read | given if last_read.get(r, -1) < at and r not in fixed}
            frees.append(tuple(r for r in over if inner is None or r not in given))
        reads = dict.fromkeys(r for step in steps[first:end] for r in _references(step.reads))
        takes = tuple(r for r in reads if r not in fixed and made_at[r] < first)
        gives = tuple(r for step in steps[first:end] for r in step.gives if last_read.get(r, -1) >= end)
        file, line = _call_line(path, steps[first]) if path else ("", 0)
        return Region(path, tuple(items), takes, gives, tuple(frees), file, line)

    return block("", 0, len(steps))


def _call_line(path: str, step: FlatStep) -> tuple[str, int]:
    """Return the line that calls a block: of the frame outside its first step, if that is known."""
    frame = step.frames[-2] if len(step.frames) > 1 and step.path == path else None
    return (step.file, step.line) if frame is None else (frame.file, frame.line)


def _child(path: str, here: str, modules: AbstractSet[str]) -> str | None:
    """Return the module right below `path` that `here` is in, or None.

    A container of layers is no module that runs: `layers.0` is right below the root.
    """
    if here == path or (path and not here.startswith(f"{path}.")):
        return None
    parts = here.split(".")
    for depth in range(path.count(".") + 2 if path else 1, len(parts) + 1):
        child = ".".join(parts[:depth])
        if child in modules and (depth == len(parts) or not parts[depth].isdigit()):
            return child
    return None


def _references(reads: Iterable[Read]) -> list[int]:
    return [read for read in reads if type(read) is int]


def run_regions(
    program: FlatProgram, block: Region, modules: Mapping[str, nn.Module], inputs: Sequence[Tensor], numbers: RunDtypes
) -> list[Any]:
    """Run a program inside the modules of a root, so that each step runs within the forward of its module.

    Args:
        program: The program.
        block: Its result of `plan`.
        modules: The modules by path, from which the parameters are read.
        inputs: Inputs in the order of `program.inputs`.
        numbers: Dtypes and device of the run.

    Returns:
        The outputs, in the order of `program.outputs`.
    """
    held = {ref: held_tensor(modules, name) for ref, name in program.parameters.items()}
    fixed = held | fixed_tensors(program.constants, numbers)
    known = dict(zip(program.inputs, inputs, strict=True))
    _run_items(block.items, known, fixed, numbers, modules, block.frees)
    return [_read(known, fixed, read) for read in program.outputs]


def fixed_tensors(constants: Mapping[int, Tensor], numbers: RunDtypes) -> dict[int, Tensor]:
    """Return the constants of a program by reference, in the dtypes and on the device of a run."""
    return {ref: numbers.cast(value, value.dtype).to(numbers.device) for ref, value in constants.items()}


def held_tensor(modules: Mapping[str, nn.Module], name: str) -> Any:
    """Return a parameter or buffer.

    Args:
        modules: Modules by path, with the root at "".
        name: Path of the module and name of the tensor, as "layers.0.weight".
    """
    path, _, last = name.rpartition(".")
    return getattr(modules[path], last)


def _read(known: Mapping[int, Tensor], fixed: Mapping[int, Tensor], read: Read) -> Any:
    if type(read) is Literal:
        return read.value
    return known[read] if read in known else fixed[read]  # type: ignore[index]


def _run_items(
    items: Sequence[FlatStep | Region],
    known: dict[int, Tensor],
    fixed: Mapping[int, Tensor],
    numbers: RunDtypes,
    modules: Mapping[str, nn.Module],
    frees: Sequence[tuple[int, ...]] = (),
) -> None:
    for at, item in enumerate(items):
        if type(item) is Region:
            inside = partial(_inside, item, fixed, numbers, modules)
            call: Any = at_line(item.file, item.line)
            made = call(modules[item.path], inside, *(_read(known, fixed, ref) for ref in item.takes))
            results = made if isinstance(made, tuple) else (made,)
            known.update(zip(item.gives, results, strict=True))
        else:
            step: Any = item
            call = at_line(step.file, step.line)
            made = call(step.run, numbers, *(_read(known, fixed, read) for read in step.reads))
            results = tuple(made) if isinstance(made, tuple | list) else (made,)
            for ref, dtype, result in zip(step.gives, step.dtypes, results, strict=True):
                known[ref] = result if dtype is None else numbers.cast(result, dtype)
        for ref in frees[at] if frees else ():
            known.pop(ref, None)


def _inside(
    block: Region, fixed: Mapping[int, Tensor], numbers: RunDtypes, modules: Mapping[str, nn.Module], *takes: Tensor
) -> Any:
    known = dict(zip(block.takes, takes, strict=True))
    _run_items(block.items, known, fixed, numbers, modules, block.frees)
    results = tuple(known[ref] for ref in block.gives)
    return results[0] if len(results) == 1 else results
