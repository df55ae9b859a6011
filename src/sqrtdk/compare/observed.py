"""The numbers of one call: the heads of k and v once each, without the factors that its code put on q and k."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.tensors import CallTensors, Vector, Waypoint

NAMES = ("query", "key", "value")


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One of q, k and v.

    Attributes:
        heads: for each query head the head that it reads, (Hq,).
        used: (B, H, L, E), as it met, but for factors.
        factor: by what it had been multiplied.
        projected: (B, H, L, E); None where it is not known.
        steps: between the two.
        input: (B, L, D); None where it is not known.
        name: of the projection's weight.
        weight: (H, E, D); None where it is not known.
        bias: (H, E).
        features: (H, E).
        borrowed: `projected` is the other side's, of the same input.
    """

    heads: Tensor
    used: Tensor
    factor: Tensor | float
    projected: Tensor | None = None
    steps: tuple[Waypoint, ...] = ()
    input: Tensor | None = None
    name: str = ""
    weight: Tensor | None = None
    bias: Tensor | None = None
    features: Tensor | None = None
    borrowed: bool = False


def observe(call: CallTensors) -> dict[str, Seen]:
    """Q, k and v of a call, by name."""
    count = call.query.values.shape[1]
    return {name: _seen(getattr(call, name), count, grouped=name != "query") for name in NAMES}


def _seen(vector: Vector, count: int, *, grouped: bool) -> Seen:
    first, heads = _groups(vector) if grouped else _alone(vector)
    there = vector.values.shape[1]
    of_queries = heads if there == count else heads.repeat_interleave(max(1, count // max(there, 1)))
    factor = _once(vector.factor, first)
    used = vector.values.detach()[:, first].double()
    projection = vector.projection
    return Seen(
        heads=of_queries,
        used=used / factor,
        factor=factor,
        projected=None if vector.projected is None else vector.projected[:, first].double(),
        steps=tuple(Waypoint(s.name, s.detail, None if s.values is None else s.values[:, first]) for s in vector.steps),
        input=None if projection is None else projection.input,
        name="" if projection is None else projection.name,
        weight=None if projection is None or projection.weight is None else projection.weight[first],
        bias=None if projection is None or projection.bias is None else projection.bias[first],
        features=None if projection is None else projection.features[first],
    )


def _alone(vector: Vector) -> tuple[Tensor, Tensor]:
    heads = torch.arange(vector.values.shape[1], device=vector.values.device)
    return heads, heads


def _groups(vector: Vector) -> tuple[Tensor, Tensor]:
    """The first of each set of equal heads (repeated for groups), and for every head the number of its set."""
    if vector.projection is not None:
        rows = vector.projection.features
        first_of: dict[tuple[int, ...], int] = {}
        for head, features in enumerate(rows.tolist()):
            first_of.setdefault(tuple(features), head)
        keys = sorted(first_of)
        numbers = {key: number for number, key in enumerate(keys)}
        order = [first_of[key] for key in keys]
        sets = [numbers[tuple(features)] for features in rows.tolist()]
    else:
        order, sets = _equal(vector.values)
    device = vector.values.device
    return torch.tensor(order, device=device), torch.tensor(sets, device=device)


def _equal(values: Tensor) -> tuple[list[int], list[int]]:
    order: list[int] = []
    sets = []
    for head in range(values.shape[1]):
        number = next(
            (n for n, other in enumerate(order) if torch.equal(values[:, head], values[:, other])), len(order)
        )
        if number == len(order):
            order.append(head)
        sets.append(number)
    return order, sets


def _once(factor: Tensor | float, first: Tensor) -> Tensor | float:
    if not isinstance(factor, Tensor):
        return factor
    factor = factor if factor.dim() == 4 else factor[None]
    return factor[:, first] if factor.shape[1] > 1 else factor
