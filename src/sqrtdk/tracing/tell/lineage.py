"""Q, k or v at every step from the projection to where it is used, in the layout that it is used in."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sqrtdk.tracing.classify.effect import ROTATION
from sqrtdk.tracing.read.regroup import regrouped
from sqrtdk.tracing.read.rotary import rotated
from sqrtdk.tracing.read.side import Side
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, dominator

_JOINS = frozenset({"cat", "stack"})
_LINEAR = frozenset({"mul", "div", "neg", *ops.SAME, *ops.VIEWS, *_JOINS})


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Several operations that are one step: `end` is made from `source`."""

    name: str
    detail: str
    source: Node
    end: Node


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
        ends = {span.end: span.source for span in self.spans}

        def start(node: Node) -> Tensor | None:
            if node in starts:
                return starts[node]
            source = ends.get(node)
            if source is None:
                return None
            value = start(source)
            value = regrouped(source, start) if value is None else value
            return None if value is None else _in_shape(value, node)

        value = start(self.node)
        return regrouped(self.node, start) if value is None else value


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
        if current.is_root or not current.act or main is None:
            way.roots.append(current)
        elif (span := _span(current)) is not None:
            way.spans.append(span)
            queue.append(span.source)
        elif current.op in _JOINS:
            queue.extend(parent for parent in current.parents() if parent.act)
        else:
            if current.op in ("add", "sub") and sum(parent.act for parent in current.parents()) == 1:
                way.shifted.append(current)
            elif current.op not in _LINEAR:
                way.spans.append(Span("unknown", current.op, main, current))
            queue.append(main)
    return way


def _span(node: Node) -> Span | None:
    if node.norm is not None:
        inner = node
        while inner.op in ("mul", "add", *ops.SAME) and (main := inner.main()) is not None and main.norm is not None:
            inner = main
        source = inner.main() if inner.op in ops.NORMS or len(list(inner.parents())) < 2 else dominator(inner)[0]
        return None if source is None else Span("norm", node.norm.kind, source, node)
    if node.op == ROTATION:
        main = node.main()
        return None if main is None else Span("rope", "by its effect", main, node)
    side = rotated(node, "q", lambda source, _: Side(None, source))
    if side is None or not side.rope or side.root is None:
        return None
    return Span("rope", "", side.root, node)


def _in_shape(value: Tensor, node: Node) -> Tensor | None:
    """Values in the shape of what a step made of them."""
    if tuple(value.shape) == node.shape:
        return value
    if node.op == "complex" and value.numel() == 2 * torch.Size(node.shape).numel():
        return torch.view_as_complex(value.reshape(*node.shape, 2))
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.reshape(node.shape) if value.numel() == torch.Size(node.shape).numel() else None
