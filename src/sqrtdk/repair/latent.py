"""Multi-head latent attention: a key is one part of its own head's, and one that all heads share.

k = [k_nope, k_rope], where k_nope comes from the up-projection that also gives v, and k_rope from the latent's own
projection, the same for every head. Logits are q_nope . k_nope + q_rope . k_rope: q_nope and k_nope take gamma^balance
and gamma^(1 - balance), q_rope takes gamma, and k_rope is left alone (Kimi Team 2025, Kimi K2, section 2.1,
arXiv:2507.20534).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.repair.lookup import ALIKE, Parameters
from sqrtdk.repair.rows import Refusal, Rows, compared, explained, spread
from sqrtdk.tracing import CallTensors

if TYPE_CHECKING:
    from jaxtyping import Int


def latent_rows(tensors: CallTensors, parameters: Parameters) -> tuple[Rows, ...] | None:
    """Rows of a call whose key's first or last channels come from v's projection; None where they do not."""
    query, key, value = tensors.query, tensors.key, tensors.value
    if key.projection is not None or query.projection is None or value.projection is None:
        return None
    if any(step.name in ("norm", "unknown") for vector in (query, key) for step in vector.steps):
        return None
    if key.projected is None or value.projection.weight is None:
        return None
    try:
        place = parameters.find("v", value.projection)
    except Refusal:
        return None
    weight = parameters.whole(place.name)
    weight = weight if place.axis == 0 else weight.mT
    index = _rest(value.projection.features.cpu() + place.shift, weight.shape[0])
    if index is None or index.shape[1] >= key.values.shape[-1]:
        return None
    nope = index.shape[1]
    inputs = compared(value.projection.input.unsqueeze(1))  # (1, 1, N, D)
    projected = inputs @ weight[index].to(torch.float64).mT
    given = compared(key.projected)
    if given.shape[1] != projected.shape[1]:
        return None
    starts = (0, given.shape[-1] - nope)
    shares = [explained(projected, given[..., start : start + nope]) for start in starts]
    start = starts[0] if shares[0] >= shares[1] else starts[1]
    if max(shares) <= ALIKE or value.projection.bias is not None:
        return None
    heads = query.values.shape[1]
    of_query = spread(query.projection.features, heads)
    channels = torch.arange(of_query.shape[1])
    own = (channels >= start) & (channels < start + nope)
    return (
        *parameters.projection_rows("q", query, of_query[:, own]),
        *parameters.projection_rows("whole", query, of_query[:, ~own]),
        Rows(place.name, "k", spread(index, heads), place.axis),
    )


def _rest(used: Int[Tensor, "H Ev"], features: int) -> Int[Tensor, "H E"] | None:
    """Features that v does not use, the same number for each head, in order."""
    free = torch.ones(features, dtype=torch.bool)
    free[used.flatten()] = False
    rest = free.nonzero().flatten()
    heads = used.shape[0]
    return rest.view(heads, -1) if len(rest) and len(rest) % heads == 0 else None
