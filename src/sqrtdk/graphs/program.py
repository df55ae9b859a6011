"""Opens a torch.export program as a model that can be traced: run like any other, or walked on the meta device.

A program that runs does not call its modules. The site of an attention then follows from the names of the weights that
project its q and k. In a walk, each operation runs inside the module that the exporter noted for it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import INTERRUPTS, ModelError, kind_and_text
from sqrtdk.frontends.module import foreign_module
from sqrtdk.frontends.regions import place_tensor
from sqrtdk.graphs.counts import count_of_program
from sqrtdk.graphs.graph import refuse_many
from sqrtdk.graphs.guards import Bounds, Guards, read_guards, sizes_meeting
from sqrtdk.graphs.inputs import PADDING_MASK_NAME, inputs_by_name, number_for, shown_sizes
from sqrtdk.graphs.places import GraphModel, is_looked_at, note_on_unread
from sqrtdk.graphs.program_file import refuse_code
from sqrtdk.graphs.program_walk import ProgramSource, scope_of
from sqrtdk.messages import Message
from sqrtdk.models.alone import alone
from sqrtdk.models.modules import is_finite
from sqrtdk.models.records import Inputs, LoadedModel

_LOGGERS = ("torch.export", "torch.export.pt2_archive._package", "torch._export.serde.serialize")
_OUTPUT_CLASS = re.compile(r'type\\?": \\?"(transformers(?:\.[a-z]\w*)*\.(?:modeling_\w+|cache_utils))\.[A-Z]\w*\\?"')


# -- loaded, to run ----------------------------------------------------------------------------------------------------


@alone()
def read_exported(
    path: str | os.PathLike[str], inputs: Inputs | None = None, *, trust_remote_code: bool = False
) -> LoadedModel:
    """Loads a program that `torch.export.save` wrote.

    Args:
        path: The file.
        inputs: Tensors by the argument names of the exported forward, or in their order. Default: the example inputs
            that the program was exported with.
        trust_remote_code: Load the file even if that could run code of its author; see `sqrtdk.graphs.program_file`.

    Returns:
        The module with matching inputs, as kind "exported".

    Raises:
        ModelError: The file can't be read, could run code, or needs another version of torch; or the inputs do not
            match those of the exported forward.
    """
    program, module, guards = _load_program(path, trust_remote_code)
    args, kwargs = program.example_inputs if program.example_inputs else ((), {})
    names = _names(program, module)
    examples = {**dict(zip(names, args, strict=False)), **kwargs}
    if inputs is None and not args and not kwargs:
        raise ModelError("the program holds no inputs, and none were given", hint="Give them with --input FILE.")
    given = examples if inputs is None else _fit(names, examples, inputs)
    shapes = {name: tuple(value.shape) for name, value in given.items() if isinstance(value, Tensor)}
    broken = guards.broken_at(shapes)
    if broken is not None:
        raise ModelError(
            f"the program was exported for sizes with {guards.read[broken][0][:120]}; the inputs are "
            f"{', '.join(f'{name[:60]} {shape}' for name, shape in [*shapes.items()][:8])}",
            hint="Give inputs of such sizes (--input).",
        )
    in_order = not kwargs if inputs is None else len(names) == len(args)
    source = ProgramSource(module, names)
    root, _ = foreign_module(source, source.bind(tuple(given.values()), {}), _class_of_root(module))
    return LoadedModel(root, tuple(given.values()) if in_order else given, str(path), "exported")


@alone()
def _load_program(path: str | os.PathLike[str], trust_remote_code: bool) -> tuple[Any, Any, Guards]:
    """Return the program of a file, its module, and its guards on free sizes, which are parsed and never run."""
    if not trust_remote_code:
        refuse_code(path)
    logged: list[BaseException] = []
    try:
        _import_outputs(path)
        with _silent(logged):
            program = torch.export.load(os.fspath(path))
            lines = [line for line in getattr(program, "_guards_code", None) or () if isinstance(line, str)]
            module = program.module(check_guards=not lines)  # checked guards would be executed as Python
    except INTERRUPTS:
        raise
    except BaseException as error:  # torch, and the code in a trusted file, may raise anything
        raise ModelError(
            f"torch {torch.__version__} does not load the program {str(path)[:200]!r}: "
            f"{kind_and_text((*logged, error)[0])}",
            hint="Files of torch.export are read by the version of torch that wrote them, and by few others.",
        ) from error
    return program, module, read_guards(lines)


@contextlib.contextmanager
def _silent(errors: list[BaseException]) -> Iterator[None]:
    """Silences torch's loggers while a program is loaded, and collects the errors that torch only logs."""

    def keep(record: logging.LogRecord) -> bool:
        errors.extend(filter(None, (record.exc_info or (None, None))[1:2]))
        return False

    for name in _LOGGERS:
        logging.getLogger(name).addFilter(keep)
    try:
        yield
    finally:
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(keep)


