"""Recognises a softmax, by its operator or written by hand, and starts the lineage of its weights.

In graph attention it runs over the edges of each node, with scattered sums (Velickovic et al. 2018, arXiv:1710.10903;
PyTorch Geometric's `softmax(src, index)`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.lower.online import is_sum
from sqrtdk.tracing.lower.pairs import first_behind, is_additive
from sqrtdk.tracing.lower.sums import sums_to_products
from sqrtdk.tracing.records import CallFault, NotAttentionCode
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import alias
from sqrtdk.tracing.tape.node import (
    ROW_SHIFTS,
    EdgeGroups,
    Node,
    SoftmaxEntry,
    SoftmaxRun,
    Weights,
    WeightSteps,
    origin,
)
from sqrtdk.tracing.tape.recorder import RecordedOutput, Scene

# Positions of the reduced tensor, of the axis (None: a keyword), and of the kind of reduction, or the kind itself.
_GROUPED: dict[str, tuple[int, int | None, int | str]] = {
    "scatter_add": (3, 1, "sum"),
    "index_add": (3, 1, "sum"),
    "scatter_reduce": (3, 1, 4),
    "index_reduce": (3, 1, 4),
    "index_put": (2, None, "sum"),
    "segment_reduce": (0, None, 1),
    "scatter_max": (0, 2, "amax"),  # this and the next two are torch_scatter's
    "segment_sum_csr": (0, None, "sum"),
    "segment_max_csr": (0, None, "amax"),
}
BACK_TO_EDGES = ops.PASSING | {"gather", "gather_csr"}  # bring one number per node back to the node's edges
INDEX_ARGUMENT = 2  # position of the group index: src.scatter_add(0, index, ...)
_TO_MAXIMUM = BACK_TO_EDGES | {"masked_fill", "maximum"}
LARGEST_EPSILON = 1e-2  # e / (s + 1e-6): an addend up to this is an epsilon, a larger one an extra weight (a sink of 1)


def begin_softmax(
    scene: Scene,
    made: RecordedOutput,
    logits: Tensor,
    dim: int,
    *,
    sinks: bool = False,
    edges: EdgeGroups | None = None,
) -> SoftmaxRun:
    """Makes a node the weights of a softmax, and returns the softmax.

    Args:
        scene: the trace.
        made: the weights; the first argument of their node is the node of the logits.
        logits: values of the logits.
        dim: axis of the softmax.
        sinks: True if the denominator has more terms than the keys.
        edges: the groups, if the softmax runs over the edges of a graph.
    """
    node = made.node
    parent = node.args[0]
    sums_to_products(parent, edges=edges is not None)
    behind_it = parent if parent.products else parent.lost_logits
    origin_product = None if behind_it is None else next(iter(behind_it.products))
    site = node.site if origin_product is None else origin_product.site
    code: NotAttentionCode = "never_used" if origin_product is None else "lost_sight"
    entry = SoftmaxEntry(site, node.shape, code, place=node.place)
    product = None if origin_product is None else origin_product.product
    softmax_run = SoftmaxRun(
        node=parent,
        logits=alias(logits),
        weights=alias(made.tensor),
        dim=dim,
        op=f"aten.{node.op}",
        entry=entry,
        flex=scene.flex,
        stored=logits.dtype if product is None else product.dtype.to_real(),
        sinks=sinks,
        edges=edges,
        ended=scene.listener.ended,
    )
    scene.entries.append(entry)
    scene.store.softmax_runs.add(softmax_run)
    node.args = ()
    node.products = frozenset()
    node.weights = Weights(softmax_run)
    return softmax_run


def softmax_of_rows(scene: Scene, made: RecordedOutput, parents: list[Node]) -> None:
    """Begin the softmax of PyTorch Geometric's `softmax_csr(src, ptr, dim)`; group i is `src[ptr[i]:ptr[i + 1]]`.

    Args:
        scene: state of the trace.
        made: the weights.
        parents: the nodes of `src` and `ptr`.
    """
    args = made.node.args
    axis = int(args[2]) if len(args) > 2 else 0
    groups = EdgeGroups(axis, max(math.prod(parents[1].shape) - 1, 0))
    begin_softmax(scene, made, made.tensors[0], axis, edges=groups)


def is_softmax_by_hand(scene: Scene, made: RecordedOutput) -> bool:
    """Return whether a node completes a softmax written by hand; if so, the softmax is begun.

    The forms are exp(z) / exp(z).sum(-1) and exp(z - logsumexp(z)), also by groups of edges.
    """
    node = made.node
    if node.op == "exp":
        return _from_logarithm(scene, made)
    above, below = _fraction(node)
    if above is None or below is None:
        return False
    top, (total, sinks) = origin(above), _total(below)
    if total is None:
        return False
    if (grouped := reduction(total)) is not None:
        if top.op != "exp" or origin(grouped.reduced) is not top:
            return _summed_before(scene, made, top, total)
    elif (summed := total.main()) is None or origin(summed, ops.CASTS_AND_COPIES) is not origin(
        above, ops.CASTS_AND_COPIES
    ):
        return False  # casts are skipped on both sides, because JAX ports sum in float32 between bfloat16 steps
    if top.op != "exp" or 0 not in top.operands:
        return False  # exp of something that is not a score: its input was not kept
    inner = top.args[0]
    if is_sum(inner.args[0] if inner.op == "sub" else inner):
        return False
    node.args = (inner,)
    if grouped is None:
        axes = total.args[1] if len(total.args) > 1 and total.args[1] else range(len(top.shape))
        softmax_run = begin_softmax(scene, made, top.operands[0], int(axes[0]) if len(axes) == 1 else -1, sinks=sinks)
        if len(axes) > 1:  # e / e.sum((-2, -1), keepdim=True): a row of weights does not sum to 1
            node.weights = Weights(softmax_run, WeightSteps().changed(Message("trace.step.several_axes")))
    else:
        begin_softmax(scene, made, top.operands[0], grouped.axis, edges=groups_of(total))
    return True


def _fraction(node: Node) -> tuple[Node | None, Node | None]:
    """Return the numerator and the denominator of e / s or e * (1 / s); (None, None) for any other node."""
    pair = [arg for arg in node.args[:2] if isinstance(arg, Node)]
    if len(pair) < 2 or node.op not in ("div", "mul"):
        return None, None
    if node.op == "div":
        return pair[0], pair[1]
    for above, inverse in (pair, pair[::-1]):
        share = origin(inverse, ops.CASTS_AND_COPIES)
        share = share.args[0] if share.op == "mul" and share.number(1) == 1.0 else share  # 1 / s is s.reciprocal() * 1
        if share.op == "reciprocal":
            return above, share.main()
    return None, None


def _summed_before(scene: Scene, made: RecordedOutput, top: Node, total: Node) -> bool:
    """Whether a node is a whole graph attention: the sum over edges of exp(z) v, divided by the sum of exp(z)."""
    above, below = reduction(top), reduction(total)
    weighted = origin(above.reduced) if above is not None and not top.is_root else None
    bottom = None if below is None else origin(below.reduced)
    if weighted is None or weighted.op != "mul" or bottom is None or bottom.op != "exp" or 0 not in bottom.operands:
        return False
    place = next((i for i, arg in enumerate(weighted.args) if isinstance(arg, Node) and origin(arg) is bottom), None)
    values = None if place is None else weighted.operands.get(1 - place)
    if values is None:
        return False
    logits, groups = bottom.operands[0], groups_of(total)
    node = Node("div", tuple(logits.shape), args=(bottom.args[0],), act=True, site=made.node.site)
    softmax_run = begin_softmax(scene, replace(made, node=node, tensor=logits), logits, groups.axis, edges=groups)
    softmax_run.entry.attention = True
    softmax_run.fault = group_fault(softmax_run, top.operands.get(INDEX_ARGUMENT))
    scene.listener.eager(softmax_run, alias(values), made.tensor)
    scene.store.cut(made.node, made.tensor)
    return True


def may_be_numerator(inner: Node) -> bool:
    """Return whether exp(`inner`) may belong to a softmax, although `inner` holds no product of queries and keys.

    It may for z - max(z), and for an additive score.
    """
    other = inner.args[1] if inner.op == "sub" and len(inner.args) > 1 else None
    return (isinstance(other, Node) and is_maximum(other)) or is_additive(inner)


def _from_logarithm(scene: Scene, made: RecordedOutput) -> bool:
    """Whether `exp` makes a softmax: of a log-softmax, or of z - logsumexp(z)."""
    node = made.node
    inner = origin(node.args[0])
    taken_off = inner.args[1] if inner.op == "sub" and not inner.is_root and len(inner.args) > 1 else None
    total = log_total(taken_off) if isinstance(taken_off, Node) else None
    if total is not None:  # exp(z - log(sums)[index]): a softmax over the edges of a graph
        groups = groups_of(total)
        node.args = (inner,)
        begin_softmax(scene, made, made.tensors[0], groups.axis, edges=groups)
        return True
    if not node.products:
        return False
    if inner.op == "_log_softmax":
        node.args = (inner.args[0],)
        begin_softmax(scene, made, inner.operands[0], int(inner.args[1]))
        return True
    if inner.op == "sub" and is_sum(inner.args[0]):
        return False
    axes = _less_logsumexp(inner)
    if axes is None:
        return False
    node.args = (inner,)
    softmax_run = begin_softmax(scene, made, made.tensors[0], axes[0] if len(axes) == 1 else -1)
    if _in_turn(inner, axes):  # z - z.logsumexp(-1), then - z.logsumexp(-2), and so on: the last one ends Sinkhorn
        node.weights = Weights(softmax_run, WeightSteps().changed(Message("trace.step.sinkhorn"), "sinkhorn"))
    return True


def _less_logsumexp(node: Node) -> tuple[int, ...] | None:
    """Return the axes of the logsumexp in z - logsumexp(z), or None for any other node."""
    if node.op != "sub" or node.is_root or not isinstance(node.args[1], Node):
        return None
    total = origin(node.args[1])
    if total.op != "logsumexp" or total.is_root:
        return None
    return tuple(int(axis) % len(node.shape) for axis in total.args[1])


def _in_turn(node: Node, axes: tuple[int, ...]) -> bool:
    """Whether another logsumexp over other axes was subtracted before: Sinkhorn's rows and columns in turn."""
    while (before := node.main()) is not None and (earlier := _less_logsumexp(node := origin(before))) is not None:
        if earlier != axes:
            return True
    return False


