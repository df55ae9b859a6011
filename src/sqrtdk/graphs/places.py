"""Builds empty modules at the paths that an exported graph names, with their class names, meta weights and config.

A graph is read by running its operations on torch's meta device, each inside the module that the exporter noted for it.
A trace and the audit then see the same as for a model that was built without weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from sqrtdk.graphs.graph import UnreadAttention
from sqrtdk.models.records import LoadedModel
from sqrtdk.tracing.tape.graph import MOST_CONSTANT_ELEMENTS

MOST_LEARNED = 2**12  # largest weight whose values are read, in elements: gains, temperatures
MAX_PATH_NAMES = 32  # names in a module path
MAX_MODULE_NAME = 200  # characters of one name
_MOST_STACK = 2**14  # characters of a traceback that are searched
_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d{1,6}), in')
_LIBRARY_FOLDERS = ("site-packages", "dist-packages", "/torch/")
_CLASS = re.compile(r"[A-Za-z_]\w{0,100}")


@dataclass(frozen=True, slots=True)
class GraphModel:
    """An exported graph as a model, whose forward pass walks the graph on the device "meta"."""

    loaded: LoadedModel  # the model, its inputs on the meta device, and values of its constants
    numbers: int  # numbers in the constants of the file, of every dtype, unpacked
    missing: tuple[UnreadAttention, ...] = ()  # attentions that are not read
    # numbers chosen for the sizes that the graph leaves free
    sizes: Mapping[str, int] = field(default_factory=dict)
    # attention operators of an ONNX graph by site, in order: "Softmax", or the name of a fused attention
    operators: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # operators and attributes that are not read
    sick: tuple[str, ...] = ()  # names of weights that hold NaN or infinity


class NamedModule(nn.Module):
    """A module of the graph's model, which has the path that the exported code had."""

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call `run(*args)` inside this module, so that a trace names the module as the place of what runs."""
        return run(*args)


class GraphRoot(nn.Module):
    """The root module of a graph's model; its forward pass walks the graph."""

    def __init__(self, walk: Callable[..., Any], config: Any) -> None:
        super().__init__()
        self._walk = (walk,)  # in a tuple, so that nn.Module does not register it as a submodule
        if config is not None:
            self.config = config

    def forward(self, *inputs: Tensor) -> Any:
        """Walk the graph from its inputs, and return what the walk returns."""
        return self._walk[0](*inputs)


def class_of(name: str, base: type[nn.Module] = NamedModule) -> type[nn.Module]:
    """Return an empty subclass of `base`, named by the last part of a dotted name; `base` itself for an invalid name.

    Example:
        >>> class_of("transformers.models.LlamaAttention").__name__
        'LlamaAttention'
    """
    last = name.rpartition(".")[2]
    return type(last, (base,), {}) if _CLASS.fullmatch(last) else base


def is_module_path(path: str) -> bool:
    """Return whether a path is a valid module path.

    Example:
        >>> is_module_path("model.layers.0.attn"), is_module_path(""), is_module_path("a..b"), is_module_path("x" * 300)
        (True, True, False, False)
    """
    parts = path.split(".") if path else []
    return len(parts) <= MAX_PATH_NAMES and all(part and len(part) <= MAX_MODULE_NAME for part in parts)


def place_modules(root: nn.Module, classes: Mapping[str, str]) -> dict[str, nn.Module]:
    """Return the modules by path after adding one at each path of `classes` and at all of its parents.

    `classes` maps paths to class names, with "" for an unknown one. The root's path is "". Paths that
    `is_module_path` refuses are left out.
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
    """Add a tensor to the module of its name; to the root under a new name, if there is no such module.

    Args:
        modules: Modules by path.
        name: Path of the module, a dot, and the name in it.
        tensor: A parameter, or a tensor that becomes a buffer.

    Returns:
        The tensor's name in the model.
    """
    path, _, last = name.rpartition(".")
    if path not in modules or not last or hasattr(modules[path], last) or not is_module_path(name):
        number = len(modules[""]._buffers) + len(modules[""]._parameters)
        path, last = "", f"{name.replace('.', '_')[:MAX_MODULE_NAME]}#{number}"
    held: Any = modules[path]._parameters if isinstance(tensor, nn.Parameter) else modules[path]._buffers
    held[last] = tensor
    return f"{path}.{last}" if path else last


def is_looked_at(tensor: Tensor) -> bool:
    """Return whether the values of a constant are read: it is small, as gains and temperatures are."""
    return tensor.numel() <= (MOST_LEARNED if isinstance(tensor, nn.Parameter) else MOST_CONSTANT_ELEMENTS)


def _here(run: Callable[..., Any], *args: Any) -> Any:
    return run(*args)


@lru_cache(2**12)
def _written_at(file: str, line: int) -> FunctionType:
    """Return a function that calls its argument and whose stack frame shows the given file and line."""
    # The call `run(*args)` is on the second line of `_here`, so the function begins one line earlier.
    code = _here.__code__.replace(co_filename=file, co_firstlineno=max(line - 1, 0))
    return FunctionType(code, {})


def run_inside(
    modules: Mapping[str, nn.Module], path: str, stack: str, number: int, run: Callable[..., Any], *args: Any
) -> Any:
    """Run an operation so that a trace reports its module and its line in the model's source code.

    The root is used for a path without a module. The line is the last frame of the exporter's traceback outside of
    libraries. Without a traceback it is "<node>" and the number of the operation in the graph, counted from 1.

    Example:
        >>> import sys
        >>> here = lambda: sys._getframe(1).f_code.co_filename
        >>> run_inside({"": NamedModule()}, "", 'File "/home/me/net.py", line 12, in forward', 3, here)
        '/home/me/net.py'
        >>> run_inside({"": NamedModule()}, "", "", 3, here)
        '<node>'
    """
    frames = _FRAME.findall(stack[-_MOST_STACK:])
    own = [frame for frame in frames if not any(part in frame[0] for part in _LIBRARY_FOLDERS)]
    file, line = (own or frames or [("<node>", number)])[-1]
    call = partial(_written_at(file, int(line)), run, *args)
    place = modules.get(path, modules[""])
    return call() if place is modules[""] else place(call)
