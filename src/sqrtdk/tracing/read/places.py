"""Which positions of a sequence a block of queries or keys is, told from the views that cut it out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, dominator, replay


@dataclass(frozen=True, slots=True)
class Place:
    """Positions `first` and following of the tensor that `source` is, whose axis has `total` of them."""

    source: Node
    axis: int
    first: int
    total: int


def place(operand: Node, axis: int) -> Place | None:
    """Where the vectors along an axis of a product's operand come from; None where they do not follow one another."""
    way: list[Node] = []
    node: Node | None = operand
    while node is not None and not node.is_root and node.act:
        main = node.main()
        if node.op in ops.VIEWS:
            way.append(node)
        elif main is None or main.shape != node.shape or sum(p.act for p in node.parents()) != 1:
            main = dominator(node)[0]  # a rotation leaves every vector at its place
            if main is None or main.shape != node.shape:
                break
        node = main
    if node is None:
        return None
    return _first(node, way, operand, axis)


def _first(source: Node, way: list[Node], operand: Node, axis: int) -> Place | None:
    alone: list[Place] = []  # of a single vector, whose axis only its place tells
    for along, total in enumerate(source.shape):
        if total == 1:
            continue
        line = torch.arange(total, device="cpu").view([-1 if d == along else 1 for d in range(len(source.shape))])
        line = line.expand(source.shape)
        try:
            for view in reversed(way):
                line = replay(view, line)
        except (RuntimeError, IndexError, TypeError):
            return None
        numbers = line.movedim(axis, -1).reshape(-1, operand.shape[axis])[0]
        if len(numbers) == 1:
            alone += (
                [Place(source, along, int(numbers[0]), total)] if numbers[0] and along < len(source.shape) - 1 else []
            )
            continue
        if bool((numbers[1:] - numbers[:-1] == 1).all()):
            return Place(source, along, int(numbers[0]), total)
        if bool((numbers != numbers[0]).any()):
            return None
    return alone[0] if len(alone) == 1 else None
