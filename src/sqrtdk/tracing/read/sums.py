"""Q or k as a sum of two branches: a factor or a rotation before the sum is one of the sum where both carry it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.tracing.read.pieces import together
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node

if TYPE_CHECKING:
    from sqrtdk.tracing.read.side import Side

_PROJECTED = frozenset(ops.CONTRACTIONS) | ops.PROJECTIONS - {"embedding"}


def summed(node: Node, where: str, follow: Callable[[Node, str], Side]) -> Side | None:
    """The side of a sum of branches; None where nothing stands before it, so that it is a start of its own."""
    sides = [follow(branch, where) for branch, _ in node.branches]
    if not any(_carries(side) for side in sides) or _adapts(*sides) or _adapts(*sides[::-1]):
        return None
    if any(side.rope != sides[0].rope for side in sides):
        return together(sides, root=node, basis=None).lost(where, "a rotation before a sum of branches")
    norm = sides[0].norm if all(side.norm == sides[0].norm for side in sides) else None
    return together(sides, root=node, basis=_sum(node, sides), norm=norm)


def _carries(side: Side) -> bool:
    """Whether a branch is a projection with something after it that belongs to q or k."""
    projected = side.root is None or side.root.op in _PROJECTED
    return projected and bool(side.factors or side.rope)


def _adapts(whole: Side, other: Side) -> bool:
    """Whether a branch is an adapter of the `whole` one, B A x beside W x (Hu et al. 2021): its factor is its own."""
    shared, deeper = whole.start.lineage & other.start.lineage, len(other.start.lineage) > len(whole.start.lineage)
    return not _carries_any(whole) and bool(shared) and deeper and other.start.source != whole.start.source


def _carries_any(side: Side) -> bool:
    return bool(side.factors or side.rope or side.norm)


def _sum(node: Node, sides: Sequence[Side]) -> Tensor | None:
    values = [side.basis * by for side, (_, by) in zip(sides, node.branches, strict=True) if side.basis is not None]
    if len(values) < len(sides):
        return None
    try:
        return torch.broadcast_to(values[0] + values[1], node.shape)
    except RuntimeError:
        return None
