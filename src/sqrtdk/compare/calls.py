"""Calls made comparable: the same rows and heads, query heads in the order of their projection.

A call of a trace file may be a part of what ran; the other side's call is made the same part. Code that computes a
group of query heads at once may have them in any order beside the keys that they share; the order of the projection is
the one that both sides have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.recording.cut import cut_call
from sqrtdk.recording.records import Cut
from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector, Waypoint


def cut_alike(a: CallTensors, b: CallTensors, cut_a: Cut | None, cut_b: Cut | None) -> tuple[CallTensors, CallTensors]:
    """Both calls with the rows and heads that a file has of one; a call that is cut already stays.

    Args:
        a: call of A.
        b: call of B.
        cut_a: what a trace file has of A's; None where it is whole.
        cut_b: of B's.
    """
    if cut_a is not None and cut_b is None:
        b = _cut(b, cut_a)
    elif cut_b is not None and cut_a is None:
        a = _cut(a, cut_b)
    return a, b


def _cut(call: CallTensors, cut: Cut) -> CallTensors:
    if call.query.values.dim() != 4:
        return call
    count = call.query.values.shape[1]
    heads = None if cut.heads is None or cut.heads_of != count else cut.heads
    return cut_call(call, cut.rows, heads)[0]


def in_order(call: CallTensors) -> CallTensors:
    """The call with its query heads in the order of the features that they were projected to."""
    projection = call.query.projection
    count = call.query.values.shape[1] if call.query.values.dim() == 4 else 0
    if projection is None or call.missing is not None or not _shares(call, count):
        return call
    first = projection.features[:, 0]
    order = first.argsort()
    if bool((order == torch.arange(count, device=order.device)).all()) or len(set(first.tolist())) < count:
        return call

    def permuted(tensor: Tensor, axis: int = 1) -> Tensor:
        """Heads on an axis in order; heads that are shared are repeated, an axis that has none stays."""
        if axis < 0 or tensor.shape[axis] == 1 or count % tensor.shape[axis]:
            return tensor
        repeated = tensor.repeat_interleave(count // tensor.shape[axis], axis)
        return repeated.index_select(axis, order.to(tensor.device))

    def term(old: Term) -> Term:
        if not isinstance(old.value, Tensor):
            return old
        return replace(old, value=permuted(old.value, 0 if old.name == "sinks" else old.value.dim() - 3))

    return replace(
        call,
        query=_vector(call.query, permuted),
        key=_vector(call.key, permuted),
        value=_vector(call.value, permuted),
        output=permuted(call.output),
        lse=None if call.lse is None else permuted(call.lse),
        kept=None if call.kept is None else permuted(call.kept, call.kept.dim() - 3),
        terms=None if call.terms is None else tuple(map(term, call.terms)),
    )


def _shares(call: CallTensors, count: int) -> bool:
    """Whether query heads share keys."""
    projection = call.key.projection
    if call.key.values.shape[1] < count:
        return True
    return projection is not None and len({tuple(row) for row in projection.features.tolist()}) < count


def _vector(vector: Vector, permuted: Callable[..., Tensor]) -> Vector:
    def maybe(tensor: Tensor | None, axis: int = 1) -> Tensor | None:
        return None if tensor is None else permuted(tensor, axis)

    known, factor = vector.projection, vector.factor
    if known is not None:
        weight, bias = maybe(known.weight, 0), maybe(known.bias, 0)
        known = Projection(known.name, known.input, weight, bias, permuted(known.features, 0))
    return Vector(
        permuted(vector.values),
        permuted(factor) if isinstance(factor, Tensor) and factor.dim() == 4 else factor,
        maybe(vector.projected),
        tuple(Waypoint(step.name, step.detail, maybe(step.values)) for step in vector.steps),
        known,
    )
