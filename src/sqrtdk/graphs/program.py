"""A program of torch.export in a file, as a model that can be traced like any other.

Its modules are not called when it runs; where in the model an attention stood is told by the weights that project its
q and k, whose names are the model's own.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sqrtdk.errors import INTERRUPTS, ModelError, kind_and_text
from sqrtdk.graphs.feeds import says_nothing
from sqrtdk.graphs.guards import read_guards
from sqrtdk.graphs.program_file import refuse_code
from sqrtdk.models.alone import alone
from sqrtdk.models.records import Inputs, LoadedModel

_LOGGERS = ("torch.export", "torch.export.pt2_archive._package", "torch._export.serde.serialize")
_OUTPUTS = re.compile(r'type\\?": \\?"(transformers(?:\.[a-z]\w*)*\.(?:modeling_\w+|cache_utils))\.[A-Z]\w*\\?"')


@alone()
def load_program(path: str | os.PathLike[str], *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The program in a file, and its module.

    Raises:
        ModelError: the file can't be read, could run code, or is of another version of torch.
    """
    if not trust_remote_code:
        refuse_code(path)
    shown = str(path)[:200]
    logged = _Logged()
    try:
        _import_outputs(path)
        with logged:
            program = torch.export.load(os.fspath(path))
            module = program.module(check_guards=not guards_of(program))  # it would run them as code
    except INTERRUPTS:
        raise
    except BaseException as error:  # whatever torch, or a trusted file's own code, raises
        raise ModelError(
            f"torch {torch.__version__} does not load the program {shown!r}: {kind_and_text(logged.cause or error)}",
            hint="Files of torch.export are read by the version of torch that wrote them, and by few others.",
        ) from error
    return program, module


@alone()
def read_exported(
    path: str | os.PathLike[str], inputs: Inputs | None = None, *, trust_remote_code: bool = False
) -> LoadedModel:
    """Load a program that `torch.export.save` wrote.

    Args:
        path: of the file.
        inputs: tensors by the names of the exported forward's arguments, or in their order; those that the program was
            exported with where it is None.
        trust_remote_code: load it also where that could run code of its author; see `sqrtdk.graphs.program_file`.

    Returns:
        Its module, with inputs that fit, as kind "exported".

    Raises:
        ModelError: the file can't be read, could run code, or is of another version of torch; the inputs are not those
            of the exported forward.
    """
    program, module = load_program(path, trust_remote_code=trust_remote_code)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    wanted = _arguments(program)
    given = _fit(program, wanted, inputs)
    _refuse_sizes(program, wanted, given)
    return LoadedModel(module=module, inputs=given, id=str(path), kind="exported")


def guards_of(program: Any) -> list[str]:
    """Lines of code in which a program says what it asks of free sizes; they are never run."""
    return [line for line in getattr(program, "_guards_code", None) or () if isinstance(line, str)]


def _refuse_sizes(program: Any, names: tuple[str, ...], inputs: Inputs) -> None:
    """Refuse inputs of sizes that the program was not exported for, as far as its conditions can be read."""
    given = dict(zip(names, inputs, strict=False)) if isinstance(inputs, tuple) else inputs
    shapes = {name: tuple(value.shape) for name, value in given.items() if isinstance(value, Tensor)}
    broken = read_guards(guards_of(program)).broken(shapes)
    if broken is not None:
        raise ModelError(
            f"the program was exported for sizes with {broken[:120]}; the inputs are "
            f"{', '.join(f'{name[:60]} {shape}' for name, shape in [*shapes.items()][:8])}",
            hint="Give inputs of such sizes (--input).",
        )


class _Logged(logging.Filter):
    """Keeps torch's log silent while a program is loaded, and the error that it tells there alone."""

    def __init__(self) -> None:
        super().__init__()
        self.cause: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop a record, and keep its error."""
        if record.exc_info and record.exc_info[1] is not None:
            self.cause = self.cause or record.exc_info[1]
        return False

    def __enter__(self) -> _Logged:
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(self)


def _import_outputs(path: str | os.PathLike[str]) -> None:
    """Import the classes of transformers that a program puts its outputs into: torch knows them from then on.

    The installed package's own modules alone; where it is not installed, loading says what is missing.
    """
    with zipfile.ZipFile(path) as archive:
        graphs = [name for name in archive.namelist() if name.endswith(".json") and "/models/" in name]
        texts = [archive.read(name).decode("utf-8", "replace") for name in graphs]
    for name in sorted({name for text in texts for name in _OUTPUTS.findall(text)}):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _arguments(program: Any) -> tuple[str, ...]:
    """Names of the arguments of the exported forward."""
    signature = program.module_call_graph[0].signature
    names = getattr(signature, "forward_arg_names", None)
    if names:
        return tuple(names)
    args, kwargs = program.example_inputs if program.example_inputs else ((), {})
    forward = program.module(check_guards=not guards_of(program)).forward
    parameters = [name for name in inspect.signature(forward).parameters if name not in kwargs]
    return (*parameters[: len(args)], *kwargs)


def _fit(program: Any, names: tuple[str, ...], inputs: Inputs | None) -> Inputs:
    """Inputs as the exported forward takes them: it was exported with some in order, and the others by name.

    Raises:
        ModelError: some are missing, or are not its own.
    """
    args, kwargs = program.example_inputs if program.example_inputs else ((), {})
    if inputs is None:
        if not args and not kwargs:
            raise ModelError("the program holds no inputs, and none were given", hint="Give them with --input FILE.")
        return _named(names, args, kwargs)
    given = dict(zip(names, inputs, strict=False)) if isinstance(inputs, tuple) else dict(inputs)
    given = {name: value for name, value in given.items() if name in names or not says_nothing(name, value)}
    if isinstance(inputs, tuple) and len(inputs) > len(names):
        raise ModelError(f"the program takes {len(names)} inputs, got {len(inputs)}", hint=_takes(names, args, kwargs))
    extra = [str(name)[:100] for name, value in given.items() if name not in names and value is not None]
    missing = [name for name in names if name not in given]
    examples = {**dict(zip(names, args, strict=False)), **kwargs}
    for name in list(missing):  # what is not a tensor was fixed when it was exported
        if not isinstance(examples.get(name), Tensor) and name in examples:
            given[name] = examples[name]
            missing.remove(name)
    if missing or extra:
        lacks = f"lacks its inputs {', '.join(missing)}" if missing else ""
        more = f"takes no input {', '.join(extra)}: what they say was not exported" if extra else ""
        raise ModelError(f"the program {' and '.join(filter(None, (lacks, more)))}", hint=_takes(names, args, kwargs))
    _refuse_kinds(given, examples)
    return _named(names, tuple(given[name] for name in names[: len(args)]), {n: given[n] for n in names[len(args) :]})


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
    """Arguments as one tuple where all are given in order, else by name."""
    return tuple(args) if not kwargs else {**dict(zip(names, args, strict=False)), **kwargs}


def _refuse_kinds(given: Mapping[str, Any], examples: Mapping[str, Any]) -> None:
    """Refuse tensors of another number of axes, or of another dtype, than the program was exported with."""
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


def _takes(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    examples = {**dict(zip(names, args, strict=False)), **kwargs}
    shapes = (
        f"{name[:60]} {tuple(value.shape)}" if isinstance(value, Tensor) else name[:60]
        for name, value in ((name, examples.get(name)) for name in names[:12])
    )
    return f"It was exported with {', '.join(shapes)}."
