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
from sqrtdk.tracing.watch.graph import Node, replay

if TYPE_CHECKING:
    from sqrtdk.tracing.read.side import Side

    Follow = Callable[[Node, str], Side]


def padded(node: Node, main: Node, where: str, follow: Follow) -> Side:
    """Zeros around the values: behind the features they make the head wider."""
    side = follow(main, where)
    pads = node.args[1]
    if len(pads) >= 2 and any(p > 0 for p in pads[:2]) and not any(pads[2:]):
        stage = Stage(where, "pad", f"{main.shape[-1]} to {node.shape[-1]}")
        side = side.then(stage, padding=side.padding + int(sum(pads[:2])))
    else:
        side = side.then(Stage(where, "pad"))
    return side if side.basis is None else replace(side, basis=replay(node, side.basis))


def joined(node: Node, where: str, follow: Follow) -> Side:
    """Pieces of different origin put side by side: each is followed, and their factors must agree."""
    pieces = [p for p in node.parents() if p.act]
    constants = [p for p in node.parents() if not p.act]
    dim = int(node.args[1]) if len(node.args) > 1 else 0
    if any(math.prod(p.shape) for p in constants):
        side = follow(pieces[0], where)
        if len(pieces) > 1 or dim not in (-1, len(node.shape) - 1) or not all("zeros" in p.op for p in constants):
            # keys of the model's own beside the projected ones (memory keys): the latter's scale is read
            return side.then(Stage(where, "cat", "constant"), basis=None)
        extra = node.shape[-1] - pieces[0].shape[-1]
        basis = None if side.basis is None else functional.pad(side.basis, (0, extra))
        stage = Stage(where, "pad", f"{pieces[0].shape[-1]} to {node.shape[-1]}")
        return side.then(stage, padding=side.padding + extra, basis=basis)
    sides = [follow(p, where) for p in pieces]
    if len(sides) == 1:
        return sides[0]
    bases = [side.basis for side in sides if side.basis is not None]
    return together(sides, basis=torch.cat(bases, dim) if len(bases) == len(sides) else None)


def together(sides: Sequence[Side], **changes: object) -> Side:
    """What pieces of different origin have in common; their factors must agree."""
    first = sides[0]
    unknown = [name for side in sides for name in side.unknown]
    if any(abs(side.factor - first.factor) > 1e-3 * abs(first.factor) for side in sides):
        unknown.append("pieces with unlike factors")
    whole = replace(
        first,
        root=first.root if all(side.root is first.root for side in sides) else None,
        stages=tuple(dict.fromkeys(stage for side in sides for stage in side.stages)),
        norm_gain=any(side.norm_gain for side in sides),
        rope=any(side.rope for side in sides),
        growth=min(side.growth for side in sides),
        padding=0,
        unknown=tuple(unknown),
    )
    return whole.then(**changes)


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
        padding=node.shape[-1] - covered if wider else 0,
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