def is_maximum(node: Node) -> bool:
    """Return whether the node is the maximum of each row, also after a mask: z.masked_fill(m, 0).amax(-1)."""
    largest = first_behind(node, _TO_MAXIMUM)
    return largest is not None and (largest.op in ROW_SHIFTS or is_of_groups(largest))


def _total(bottom: Node) -> tuple[Node | None, bool]:
    """Return the sum (or sums by group) in a divisor such as s + 1e-6, and whether more than an epsilon was added."""
    sinks = False
    # A root has no arguments left: the knots of a spline divide by a difference of such sums.
    while not bottom.is_root and bottom.op in BACK_TO_EDGES | ops.CLAMPS | {"add", "masked_fill"}:
        parent = bottom.main()
        if bottom.op == "add":
            weight = next((i for i in (0, 1) if _is_weight(bottom, i)), None)
            sinks |= weight is not None
            parent = bottom.args[1] if weight == 0 else parent
        if not isinstance(parent, Node):
            return None, False
        bottom = parent
    grouped = reduction(bottom)
    summed = bottom.op == "sum" if grouped is None else grouped.kind == "sum"
    return (bottom if summed and not bottom.is_root else None), sinks


def _is_weight(added: Node, position: int) -> bool:
    """Whether the addend is a weight, exp(sink) or 1, and no epsilon against a division by zero."""
    addend = added.args[position]
    if isinstance(addend, Node) and origin(addend).op == "exp":
        return True
    number = added.number(position)
    return number is not None and number > LARGEST_EPSILON


