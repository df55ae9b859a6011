"""What tells where q and k come from, of all that a call's tensors hold: little enough to keep while a model trains."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector

if TYPE_CHECKING:
    from jaxtyping import Float

TOKENS = 64  # that norms and projections are compared on


def some_tokens(values: Float[Tensor, "B H L E"]) -> Float[Tensor, "1 H N E"]:
    """Evenly chosen rows of all batches, `TOKENS` at most: enough to tell tensors apart.

    Example:
        >>> some_tokens(torch.zeros(8, 2, 100, 4)).shape
        torch.Size([1, 2, 64, 4])
    """
    rows = values.detach().transpose(0, 1).flatten(1, 2)
    count = rows.shape[1]
    if count > TOKENS:
        rows = rows[:, torch.linspace(0, count - 1, TOKENS).long().to(rows.device)]
    return rows.unsqueeze(0)


def sketch_of(kept: CallTensors) -> CallTensors:
    """The call with `TOKENS` of its tokens, one row of each head's weights, and no outputs, masks or biases."""
    terms = None if kept.terms is None else tuple(_without_tensor(term) for term in kept.terms)
    return replace(
        kept,
        query=_vector(kept.query),
        key=_vector(kept.key),
        value=_vector(kept.value),
        output=kept.output.new_zeros(0),
        terms=terms,
        lse=None,
        kept=None,
    )


def _without_tensor(term: Term) -> Term:
    return replace(term, value=None) if isinstance(term.value, Tensor) else term


def _vector(vector: Vector) -> Vector:
    if vector.values.dim() != 4:  # of a call whose tensors are not known
        return vector
    return replace(
        vector,
        values=_some(vector.values),
        factor=1.0,
        projected=None if vector.projected is None else _some(vector.projected),
        steps=tuple(replace(step, values=None if step.values is None else _some(step.values)) for step in vector.steps),
        projection=None if vector.projection is None else _projection(vector.projection),
    )


def _projection(projection: Projection) -> Projection:
    weight = projection.weight
    return replace(
        projection,
        input=_some(projection.input.unsqueeze(1)).squeeze(1),
        weight=None if weight is None else weight[:, :1].clone(),
    )


def _some(values: Tensor) -> Tensor:
    """Those alone: no view that would hold all of them."""
    return some_tokens(values).clone()
