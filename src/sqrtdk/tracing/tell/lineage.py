"""Q, k or v at every step from the projection to where it is used, in the layout that it is used in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sqrtdk.tracing.classify.effect import ROTATION
from sqrtdk.tracing.probe.norms import name_of_gain, norm_within
from sqrtdk.tracing.read.factors import multiplied
from sqrtdk.tracing.read.regroup import regrouped
from sqrtdk.tracing.read.rotations import rotated, turned_by_matrix
from sqrtdk.tracing.read.side import Side
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.writes import part, written

_JOINS = frozenset({"cat", "stack"})
_LINEAR = frozenset({"mul", "div", "neg", *ops.SAME, *ops.VIEWS, *_JOINS})


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Several operations that are one step: `end` is made from `source`; of a norm `gain` is the gain's name."""

    name: str
    detail: str
    source: Node
    end: Node
    order: Tensor | None = None  # the number in `source` of each of the end's; None where each is in its place
    gain: str = ""


@dataclass(slots=True, eq=False)
class Lineage:
    """The steps on the way to a node.

    Attributes:
        node: where the way ends.
        spans: steps, nearest to the end first.
        roots: where it begins.
        shifted: what a vector that is no activation was added to, nearest to the end first: a bias that came late.
    """

    node: Node
    spans: list[Span] = field(default_factory=list)
    roots: list[Node] = field(default_factory=list)
    shifted: list[Node] = field(default_factory=list)

    def carried(self, starts: dict[Node, Tensor]) -> Tensor | None:
        """Values in the end's layout, of those of some nodes on the way: a step keeps every number in its place."""
        ends = {span.end: span for span in self.spans}

        def start(node: Node) -> Tensor | None:
            if node in starts:
                return starts[node]
            span = ends.get(node)
            if span is not None:
                value = valued(span.source)
                if value is not None and span.order is not None:
                    value = value.reshape(-1)[span.order.to(value.device)]
                return None if value is None else _in_shape(value, node)
            return _written(node, valued) if node.op == "overwrite" else None

        def valued(node: Node) -> Tensor | None:
            value = start(node)
            return regrouped(node, start) if value is None else value

        return valued(self.node)


def lineage(node: Node) -> Lineage:
    """Follow a node back to its projections."""
    way = Lineage(node)
    queue, known = [node], set[Node]()
    while queue:
        current = queue.pop(0)
        if current in known:
            continue
        known.add(current)
        main = current.main()
        if (matrix := _by_matrix(current)) is not None:
            way.spans.append(matrix)
            queue.append(matrix.source)
        elif current.is_root or not current.act or main is None:
            way.roots.append(current)
        elif (span := _span(current)) is not None:
            way.spans.append(span)
            queue.append(span.source)
        elif current.op in _JOINS:
            queue.extend(parent for parent in current.parents() if parent.act)
        elif (pieces := _pieces(current)) is not None:
            queue.extend(source for _, source in pieces)
        else:
            if current.op in ("add", "sub") and sum(parent.act for parent in current.parents()) == 1:
                way.shifted.append(current)
            elif current.op not in _LINEAR:
                way.spans.append(Span("unknown", current.op, main, current))
            queue.append(main)
    return way


def _span(node: Node) -> Span | None:
    if (within := norm_within(node)) is not None:
        norm, operations = within
        return Span("norm", norm.kind, norm.part.source, node, gain=name_of_gain(operations))
    if node.op == ROTATION:
        main = node.main()
        return None if main is None else Span("rope", "by its effect", main, node)
    main = node.main()
    side: Side | None
    if node.op == "mul" and main is not None and any(value.is_complex() for value in node.operands.values()):
        side = multiplied(node, main, "q", _alone)
    else:
        side = rotated(node, "q", _alone)
    if side is None or not side.rope or side.root is None or side.unknown:
        return None
    return Span("rope", "", side.root, node, _order(node, side.root))


def _alone(source: Node, where: str) -> Side:
    """The side of a node without what was before."""
    return Side(None, source)


def _by_matrix(node: Node) -> Span | None:
    """A rotation by a table of matrices, which is a root of its own."""
    if len(node.branches) != 1 or node.op == "convolution":
        return None
    side = turned_by_matrix(node, "q", _alone)
    if side is None or not side.rope or side.root is None or side.unknown:
        return None
    return Span("rope", "", side.root, node)


def _order(node: Node, source: Node) -> Tensor | None:
    """Where each number of a rotated vector was, where the channels of a pair were put in another order."""
    count = torch.Size(source.shape).numel()
    numbers = torch.arange(count, dtype=torch.float64).reshape(source.shape)
    moved = regrouped(node, lambda other: numbers if other is source else None)
    if moved is None or moved.numel() != count or moved.is_complex():
        return None
    order = moved.reshape(-1).long()
    in_place = torch.arange(count)
    return order if bool((order.sort().values == in_place).all()) and bool((order != in_place).any()) else None


def _pieces(node: Node) -> list[tuple[Node, Node]] | None:
    """Where pieces were written, and what; the first one first. None of what is no new tensor written whole."""
    base, writes = written(node)
    if not writes or base.act:
        return None
    pieces = []
    for write in writes:
        source = write.args[1] if write.op == "copy" and len(write.args) > 1 else None
        if not isinstance(source, Node) or not source.act or write.args[0].op not in ops.VIEWS:
            return None
        pieces.append((write, source))
    return pieces


def _written(node: Node, valued: Callable[[Node], Tensor | None]) -> Tensor | None:
    """The values of pieces, each in its place; what was not written is no number, or -1."""
    whole: Tensor | None = None
    for write, source in _pieces(node) or ():
        value = valued(source)
        if value is None:
            return None
        if whole is None:
            whole = value.new_full(node.shape, float("nan") if value.is_floating_point() else -1)
        part(write, whole).copy_(value)
    return whole


def _in_shape(value: Tensor, node: Node) -> Tensor | None:
    """Values in the shape of what a step made of them."""
    if tuple(value.shape) == node.shape:
        return value
    if node.op == "complex" and value.numel() == 2 * torch.Size(node.shape).numel():
        return torch.view_as_complex(value.reshape(*node.shape, 2))
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.reshape(node.shape) if value.numel() == torch.Size(node.shape).numel() else None