# -- edges of a graph --------------------------------------------------------------------------------------------------


class Reduction(NamedTuple):
    """A reduction by groups, such as `scatter_add` or `index_add`.

    Attributes:
        reduced: node of the tensor that is reduced.
        axis: axis of the edges, at least 0.
        kind: "sum", "mean" or "amax", or another name of PyTorch's.
        groups: number of groups.
    """

    reduced: Node
    axis: int
    kind: str
    groups: int


def reduction(node: Node) -> Reduction | None:
    """Return a node as a reduction by groups, or None if it is none."""
    place, axis_at, how = _GROUPED.get(node.op, (0, None, ""))
    reduced = node.args[place] if how and len(node.args) > place else None
    overwrites = node.op == "index_put" and (len(node.args) < 4 or not node.args[3])
    if not isinstance(reduced, Node) or not reduced.shape or overwrites:
        return None
    axis = int(node.kwargs.get("axis", 0) if axis_at is None else node.args[axis_at]) % len(reduced.shape)
    kind = how if isinstance(how, str) else str(node.args[how])
    return Reduction(reduced, axis, {"max": "amax"}.get(kind, kind), node.shape[axis])


def sums_values(node: Node) -> bool:
    """Return whether a node sums or averages the edges of each group, as scatter_add does."""
    grouped = reduction(node)
    return grouped is not None and grouped.kind in ("sum", "mean")