def _import_outputs(path: str | os.PathLike[str]) -> None:
    """Imports the modules of transformers whose output classes a program uses, which registers them with torch.

    Only modules of the installed package are imported. If it is not installed, loading names the missing class.
    """
    with zipfile.ZipFile(path) as archive:
        graphs = [name for name in archive.namelist() if name.endswith(".json") and "/models/" in name]
        texts = [archive.read(name).decode("utf-8", "replace") for name in graphs]
    for name in sorted({name for text in texts for name in _OUTPUT_CLASS.findall(text)}):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _fit(names: tuple[str, ...], examples: Mapping[str, Any], inputs: Inputs) -> dict[str, Any]:
    """Return inputs by the argument names of the exported forward."""
    shown = (
        f"{name[:60]} {tuple(value.shape)}" if isinstance(value := examples.get(name), Tensor) else name[:60]
        for name in names[:12]
    )
    takes = f"It was exported with {', '.join(shown)}."
    given = inputs_by_name("program", names, inputs, takes)
    extra = [str(name)[:100] for name, value in given.items() if name not in names and value is not None]
    for name, value in examples.items():  # arguments that are not tensors were fixed by the export
        if not isinstance(value, Tensor):
            given.setdefault(name, value)
    missing = [name for name in names if name not in given]
    if missing or extra:
        lacks = f"lacks its inputs {', '.join(missing)}" if missing else ""
        more = f"takes no input {', '.join(extra)}: what they say was not exported" if extra else ""
        raise ModelError(f"the program {' and '.join(filter(None, (lacks, more)))}", hint=takes)
    for name, value in given.items():
        example = examples.get(name)
        if not isinstance(value, Tensor) or not isinstance(example, Tensor):
            continue
        if value.dtype is not example.dtype or value.dim() != example.dim():
            raise ModelError(
                f"the input {name[:100]!r} is {value.dtype} {tuple(value.shape)}; the program was exported with "
                f"{example.dtype} {tuple(example.shape)}",
                hint="Give it so, or export the program for other inputs.",
            )
    return {name: given[name] for name in names}


# -- walked, on shapes -------------------------------------------------------------------------------------------------


