"""Query heads in the order of their projection, where groups of them share keys.

Code that computes a group at once may have its query heads in any order beside the keys that they share; the order of
the projection is the one that both sides have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector, Waypoint

Permute = Callable[[Tensor], Tensor]


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

    def permuted(tensor: Tensor) -> Tensor:
        return tensor[:, order.to(tensor.device)]

    def of_keys(tensor: Tensor) -> Tensor:
        return permuted(tensor.repeat_interleave(count // tensor.shape[1], 1))

    def somewhere(tensor: Tensor) -> Tensor:
        axis = tensor.dim() - 3
        if axis < 0 or tensor.shape[axis] != count:
            return tensor
        return tensor.index_select(axis, order.to(tensor.device))

    return replace(
        call,
        query=_vector(call.query, permuted, order),
        key=_vector(call.key, of_keys, order, count),
        value=_vector(call.value, of_keys, order, count),
        output=permuted(call.output),
        lse=None if call.lse is None else permuted(call.lse),
        kept=None if call.kept is None else somewhere(call.kept),
        terms=None if call.terms is None else tuple(_term(term, somewhere, order) for term in call.terms),
    )


def _shares(call: CallTensors, count: int) -> bool:
    """Whether query heads share keys."""
    projection = call.key.projection
    if call.key.values.shape[1] < count:
        return True
    return projection is not None and len({tuple(row) for row in projection.features.tolist()}) < count


def _term(term: Term, somewhere: Permute, order: Tensor) -> Term:
    if not isinstance(term.value, Tensor):
        return term
    if term.name == "sinks":
        return replace(term, value=term.value[order.to(term.value.device)])
    return replace(term, value=somewhere(term.value))


def _vector(vector: Vector, permute: Permute, order: Tensor, count: int = 0) -> Vector:
    def maybe(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else permute(tensor)

    factor = vector.factor
    if isinstance(factor, Tensor) and factor.dim() == 4 and factor.shape[1] > 1:
        factor = permute(factor)
    return Vector(
        permute(vector.values),
        factor,
        maybe(vector.projected),
        tuple(Waypoint(step.name, step.detail, maybe(step.values)) for step in vector.steps),
        None if vector.projection is None else _projection(vector.projection, order, count),
    )


def _projection(projection: Projection, order: Tensor, count: int) -> Projection:
    def rows(tensor: Tensor) -> Tensor:
        if count and tensor.shape[0] != count:
            tensor = tensor.repeat_interleave(count // tensor.shape[0], 0)
        return tensor[order.to(tensor.device)]

    return Projection(
        projection.name,
        projection.input,
        None if projection.weight is None else rows(projection.weight),
        None if projection.bias is None else rows(projection.bias),
        rows(projection.features),
    )
