"""Walks a graph of MLX and writes its primitives as steps, in the order in which they were written.

    Broadcast        no step where torch broadcasts by itself: x * scale, where(mask, s, -inf)
    scalar constant  a number: 0.25 * q
    Depends          the marks of `places`: no step
    all else         one step

MLX gives the primitives in the order in which results need them. A mark's number says when its call ran, and a
primitive without a mark (`x.T`) belongs to the first call that reads it.

A primitive that nobody reads is noted with its line; `walk_graph` raises one error that names them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sqrtdk.frontends.mlx.arrays import dtype_name, mlx, tensor_from_mlx
from sqrtdk.frontends.mlx.elementwise import MLX_ELEMENTWISE, MLX_OVER_AXES
from sqrtdk.frontends.mlx.nodes import Aval, Primitive, PrimitiveOperation, primitive_of
from sqrtdk.frontends.mlx.places import FIRST_MARK, Mark, Marks
from sqrtdk.frontends.mlx.products import MLX_PRODUCTS, READS, weight_apart
from sqrtdk.frontends.mlx.shapes import MLX_SHAPES, UNCHANGED
from sqrtdk.frontends.names import refuse_unread
from sqrtdk.frontends.program import FlatProgram, FlatStep, Literal, Read, RunDtypes
from sqrtdk.messages import Message

MLX_OPERATIONS = MLX_ELEMENTWISE | MLX_OVER_AXES | MLX_SHAPES | MLX_PRODUCTS
_BESIDE_NUMBERS = frozenset(MLX_ELEMENTWISE)  # beside a tensor, as a trace reads them: 0.25 * x
_NO_MARK = Mark("", ())


@dataclass(frozen=True, slots=True)
class _Expanded:
    """What a Broadcast reads, and the shape that it makes of it."""

    read: Read
    shape: tuple[int, ...]
    own: tuple[int, ...]


@dataclass(slots=True)
class GraphWalk:
    """The steps of one graph, as they are written.

    Attributes:
        marks: the calls that wrote the primitives.
    """

    marks: Marks
    steps: list[FlatStep] = field(default_factory=list)
    constants: dict[int, Tensor] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    known: dict[str, Read | _Expanded] = field(default_factory=dict)
    avals: dict[str, Aval] = field(default_factory=dict)
    count: int = 0

    def new(self) -> int:
        """Return a reference that is not in use yet."""
        self.count += 1
        return self.count

    def constant(self, value: Tensor) -> int:
        """Record a constant tensor, and return its reference."""
        made = self.new()
        self.constants[made] = value
        return made

    def node(self, node: Primitive, mark: Mark) -> None:
        """Translate one primitive into a step."""
        self.avals |= {aval.ref: aval for aval in node.gives}
        if node.name == "Broadcast" and len(node.takes) == 1:
            read = self.known[node.takes[0].ref]
            inner = read if isinstance(read, _Expanded) else _Expanded(read, (), node.takes[0].shape)
            self.known[node.gives[0].ref] = _Expanded(inner.read, node.shape, inner.own)
            return
        if node.name in UNCHANGED:
            for aval, source in zip(node.gives, node.takes, strict=False):
                self.known[aval.ref] = self.known[source.ref]
            return
        if node.name not in MLX_OPERATIONS or not READS.get(node.name, bool)(node):
            place = mark.frames[-1] if mark.frames else None
            self.unread.setdefault(node.name, f"{place.file}:{place.line}" if place else "")
            self.known |= {aval.ref: self.new() for aval in node.gives}
            return
        if node.name == "QuantizedMatmul":
            weight, node = weight_apart(node)
            self.node(weight, mark)
        found = [self.known[aval.ref] for aval in node.takes]
        if found and not node.shape and len(node.gives) == 1 and all(isinstance(read, Literal) for read in found):
            # MLX makes a number once for all layers: a step would tie them together
            numbers = [torch.tensor(read.value, dtype=aval.held) for read, aval in zip(found, node.takes, strict=True)
                       if isinstance(read, Literal)]  # fmt: skip
            made = PrimitiveOperation(MLX_OPERATIONS[node.name], node)(RunDtypes(), *numbers)
            self.known[node.gives[0].ref] = Literal(made.to(node.gives[0].held).item())
            return
        reads = self._bare(node, found) if node.name in _BESIDE_NUMBERS else None
        if reads is None:
            reads = [self.whole(read, aval, mark) for read, aval in zip(found, node.takes, strict=True)]
        self._step(node, reads, mark)

    def _bare(self, node: Primitive, found: Sequence[Read | _Expanded]) -> list[Read] | None:
        """Return what an operation reads without the Broadcasts in front, if torch broadcasts in the same way."""
        shapes = [read.own if isinstance(read, _Expanded) else () if isinstance(read, Literal) else aval.shape
                  for read, aval in zip(found, node.takes, strict=True)]  # fmt: skip
        reads = [read.read if isinstance(read, _Expanded) else read for read in found]
        if all(isinstance(read, Literal) for read in reads) or _together(shapes) != node.shape:
            return None
        return reads

    def whole(self, read: Read | _Expanded, aval: Aval, mark: Mark = _NO_MARK) -> int:
        """Return the reference of a tensor: a number becomes a constant, and a Broadcast a step."""
        if isinstance(read, _Expanded):
            inner = self.whole(read.read, Aval(aval.ref, read.own, aval.dtype), mark)
            if read.own == read.shape:
                return inner
            node = Primitive("Broadcast", (read.shape,), (Aval(aval.ref, read.own, aval.dtype),), (aval,))
            self._step(node, [inner], mark)
            made = self.known[aval.ref]
            assert isinstance(made, int)
            return made
        if isinstance(read, Literal):
            return self.constant(torch.tensor(read.value, dtype=aval.held))
        return read

    def _step(self, node: Primitive, reads: Sequence[Read], mark: Mark) -> None:
        made = tuple(self.new() for _ in node.gives)
        self.known |= {aval.ref: ref for aval, ref in zip(node.gives, made, strict=True)}
        run = PrimitiveOperation(MLX_OPERATIONS[node.name], node)
        dtypes = tuple(aval.held for aval in node.gives)
        at = mark.frames[-1] if mark.frames else None
        file, line = (at.file, at.line) if at else ("<mlx>", len(self.steps) + 1)
        path = self.marks.path(mark)
        # a module of mlx.nn is called at the last line of the user's code, and its own is behind that
        frames = mark.frames if mark.inner is None or not self.marks.scoped else (*mark.frames, mark.inner)
        self.steps.append(FlatStep(node.name, run, tuple(reads), made, dtypes, path, file, line, frames))


def _together(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def walk_graph(records: Sequence[Any], names: Sequence[str | None], marks: Marks) -> tuple[FlatProgram, list[Aval]]:
    """Return a graph as a program.

    Args:
        records: What the callback of `mx.export_function` was called with.
        names: Name of the parameter of each of its inputs; None for an input.
        marks: The calls that wrote its primitives.

    Returns:
        The program, whose outputs are all tensors, and shape and dtype of each output.

    Raises:
        ModelError: It has primitives that nobody reads.
    """
    walk = GraphWalk(marks)
    parts: dict[str, Any] = {record["type"]: record for record in records if record["type"] != "primitive"}
    parameters: dict[int, str] = {}
    inputs = []
    for (ref, shape, dtype), name in zip(parts["inputs"]["inputs"], names, strict=True):
        made = walk.new()
        walk.known[ref], walk.avals[ref] = made, Aval(ref, tuple(shape), dtype_name(dtype))
        if name is None:
            inputs.append(made)
        else:
            parameters[made] = name
    numbers: dict[str, int] = {}  # marks by their constant
    for ref, value in parts.get("constants", {}).get("constants", ()):
        walk.avals[ref] = Aval(ref, tuple(value.shape), dtype_name(value.dtype))
        if value.ndim == 0:
            number = value.item()
            walk.known[ref] = Literal(number)
            if value.dtype == mlx().int64 and FIRST_MARK <= number < FIRST_MARK + len(marks.calls):
                numbers[ref] = number - FIRST_MARK
        else:
            walk.known[ref] = walk.constant(tensor_from_mlx(value))
    nodes = [primitive_of(record) for record in records if record["type"] == "primitive"]
    for node, call in _in_order(nodes, numbers):
        walk.node(node, marks.calls[call] if call < len(marks.calls) else _NO_MARK)
    refuse_unread(walk.unread, "MLX", str(mlx().__version__), Message("frontends.hint.mlx_unread"))
    gives = [Aval(ref, tuple(shape), dtype_name(dtype)) for ref, shape, dtype in parts["outputs"]["outputs"]]
    outputs = tuple(walk.whole(walk.known[aval.ref], aval) for aval in gives)
    return FlatProgram(tuple(inputs), parameters, walk.constants, tuple(walk.steps), outputs), gives


def _in_order(nodes: Sequence[Primitive], numbers: Mapping[str, int]) -> list[tuple[Primitive, int]]:
    """Return the primitives in the order in which they were written, each with the number of its call.

    What reads a result was written after it, so the number of a call is never larger than those of its readers.
    """
    last = len(numbers) + FIRST_MARK
    first: dict[str, int] = {}  # by array, the first call that made or read it
    calls: list[int] = [last] * len(nodes)
    for at in reversed(range(len(nodes))):
        node = nodes[at]
        mark = numbers.get(node.takes[1].ref) if node.name == "Depends" and len(node.takes) == 2 else None
        call = min(first.get(aval.ref, last) for aval in node.gives) if mark is None else mark
        calls[at] = call
        for aval in node.takes:
            first[aval.ref] = min(first.get(aval.ref, last), call)
    order = sorted(range(len(nodes)), key=lambda at: (calls[at], at))
    return [(nodes[at], calls[at]) for at in order]
