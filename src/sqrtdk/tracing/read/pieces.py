"""Sides that were put together from pieces: concatenated, written slice by slice, or made wider with zeros."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, numbered, replay

if TYPE_CHECKING:
    from sqrtdk.tracing.read.side import Side

    Follow = Callable[[Node, str], Side]


def padded(node: Node, main: Node, where: str, follow: Follow) -> Side:
    """Zeros around the values; where they lie along the features they make the head wider."""
    side = follow(main, where)
    shapes = zip(reversed(main.shape), reversed(node.shape), strict=True)
    grown = [(-1 - i, before, after) for i, (before, after) in enumerate(shapes) if after > before]
    detail = f"{grown[0][1]} to {grown[0][2]}" if len(grown) == 1 and grown[0][0] == -1 else ""
    side = side.then(
        Stage(where, "pad", detail), pads=(*side.pads, *((axis, after - before) for axis, before, after in grown))
    )
    return side if side.basis is None else replace(side, basis=replay(node, side.basis))


def joined(node: Node, where: str, follow: Follow) -> Side:
    """Pieces of different origin put side by side: each is followed, and their factors must agree."""
    pieces = [p for p in node.parents() if p.act]
    constants = [p for p in node.parents() if not p.act]
    dim = int(node.args[1]) if len(node.args) > 1 else 0
    if any(math.prod(p.shape) for p in constants):
        side = follow(pieces[0], where)
        axis = dim % len(node.shape) - len(node.shape)
        if len(pieces) > 1 or axis < -2 or not all("zeros" in p.op for p in constants):
            # keys of the model's own beside the projected ones (memory keys): the latter's scale is read
            return side.then(Stage(where, "cat", "constant"), basis=None)
        before, after = pieces[0].shape[axis], node.shape[axis]
        basis = None if side.basis is None else functional.pad(side.basis, (0, 0) * (-1 - axis) + (0, after - before))
        stage = Stage(where, "pad", f"{before} to {after}")
        return side.then(stage, pads=(*side.pads, (axis, after - before)), basis=basis)
    sides = [follow(p, where) for p in pieces]
    if len(sides) == 1:
        return sides[0]
    bases = [side.basis for side in sides if side.basis is not None]
    return together(sides, basis=torch.cat(bases, dim) if len(bases) == len(sides) else None)


def moved(pads: tuple[tuple[int, int], ...], before: Node, view: Node) -> tuple[tuple[int, int], ...]:
    """Pads after a view of the padded tensor; those that it cut off are gone."""
    return tuple((axis, count) for old, count in pads if (axis := _axis_after(old, before, view)) is not None)


def _axis_after(axis: int, before: Node, view: Node) -> int | None:
    """Where an axis went, counted from the end; None where it was cut, or spread over several."""
    size = before.shape[axis]
    if view.op == "unfold" and int(view.args[1]) % len(before.shape) == axis % len(before.shape):
        return None  # cut into windows
    try:
        line = replay(view, numbered(before.shape, axis % len(before.shape)))
    except (RuntimeError, IndexError):
        return axis
    varying = [d for d, n in enumerate(line.shape) if n > 1 and bool((line != line.narrow(d, 0, 1)).any())]
    if len(varying) == 1 and line.shape[varying[0]] == size:
        return varying[0] - line.dim()
    last = line.shape[-1]  # features are merged with heads, and split from them again
    same = axis == -1 and line.numel() == math.prod(before.shape) and (last % size == 0 or size % last == 0)
    return axis if same else None


def together(sides: Sequence[Side], **changes: object) -> Side:
    """What pieces of different origin have in common; their factors must agree."""
    first = sides[0]
    unknown = [name for side in sides for name in side.unknown]
    if not all(_alike(side, first) for side in sides):
        unknown.append("pieces with unlike factors")
    whole = replace(
        first,
        root=first.root if all(side.root is first.root for side in sides) else None,
        stages=tuple(dict.fromkeys(stage for side in sides for stage in side.stages)),
        norm_gain=any(side.norm_gain for side in sides),
        rope=any(side.rope for side in sides),
        growth=min(side.growth for side in sides),
        pads=(),
        unknown=tuple(unknown),
    )
    return whole.then(**changes)


def _alike(side: Side, other: Side) -> bool:
    """Whether their factors come to the same; those of unknown value where they are the same ones."""
    if math.isnan(side.factor) or math.isnan(other.factor):
        return [replace(f, where="") for f in side.factors] == [replace(f, where="") for f in other.factors]
    return abs(side.factor - other.factor) <= 1e-3 * abs(other.factor)


def assembled(node: Node, where: str, follow: Follow) -> Side:
    """A tensor written slice by slice: like pieces put side by side."""
    places: list[Node] = []
    sources: list[Node] = []
    base = node
    while base.op == "overwrite":
        old, new = base.args
        if new.op != "copy" or not isinstance(new.args[1], Node) or new.args[0].op not in ops.VIEWS:
            return follow(old if old.act else new, where).lost(where, f"{new.op} in place", basis=None)
        places.append(new.args[0])
        sources.append(new.args[1])
        base = old
    pieces = [follow(source, where) for source in sources]
    beneath = [follow(base, where)] if base.act else []
    covered = sum(place.shape[-1] for place in places)
    zeros = not beneath and "zeros" in base.op and covered < node.shape[-1]
    wider = zeros and places[0].shape[:-1] == node.shape[:-1]
    side = together(
        [*beneath, *pieces],
        basis=_written(node, places, pieces, beneath),
        root=pieces[0].root if len(pieces) == 1 and not beneath else None,
        pads=((-1, node.shape[-1] - covered),) if wider else (),
    )
    return side.then(Stage(where, "pad", f"{covered} to {node.shape[-1]}")) if wider else side


def _written(node: Node, places: Sequence[Node], pieces: Sequence[Side], beneath: Sequence[Side]) -> Tensor | None:
    """The values of pieces written to their places, the first written last among `places`."""
    values = [side.basis for side in (*pieces, *beneath) if side.basis is not None]
    if len(values) < len(pieces) + len(beneath):
        return None
    basis = values[-1].clone() if beneath else values[0].new_zeros(node.shape)
    for place, value in zip(reversed(places), reversed(values[: len(pieces)]), strict=True):
        replay(place, basis).copy_(value)
    return basis
