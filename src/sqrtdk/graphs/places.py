"""Builds empty modules at the paths that an exported graph names, with their class names, meta weights and config.

A graph is read by running its operations on torch's meta device, each inside the module that the exporter noted for it.
A trace and the audit then see the same as for a model that was built without weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from sqrtdk.frontends.regions import at_line
from sqrtdk.graphs.graph import UnreadAttention
from sqrtdk.models.records import LoadedModel
from sqrtdk.tracing.tape.graph import MOST_CONSTANT_ELEMENTS

MOST_LEARNED = 2**12  # largest weight whose values are read, in elements: gains, temperatures
_MOST_STACK = 2**14  # characters of a traceback that are searched
_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d{1,6}), in')
_LIBRARY_FOLDERS = ("site-packages", "dist-packages", "/torch/")


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


def is_looked_at(tensor: Tensor) -> bool:
    """Return whether the values of a constant are read: it is small, as gains and temperatures are."""
    return tensor.numel() <= (MOST_LEARNED if isinstance(tensor, nn.Parameter) else MOST_CONSTANT_ELEMENTS)


def run_inside(
    modules: Mapping[str, nn.Module], path: str, stack: str, number: int, run: Callable[..., Any], *args: Any
) -> Any:
    """Run an operation so that a trace reports its module and its line in the model's source code.

    The root is used for a path without a module. The line is the last frame of the exporter's traceback outside of
    libraries. Without a traceback it is "<node>" and the number of the operation in the graph, counted from 1.

    Example:
        >>> import sys
        >>> here = lambda: sys._getframe(1).f_code.co_filename
        >>> from sqrtdk.frontends.regions import NamedModule
        >>> run_inside({"": NamedModule()}, "", 'File "/home/me/net.py", line 12, in forward', 3, here)
        '/home/me/net.py'
        >>> run_inside({"": NamedModule()}, "", "", 3, here)
        '<node>'
    """
    frames = _FRAME.findall(stack[-_MOST_STACK:])
    own = [frame for frame in frames if not any(part in frame[0] for part in _LIBRARY_FOLDERS)]
    file, line = (own or frames or [("<node>", number)])[-1]
    call = partial(at_line(file, int(line)), run, *args)
    place = modules.get(path, modules[""])
    return call() if place is modules[""] else place(call)