def walk_program(
    path: str | os.PathLike[str], config: Any = None, *, trust_remote_code: bool = False, larger: bool = False
) -> GraphModel:
    """Return an exported program as a model whose forward pass walks it on the device "meta".

    Nothing is computed there: the walk gives shapes and operations.

    Args:
        path: The `.pt2` file.
        config: Config of the model that was exported, or None.
        trust_remote_code: Whether to load a file that would run code of its own.
        larger: As for `number_for`.
    """
    program, module, guards = _load_program(path, trust_remote_code)
    refuse_many(sum(node.op == "call_function" for node in module.graph.nodes))
    inputs, sizes = _inputs(program, module, guards, larger)
    notes: tuple[str, ...] = (shown_sizes(sizes),) if sizes else ()
    if guards.unread:
        notes += (Message("graphs.conditions", count=guards.unread),)
    source = ProgramSource(module, _names(program, module), partial(_number_if_known, sizes=sizes))
    given = source.nested([*inputs.values()])
    root, _ = foreign_module(source, source.bind(given, {}), _class_of_root(module))
    if config is not None:
        root.config = config
    modules = dict(root.named_modules(remove_duplicate=False))
    values = {
        root.held(name): tensor.detach()
        for name, tensor in source.held.items()
        if is_looked_at(tensor) and tensor.layout is torch.strided
    }
    for name, tensor in inputs.items():
        if isinstance(tensor, Tensor) and PADDING_MASK_NAME.search(name) and tensor.dim() == 2:
            values[place_tensor(modules, name, tensor)] = torch.ones_like(tensor, device="cpu")
            notes += (Message("graphs.mask_of_ones", name=name),)
    notes += note_on_unread(source.unread)
    learned = {name: tensor for name, tensor in source.held.items() if isinstance(tensor, nn.Parameter)}
    sick = tuple(name for name, tensor in learned.items() if not is_finite(tensor))
    loaded = LoadedModel(root, given, str(path), "exported", config, notes=notes, masks=values)
    numbers = count_of_program(program, module)
    return GraphModel(loaded, numbers, tuple(source.missing), sizes, unread=tuple(source.unread), sick=sick)


def _class_of_root(module: torch.fx.GraphModule) -> str:
    """Return the class of the model that was exported, as the exporter noted it at an operation."""
    stacks = map(scope_of, module.graph.nodes)
    return next((kind for stack in stacks for path, kind in stack if not path), "")


def _names(program: Any, module: torch.fx.GraphModule) -> tuple[str, ...]:
    """Return the names of the arguments of the exported forward; if the file does not say them, the module does."""
    names = getattr(program.module_call_graph[0].signature, "forward_arg_names", None)
    return tuple(names or inspect.signature(module.forward).parameters)


def _inputs(
    program: Any, module: torch.fx.GraphModule, guards: Guards, larger: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the program's inputs on the meta device, and the numbers chosen for its free sizes."""
    values = {str(n.target): n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    bounds: dict[str, Bounds] = {
        str(symbol): (_finite(edges.lower), _finite(edges.upper)) for symbol, edges in program.range_constraints.items()
    }
    sizes: dict[str, int] = {}
    for value in values.values():
        for axis, size in enumerate(value.shape) if isinstance(value, Tensor) else ((1, value),):
            for symbol in map(str, size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else ():
                low, high = bounds.get(symbol, (None, None))
                number = number_for(axis, sizes, larger)
                number = number if low is None else max(number, low)
                sizes.setdefault(symbol, number if high is None else min(number, high))

    def shapes(numbers: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(_number(size, numbers) for size in value.shape) for name, value in tensors.items()}

    if sizes and guards.read:
        sizes = sizes_meeting(guards, sizes, shapes, bounds)
    empty = {
        name: torch.empty(shape, dtype=tensors[name].dtype, device="meta") for name, shape in shapes(sizes).items()
    }
    return {name: empty[name] if name in empty else _number(value, sizes) for name, value in values.items()}, sizes


def _number(size: Any, sizes: Mapping[str, int]) -> Any:
    """Return a symbolic size as a number. Any other value is returned unchanged."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    return int(expression.subs({symbol: sizes[str(symbol)] for symbol in expression.free_symbols}))


def _number_if_known(size: Any, sizes: Mapping[str, int]) -> int | None:
    """Return a size as a number; None if it depends on values, as the number of elements that are not zero does."""
    known = not isinstance(size, torch.SymInt) or {str(s) for s in size.node.expr.free_symbols} <= sizes.keys()
    return _number(size, sizes) if known else None


def _finite(edge: Any) -> int | None:
    """Return a bound from `range_constraints` as an integer, or None if it is infinite or at least 2^31."""
    return int(edge) if getattr(edge, "is_Integer", False) and abs(edge) < 2**31 else None
