"""How long a rotation makes a vector: from the tables that its operations multiply by, on every way through them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.constants import evaluate
from sqrtdk.tracing.watch.graph import Node

_Table = tuple[Node, int]  # a multiplication, and the position of its table
_MOST = 64  # ways through one rotation
_PURE = 1e-3  # how far from 1 a table's amplitude is rounding


@dataclass(frozen=True, slots=True, eq=False)
class Amplitude:
    """What a rotation multiplies by: a number, and a decay where that differs from position to position."""

    value: float
    decay: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Way:
    """One way from the vector to its rotated self: the number and the tables that it is multiplied by."""

    number: float = 1.0
    tables: tuple[_Table, ...] = ()


def table_positions(node: Node) -> list[int]:
    """Positions of the arguments that are tables: constant tensors of more than one number."""
    return [i for i, arg in enumerate(node.args) if isinstance(arg, Node) and not arg.act and math.prod(arg.shape) > 1]


def amplitude_of(node: Node, source: Node) -> Amplitude | None:
    """The amplitude of the rotation that leads from `source` to `node`; None where it is no single one."""
    ways = list(itertools.islice(_ways(node, source), _MOST + 1))
    turned = list({way.tables: way for way in ways if way.tables}.values())
    number = abs(turned[0].number) if turned else math.nan
    if len(ways) > _MOST or any(not math.isclose(abs(way.number), number, rel_tol=1e-3) for way in ways):
        return None
    amplitude = _of_tables([way.tables for way in turned])
    if amplitude is None:
        return None
    if not all(way.tables for way in ways) and (amplitude.decay is not None or abs(amplitude.value - 1) > _PURE):
        return None  # a part of the vector is not rotated, and has another length
    return replace(amplitude, value=amplitude.value * number)


def amplitude_of_points(node: Node, position: int) -> Amplitude | None:
    """The amplitude of a product with points of the plane: their distance from 0."""
    return _of_tables([((node, position),)])


def _of_tables(ways: Sequence[tuple[_Table, ...]]) -> Amplitude | None:
    """By the values of the tables; without, by the numbers that cosines and sines were multiplied by, if they tell."""
    if any(_is_without_values(*table) for way in ways for table in way):
        scales = {_scale_of_table(n.args[i]) for way in ways for n, i in way}
        scale = scales.pop() if len(scales) == 1 and all(len(way) == 1 for way in ways) else None
        if scale is not None:
            return Amplitude(scale)
    values = [[value for table in way if (value := _values(*table)) is not None] for way in ways]
    if any(len(known) < len(way) for known, way in zip(values, ways, strict=True)):
        return None
    return _measured(values)


def _is_without_values(node: Node, position: int) -> bool:
    value = node.operands.get(position)
    return value is None or value.is_meta


def _ways(node: Node, source: Node) -> Iterator[_Way]:
    if node is source:
        yield _Way()
        return
    for position, parent in _carriers(node):
        by = _multiplier(node, position)
        for way in _ways(parent, source):
            if isinstance(by, int):
                yield replace(way, tables=(*way.tables, (node, by)))
            else:
                yield replace(way, number=way.number * by)


def _carriers(node: Node) -> Iterator[tuple[int, Node]]:
    for i, arg in enumerate(node.args):
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(item, Node) and item.act and 0 not in item.shape and not (node.op == "copy" and i == 0):
                yield i, item


def _multiplier(node: Node, position: int) -> float | int:
    """The number that the operand at `position` is multiplied by, or the position (an int) of the table."""
    if node.op not in ("mul", "div", "addcmul") or (node.op == "addcmul" and position == 0):
        return 1.0
    tables = table_positions(node)
    if node.op == "addcmul":
        return next((i for i in tables if i > 0), 1.0)
    if tables:
        return tables[0]
    number = node.number(1 - position)
    if number is None:
        return math.nan
    return 1 / number if node.op == "div" and number else number


def _values(node: Node, position: int) -> Tensor | None:
    value = node.operands.get(position)
    if value is not None and value.is_meta:
        value = evaluate(node.args[position])
    if value is None:
        return None
    value = value.detach()
    return value.reciprocal() if node.op == "div" else value


def _measured(ways: Sequence[Sequence[Tensor]]) -> Amplitude | None:
    """The squared distance from 0 over all ways: a point brings it alone, a cosine or a sine brings half of it."""
    try:
        squares = [functools.reduce(torch.mul, map(_squared, way)) * _share(way) for way in ways]
    except RuntimeError:
        return None
    try:
        circles = functools.reduce(torch.add, squares) / len(squares)
    except RuntimeError:  # the parts of the vector have tables of unlike shapes
        return Amplitude(math.sqrt(sum(float(square.mean()) for square in squares) / len(squares)))
    return _even(circles, max(_rounding(value) for way in ways for value in way))


def _squared(value: Tensor) -> Tensor:
    return (value.abs() if value.is_complex() else value).to(torch.float64).square()


def _share(way: Sequence[Tensor]) -> int:
    return 1 if any(value.is_complex() for value in way) else 2


def _rounding(value: Tensor) -> float:
    return torch.finfo(value.dtype).eps if value.is_floating_point() or value.is_complex() else 0.0


def _even(circles: Tensor, eps: float) -> Amplitude | None:
    """One amplitude where all circles are equal but for rounding, else a decay."""
    low, high = (math.sqrt(float(v)) for v in torch.aminmax(circles))
    mean = math.sqrt(float(circles.mean()))
    if high - low <= (_PURE + 8 * eps) * mean:
        return Amplitude(mean)
    return Amplitude(1.0, circles.sqrt()) if low > 0 else None


def _scale_of_table(node: Node) -> float | None:
    """The numbers that a table without values was multiplied by; None where one of them is not known."""
    scale = 1.0
    while node.op in ops.VIEWS | ops.SAME | {"mul", "cat", "stack", "table"}:
        parent = node.main()
        if parent is None:
            break
        if node.op == "mul":
            number = next((n for n in (node.number(0), node.number(1)) if n is not None), None)
            if number is None:
                return None
            scale *= number
        node = parent
    length = _length(node.args[0]) if node.op == "polar" and isinstance(node.args[0], Node) else 1.0
    return None if length is None else scale * length


def _length(node: Node) -> float | None:
    """The distance from 0 that points were made with."""
    if node.op.startswith("ones") or node.op == "new_ones":
        return 1.0
    if node.op == "full_like":
        return node.number(1)
    value = evaluate(node)
    return None if value is None or bool((value != value.flatten()[0]).any()) else float(value.flatten()[0])