def log_total(node: Node) -> Node | None:
    """Return the node of the sums by groups in `(log(sums) + maximum)[index]`, with or without the maximum.

    None if `node` is no such logsumexp.
    """
    logarithm = origin(node, BACK_TO_EDGES | {"add"})
    inner = logarithm.main() if logarithm.op == "log" else None
    total = None if inner is None else origin(inner, ops.CLAMPS | {"add"})  # log(s + 1e-16), log(s.clamp(1e-16))
    return total if total is not None and sums_values(total) else None


def is_of_groups(node: Node) -> bool:
    """Return whether a node is the maximum or the logsumexp of each group of edges, also indexed back to the edges."""
    grouped = reduction(origin(node, BACK_TO_EDGES))
    return log_total(node) is not None or (grouped is not None and grouped.kind == "amax")


def groups_of(total: Node) -> EdgeGroups:
    """Return the groups of edges of a softmax, from `total`, the node of the sums that divide it.

    `total` must be a reduction by groups. The index is None if its numbers are unknown.
    """
    grouped = reduction(total)
    assert grouped is not None
    index = total.operands.get(INDEX_ARGUMENT)
    known = index is not None and not index.is_meta and not index.is_floating_point()
    return EdgeGroups(grouped.axis, grouped.groups, _column(index, grouped.axis) if known else None)


def group_fault(softmax_run: SoftmaxRun, index: Tensor | None) -> CallFault | None:
    """Return "other_nodes" if the values are summed by other groups of edges than the softmax's.

    Args:
        softmax_run: the softmax.
        index: the group of each edge in the sum of the values; None if it is unknown.

    Returns:
        The code of the fault; None if the groups agree, or one of them is unknown.
    """
    groups = softmax_run.edges
    if groups is None or groups.index is None or index is None or index.is_meta or index.is_floating_point():
        return None
    return None if torch.equal(groups.index, _column(index, groups.axis)) else "other_nodes"


def _column(index: Any, axis: int) -> Tensor:
    """Return the group of each edge from an index that may be repeated over heads and features."""
    column: Tensor = index if index.dim() < 2 else index.movedim(axis, 0).flatten(1)[:, 0]
    return column
