"""An exported graph as a model that can be traced, and the lines of the model's code that its operations came from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from sqrtdk.graphs.graph import UnreadAttention
from sqrtdk.messages import Message
from sqrtdk.models.records import LoadedModel
from sqrtdk.tracing.tape.graph import MOST_CONSTANT_ELEMENTS

MOST_LEARNED = 2**12  # largest weight whose values are read, in elements: gains, temperatures
MOST_NAMED = 5  # operations that a note names
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


def is_looked_at(tensor: Tensor) -> bool:
    """Return whether the values of a constant are read: it is small, as gains and temperatures are."""
    return tensor.numel() <= (MOST_LEARNED if isinstance(tensor, nn.Parameter) else MOST_CONSTANT_ELEMENTS)


def note_on_unread(unread: Mapping[str, str]) -> tuple[str, ...]:
    """Return the note on operations that are not read, if there are any.

    Args:
        unread: The operations, each with its place.
    """
    if not unread:
        return ()
    named = [f"{name} ({place})" for name, place in sorted(unread.items())]
    what = ", ".join(named[:MOST_NAMED])
    more = Message("graphs.and_count", names=what, count=len(named) - MOST_NAMED) if len(named) > MOST_NAMED else what
    return (Message("graphs.unread", what=more),)


def place_of(path: str, file: str, line: int) -> str:
    """Return the place of an operation as a note says it.

    Example:
        >>> place_of("layers.0.mlp", "<node>", 12), place_of("", "net.py", 3)
        ('layers.0.mlp, <node>:12', 'net.py:3')
    """
    return f"{path}, {file}:{line}" if path else f"{file}:{line}"


def code_line(stack: str, number: int) -> tuple[str, int]:
    """Return file and line of an operation: of the last frame of a traceback outside of libraries.

    Args:
        stack: The traceback into the model's code that the exporter noted; "" for none.
        number: Number of the operation in the graph, counted from 1, which stands in for a line without a traceback.

    Example:
        >>> code_line('File "/home/me/net.py", line 12, in forward', 3), code_line("", 3)
        (('/home/me/net.py', 12), ('<node>', 3))
    """
    frames = _FRAME.findall(stack[-_MOST_STACK:])
    own = [frame for frame in frames if not any(part in frame[0] for part in _LIBRARY_FOLDERS)]
    file, line = (own or frames or [("<node>", number)])[-1]
    return file, int(line)
