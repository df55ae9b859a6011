"""Rows in float64: their logits and weights, and the changes under other keys and values.

The query heads that share one key head are computed together. The terms are those of the run, in their order: scale,
softcap, bias, mask, sinks. Shape suffixes: g query heads of one key head, n rows, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sqrtdk.audit.cache import HeadError
from sqrtdk.tracing import Term
from sqrtdk.tracing.readback.addends import BOTTOM


@dataclass(frozen=True, slots=True, eq=False)
class RowsOfHeads:
    """Which rows of which heads: sequence `batch`, query heads `heads`, rows `rows` out of `length`."""

    batch: int
    heads: slice
    rows: Tensor
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """The softmax of some rows.

    Attributes:
        logits: (g, n, S), as they enter it.
        weights: (g, n, S).
        lse: (g, n), including sinks.
        seeing: (g, n), whether the row sees a key.
    """

    logits: Tensor
    weights: Tensor
    lse: Tensor
    seeing: Tensor


def weigh_rows(query: Tensor, key: Tensor, terms: Sequence[Term], place: RowsOfHeads) -> Weighed:
    """Return the attention weights of some rows.

    Args:
        query: (g, n, E), rows of g query heads that share a key head.
        key: (S, E), the key head.
        terms: What acts on the logits, in its order: scale, softcap, biases, masks, sinks.
        place: Which rows and heads these are.
    """
    # In float64, and term by term in the order of the run: the errors that are looked for must not drown in rounding of
    # our own.
    z_gnS, sinks = query @ key.mT, None
    visible = torch.ones((), dtype=torch.bool, device=z_gnS.device)
    for term in terms:
        by = rows_at(term.value, place)
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
    # A row that sees no key has a maximum of -inf, and -inf - -inf would be NaN.
    top = (top if sinks is None else torch.maximum(top, sinks)).clamp(min=torch.finfo(torch.float64).min)
    raised = (z_gnS - top[..., None]).exp()
    total = raised.sum(-1) if sinks is None else raised.sum(-1) + (sinks - top).exp()
    seeing = (visible & (z_gnS > BOTTOM)).any(-1)
    # The clamp gives rows without keys weights of 0.
    return Weighed(z_gnS, raised / total[..., None].clamp(min=1e-300), total.log() + top, seeing)


def rows_at(value: Tensor | float | None, place: RowsOfHeads) -> Tensor | float | None:
    """Return the part of a term that belongs to some rows and heads, (g or 1, n or 1, S or 1).

    Args:
        value: A tensor that broadcasts to (B, Hq, L, S), a number, or None.
        place: Which rows and heads.
    """
    if not isinstance(value, Tensor):
        return value
    value = value if value.dtype == torch.bool else value.double()
    if value.dim() < 2:
        return value
    value = value[(None,) * (4 - value.dim())]
    value = value[place.batch if value.shape[0] > 1 else 0]
    value = value[place.heads] if value.shape[0] > 1 else value
    return value[:, place.rows] if value.shape[1] == place.length != 1 else value


def kl_of_rows(exact: Weighed, stored: Weighed) -> Tensor:
    """Return KL(p || p_stored) of each row in nats, (g, n): sum p (z - z_stored) - lse + lse_stored.

    Sinks have the same logit on both sides, so they cancel in the sum; both lse include them.
    """
    # A hidden key has the logit -inf on both sides: 0 * (-inf - -inf) is NaN, and its share of the sum is 0.
    gap = torch.where(exact.weights > 0, exact.logits - stored.logits, 0.0)
    # KL is never negative, but rounding may leave -1e-17.
    return ((exact.weights * gap).sum(-1) - exact.lse + stored.lse).clamp(min=0.0)


# The run computed q and k in float32 or less: logits that are nearer to one another than that rounds are tied.
TIED = torch.finfo(torch.float32).eps


def changed_peaks(exact: Weighed, stored: Weighed) -> Tensor:
    """Return the rows whose largest weight moves to another key, (g, n); tied keys count as one.

    A key has the largest weight if its logit is within `TIED` times the row's largest absolute logit of the maximum.
    The peak moved if a key has it now that had not.
    """
    # argmax would pick one of several tied keys, and another one after storage, although nothing has changed. Equal
    # keys may have logits that differ in the last digit: sums of other columns run in another order.
    first, now = _largest(exact.logits), _largest(stored.logits)
    return (now & ~first).any(-1)


def _largest(logits: Tensor) -> Tensor:
    """Return which keys have the largest logit of their row, or one that is tied with it."""
    finite = logits > BOTTOM
    size = logits.abs().masked_fill(~finite, 0.0).amax(-1, keepdim=True)
    # Relative to the largest logit of the row, as that is how the run's rounding errors grow.
    return finite & (logits >= logits.amax(-1, keepdim=True) - TIED * size)


@dataclass(slots=True)
class QueryHeadSums:
    """Sums over the rows of one query head, from which its errors follow.

    Attributes:
        divergences: KL divergence of each row, in nats.
        changed: number of rows whose largest weight moves to another key.
        error: squared error of the output, summed.
        size: squared output, summed.
    """

    divergences: list[Tensor] = field(default_factory=list)
    changed: int = 0
    error: float = 0.0
    size: float = 0.0

    def figures(self) -> HeadError:
        """Return the errors of the head, KL divergences in nats; NaN if no row saw a key."""
        every = torch.cat(self.divergences) if self.divergences else torch.zeros(0, dtype=torch.float64)
        if not len(every):
            return HeadError(math.nan, math.nan, math.nan, 0, math.nan)
        # quantile refuses more than 2^24 numbers; of so many, the lower of two middle ones is as good
        middle = every.quantile(0.5) if len(every) <= 2**20 else every.median()
        # The root of summed squares over summed squares: rows with a tiny output do not dominate, as they would in a
        # mean of ratios.
        output = math.sqrt(self.error / self.size) if self.size else math.nan
        return HeadError(float(every.mean()), float(middle), float(every.max()), self.changed, output)


def add(sums: list[QueryHeadSums], exact: Weighed, stored: Weighed, value: Tensor, stored_value: Tensor) -> None:
    """Add the errors of some rows to the sums of their query heads.

    Args:
        sums: One for each query head.
        exact: Weights with the exact keys.
        stored: Weights with the keys that are read back.
        value: (S, Ev) exact values.
        stored_value: (S, Ev) values that are read back.
    """
    divergences, moved = kl_of_rows(exact, stored), changed_peaks(exact, stored)
    outputs = exact.weights @ value
    errors = (stored.weights @ stored_value - outputs).square().sum(-1)
    sizes = outputs.square().sum(-1)
    for head, (one, seeing) in enumerate(zip(sums, exact.seeing, strict=True)):
        one.divergences.append(divergences[head][seeing].cpu())
        one.changed += int((moved[head] & seeing).sum())
        one.error += float((errors[head] * seeing).sum())
        one.size += float((sizes[head] * seeing).sum())
