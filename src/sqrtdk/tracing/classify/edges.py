"""Graph attention: one logit an edge, and a softmax over the edges of each node, by sums that are scattered.

A score is (q[target] * k[source]).sum(-1), or additive, as any other of `pairs`; the softmax is exp(z) over its sum for
the edge's node (Velickovic et al. 2018, arXiv:1710.10903; PyTorch Geometric's `softmax(src, index)`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.marks import EdgeGroups, Weighing

# Positions of what is reduced, of the axis (None: a keyword) and of the kind of reduction, or that kind.
_GROUPED: dict[str, tuple[int, int | None, int | str]] = {
    "scatter_add": (3, 1, "sum"),
    "index_add": (3, 1, "sum"),
    "scatter_reduce": (3, 1, 4),
    "index_reduce": (3, 1, 4),
    "index_put": (2, None, "sum"),
    "segment_reduce": (0, None, 1),
    "scatter_max": (0, 2, "amax"),  # this and the next of torch_scatter
    "segment_sum_csr": (0, None, "sum"),
    "segment_max_csr": (0, None, "amax"),
}
BACK = ops.VIEWS | ops.SAME | {"gather", "gather_csr"}  # from the nodes to their edges
INDEX = 2  # position of the numbers of the groups
OTHER_GROUPS = "softmax over the edges of other nodes than the values are summed for"


class Reduction(NamedTuple):
    """A reduction by groups: what is reduced, along which axis, how ("sum", "mean", "amax"), to how many groups."""

    reduced: Node
    axis: int
    kind: str
    groups: int


def reduction(node: Node) -> Reduction | None:
    """The reduction by groups that a node is; None for any other."""
    place, axis_at, how = _GROUPED.get(node.op, (0, None, ""))
    reduced = node.args[place] if how and len(node.args) > place else None
    overwrites = node.op == "index_put" and (len(node.args) < 4 or not node.args[3])
    if not isinstance(reduced, Node) or not reduced.shape or overwrites:
        return None
    axis = int(node.kwargs.get("axis", 0) if axis_at is None else node.args[axis_at]) % len(reduced.shape)
    kind = how if isinstance(how, str) else str(node.args[how])
    return Reduction(reduced, axis, {"max": "amax"}.get(kind, kind), node.shape[axis])


def sums_values(node: Node) -> bool:
    """Whether a node sums, or averages, what each group of edges brought."""
    grouped = reduction(node)
    return grouped is not None and grouped.kind in ("sum", "mean")


def log_total(node: Node) -> Node | None:
    """The sums by groups whose logarithm `node` is, brought back to the edges, with a maximum added or not."""
    while node.op in BACK | {"add"} and not node.is_root:
        parent = node.main()
        if parent is None:
            return None
        node = parent
    inner = node.main() if node.op == "log" else None
    while inner is not None and inner.op in ops.CLAMPS | {"add"}:  # a guard against zero
        inner = inner.main()
    return inner if inner is not None and sums_values(inner) else None


def is_of_groups(node: Node) -> bool:
    """Whether a node is the largest logit of each group of edges, or the logarithm of its sum of exponentials."""
    if log_total(node) is not None:
        return True
    while node.op in BACK and not node.is_root:
        parent = node.main()
        if parent is None:
            return False
        node = parent
    grouped = reduction(node)
    return grouped is not None and grouped.kind == "amax"


def groups_of(total: Node) -> EdgeGroups:
    """The groups of a softmax that is divided by the sums `total`."""
    grouped = reduction(total)
    assert grouped is not None
    index = total.operands.get(INDEX)
    known = index is not None and not index.is_meta and not index.is_floating_point()
    return EdgeGroups(grouped.axis, grouped.groups, _column(index, grouped.axis) if known else None)


def group_fault(weighing: Weighing, index: Tensor | None) -> str | None:
    """What is wrong where the values are summed by another grouping of the edges than the softmax's."""
    groups = weighing.edges
    if groups is None or groups.index is None or index is None or index.is_meta or index.is_floating_point():
        return None
    return None if torch.equal(groups.index, _column(index, groups.axis)) else OTHER_GROUPS


def _column(index: Any, axis: int) -> Tensor:
    """The number of each edge's group, of an index that was repeated over heads and features."""
    column: Tensor = index if index.dim() < 2 else index.movedim(axis, 0).flatten(1)[:, 0]
    return column
