"""The modules that an exported graph names: paths, class names, weights without values, and a config. Nothing runs.

A graph is read by walking its operations on torch's meta device, each inside the module that the exporter noted at it,
so that a trace, and the audit after it, see what they see of a module that is built without weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from sqrtdk.graphs.graph import Missing
from sqrtdk.models.records import LoadedModel
from sqrtdk.tracing.tape.graph import LARGEST

MOST_LEARNED = 2**12  # elements of a weight whose values are looked at: gains, temperatures
MAX_DEPTH = 32  # names in a module path
MAX_NAME = 200  # characters of one
_MOST_STACK = 2**14  # characters of a traceback that are looked at
_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d{1,6}), in')
_LIBRARIES = ("site-packages", "dist-packages", "/torch/")
_CLASS = re.compile(r"[A-Za-z_]\w{0,100}")


@dataclass(frozen=True, slots=True)
class Walked:
    """A graph as a model whose forward walks it on the meta device."""

    loaded: LoadedModel  # the model, its inputs without values, and values of its constants
    missing: tuple[Missing, ...] = ()  # attentions that are not read
    # numbers that stand for the sizes which the graph leaves free
    sizes: Mapping[str, int] = field(default_factory=dict)
    # of ONNX by site, in order: "Softmax", or one that is an attention by itself
    operators: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # operators, and attributes of operators, that are not read
    sick: tuple[str, ...] = ()  # names of weights that hold NaN or infinity


class Place(nn.Module):
    """A module of the graph's model."""

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call `run` as a part of this module."""
        return run(*args)


class GraphRoot(nn.Module):
    """The whole of a graph; its forward walks it, from the inputs on the meta device."""

    def __init__(self, walk: Callable[..., Any], config: Any) -> None:
        super().__init__()
        self._walk = (walk,)  # in a tuple, so that it is no module of this one
        if config is not None:
            self.config = config

    def forward(self, *inputs: Tensor) -> Any:
        """Walk."""
        return self._walk[0](*inputs)


def class_of(name: str, base: type[nn.Module] = Place) -> type[nn.Module]:
    """An empty class of a module's own name, the last of a dotted one; `base` where the name is none."""
    last = name.rpartition(".")[2]
    return type(last, (base,), {}) if _CLASS.fullmatch(last) else base


def fits(path: str) -> bool:
    """Whether a path can be one of modules.

    Example:
        >>> fits("model.layers.0.attn"), fits(""), fits("a..b"), fits("x" * 300)
        (True, True, False, False)
    """
    parts = path.split(".") if path else []
    return len(parts) <= MAX_DEPTH and all(part and len(part) <= MAX_NAME for part in parts)


def place_modules(root: nn.Module, classes: Mapping[str, str]) -> dict[str, nn.Module]:
    """Put modules of these class names ("": not known) at paths, and at those above them; the root's path is "".

    Paths that `fits` refuses are left out.
    """
    made: dict[str, nn.Module] = {"": root}
    for path in sorted(filter(fits, classes), key=lambda path: path.count(".")):
        parts = path.split(".") if path else []
        for depth in range(1, len(parts) + 1):
            here = ".".join(parts[:depth])
            if here not in made:
                kind = class_of(classes.get(here, ""))
                above = made[".".join(parts[: depth - 1])]
                above._modules[parts[depth - 1]] = made[here] = kind()
    return made


def place_tensor(modules: Mapping[str, nn.Module], name: str, tensor: Tensor) -> str:
    """Let the module that a tensor's name begins with hold it, or the root under a name of its own; its name there."""
    path, _, last = name.rpartition(".")
    if path not in modules or not last or hasattr(modules[path], last) or not fits(name):
        number = len(modules[""]._buffers) + len(modules[""]._parameters)
        path, last = "", f"{name.replace('.', '_')[:MAX_NAME]}#{number}"
    held: Any = modules[path]._parameters if isinstance(tensor, nn.Parameter) else modules[path]._buffers
    held[last] = tensor
    return f"{path}.{last}" if path else last


def is_looked_at(tensor: Tensor) -> bool:
    """Whether the values of a constant are read: of gains and temperatures, and of what a trace may compute with."""
    return tensor.numel() <= (MOST_LEARNED if isinstance(tensor, nn.Parameter) else LARGEST)


def _here(run: Callable[..., Any], *args: Any) -> Any:
    return run(*args)


@lru_cache(2**12)
def _written_at(file: str, line: int) -> FunctionType:
    """A function that calls another one, and whose own frame says that it is written there."""
    code = _here.__code__.replace(co_filename=file, co_firstlineno=max(line - 1, 0))  # its call is on its second line
    return FunctionType(code, {})


def run_inside(
    modules: Mapping[str, nn.Module], path: str, stack: str, number: int, run: Callable[..., Any], *args: Any
) -> Any:
    """Run an operation so that a trace tells the module, and the line of the model's code, that it comes from.

    The root stands for a path without a module. Of the traceback that the exporter noted the last frame counts that is
    no library's; where there is none, the number of the operation in the graph, from 1, is told.

    Example:
        >>> import sys
        >>> here = lambda: sys._getframe(1).f_code.co_filename
        >>> run_inside({"": Place()}, "", 'File "/home/me/net.py", line 12, in forward', 3, here)
        '/home/me/net.py'
        >>> run_inside({"": Place()}, "", "", 3, here)
        '<node>'
    """
    frames = _FRAME.findall(stack[-_MOST_STACK:])
    own = [frame for frame in frames if not any(part in frame[0] for part in _LIBRARIES)]
    file, line = (own or frames or [("<node>", number)])[-1]
    call = partial(_written_at(file, int(line)), run, *args)
    place = modules.get(path, modules[""])
    return call() if place is modules[""] else place(call)
