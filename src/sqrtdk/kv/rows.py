"""Logits and weights of some rows, of the query heads that share one key head, in float64.

The terms are those of the run: scale, softcap, bias, mask, sinks, in their order. Suffixes of shapes: g query heads of
one key head, n rows, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing import Term
from sqrtdk.tracing.spine.masks import BOTTOM


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Which rows of which heads: of sequence `batch`, query heads `heads`, rows `rows` of `length`."""

    batch: int
    heads: slice
    rows: Tensor
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """Rows at their softmax.

    Attributes:
        logits: (g, n, S), as they enter it.
        weights: (g, n, S).
        lse: (g, n), sinks among them.
        seeing: (g, n), the row sees a key.
    """

    logits: Tensor
    weights: Tensor
    lse: Tensor
    seeing: Tensor


def weigh(query: Tensor, key: Tensor, terms: Sequence[Term], place: Place) -> Weighed:
    """The weights of rows (g, n, E) over keys (S, E)."""
    z_gnS, sinks = query @ key.mT, None
    visible = torch.ones((), dtype=torch.bool, device=z_gnS.device)
    for term in terms:
        by = of_place(term.value, place)
        if term.name == "sinks" and isinstance(by, Tensor):
            sinks = by.double().reshape(-1)[place.heads][:, None]
        elif term.name == "mask" and isinstance(by, Tensor):
            visible = visible & by.bool()
            z_gnS = torch.where(by.bool(), z_gnS, z_gnS + term.fill if term.added else term.fill)
        elif term.name == "scale" and by is not None:
            z_gnS = z_gnS * by
        elif term.name == "bias" and by is not None:
            z_gnS = z_gnS + by
        elif term.name == "softcap" and isinstance(by, float):
            z_gnS = by * (z_gnS / by).tanh()
    top = z_gnS.amax(-1)
    top = (top if sinks is None else torch.maximum(top, sinks)).clamp(min=torch.finfo(torch.float64).min)
    raised = (z_gnS - top[..., None]).exp()
    total = raised.sum(-1) if sinks is None else raised.sum(-1) + (sinks - top).exp()
    seeing = (visible & (z_gnS > BOTTOM)).any(-1)
    return Weighed(z_gnS, raised / total[..., None].clamp(min=1e-300), total.log() + top, seeing)


def of_place(value: Tensor | float | None, place: Place) -> Tensor | float | None:
    """The part of what broadcasts to (B, Hq, L, S) that is of a place, (g or 1, n or 1, S or 1); sinks stay whole."""
    if not isinstance(value, Tensor):
        return value
    value = value if value.dtype == torch.bool else value.double()
    if value.dim() < 2:
        return value
    value = value[(None,) * (4 - value.dim())]
    value = value[place.batch if value.shape[0] > 1 else 0]
    value = value[place.heads] if value.shape[0] > 1 else value
    return value[:, place.rows] if value.shape[1] == place.length != 1 else value
