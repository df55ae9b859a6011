"""Modules at the paths that a foreign program names, and calls that a trace sees at the program's own lines.

A program that is no torch module is run operation by operation, each inside the module that it names for it. A trace
then reports that module as the site, and file and line of the source that the operation came from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

MAX_PATH_NAMES = 32  # names in a module path
MAX_MODULE_NAME = 200  # characters of one name
_MOST_LINES = 2**16  # lines that a region's code may span
_CLASS_NAME = re.compile(r"[A-Za-z_]\w{0,100}")


class NamedModule(nn.Module):
    """A module without parameters of its own that stands for a module of a foreign program, at its path."""

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """Return `run(*args)`, called inside this module, so that a trace names the module as the site of what happens.

        Args:
            run: A function that computes the module's steps.
            args: Its arguments.
        """
        return run(*args)


def class_of(name: str, base: type[nn.Module] = NamedModule) -> type[nn.Module]:
    """Return an empty subclass of `base` that has the last part of a dotted class name as its name.

    Args:
        name: As "flax.nnx.Linear"; if its last part is no valid class name, `base` itself is returned.
        base: The class to derive from.
    """
    last = name.rpartition(".")[2]
    return type(last, (base,), {}) if _CLASS_NAME.fullmatch(last) else base


def is_module_path(path: str) -> bool:
    """Return whether a path is a valid module path.

    Example:
        >>> is_module_path("model.layers.0.attn"), is_module_path(""), is_module_path("a..b"), is_module_path("x" * 300)
        (True, True, False, False)
    """
    parts = path.split(".") if path else []
    return len(parts) <= MAX_PATH_NAMES and all(part and len(part) <= MAX_MODULE_NAME for part in parts)


def place_modules(root: nn.Module, classes: Mapping[str, str]) -> dict[str, nn.Module]:
    """Add modules to a root, at the given paths and at all of their parents.

    Args:
        root: The module that gets them.
        classes: Class name by path, "" for an unknown one; paths that `is_module_path` refuses are left out.

    Returns:
        The modules by path, with the root at "".
    """
    made: dict[str, nn.Module] = {"": root}
    for path in sorted(filter(is_module_path, classes), key=lambda path: path.count(".")):
        parts = path.split(".") if path else []
        for depth in range(1, len(parts) + 1):
            here = ".".join(parts[:depth])
            if here not in made:
                kind = class_of(classes.get(here, ""))
                above = made[".".join(parts[: depth - 1])]
                above._modules[parts[depth - 1]] = made[here] = kind()
    return made


def place_tensor(modules: Mapping[str, nn.Module], name: str, tensor: Tensor) -> str:
    """Add a tensor to the module named in front of its last dot, or to the root under a new name.

    Args:
        modules: Modules by path, with the root at "".
        name: Name of the tensor in the foreign program, as "layers.0.weight".
        tensor: A parameter, or a tensor that becomes a buffer.

    Returns:
        The tensor's name in the root.
    """
    path, _, last = name.rpartition(".")
    if path not in modules or not last or hasattr(modules[path], last) or not is_module_path(name):
        number = len(modules[""]._buffers) + len(modules[""]._parameters)
        path, last = "", f"{name.replace('.', '_')[:MAX_MODULE_NAME]}#{number}"
    held: Any = modules[path]._parameters if isinstance(tensor, nn.Parameter) else modules[path]._buffers
    held[last] = tensor
    return f"{path}.{last}" if path else last


def _here(run: Callable[..., Any], *args: Any) -> Any:
    return run(*args)


@lru_cache(2**12)
def at_line(file: str, line: int) -> FunctionType:
    """Return a function that calls its argument and whose stack frame shows the given file and line.

    Example:
        >>> import sys
        >>> at_line("/home/me/net.py", 12)(lambda: sys._getframe(1).f_code.co_filename)
        '/home/me/net.py'
    """
    # The call `run(*args)` is on the second line of `_here`, so the function begins one line earlier.
    code = _here.__code__.replace(co_filename=file, co_firstlineno=max(line - 1, 0))
    return FunctionType(code, {})


def written_in(module: nn.Module, file: str, first: int, last: int) -> None:
    """Give a `NamedModule` a forward whose code begins at one line of a file and ends at another.

    A comparison reports the lines of a module's forward, which are then those of the foreign source.

    Args:
        module: The module.
        file: Path of the foreign source file.
        first: First line.
        last: Last line.
    """
    forward = FunctionType(code_between(file, first, last), {}, "forward")
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


def code_between(file: str, first: int, last: int) -> CodeType:
    """Return code that begins at one line of a file and ends at another, which runs `run(*args)`.

    Args:
        file: Path of a source file.
        first: First line.
        last: Last line.
    """
    space = "\n" * min(max(last - first, 1), _MOST_LINES)
    code = compile(f"def forward(self, run, *args):{space}    return run(*args)\n", file, "exec")
    body = next(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return body.replace(co_firstlineno=max(first, 1))
