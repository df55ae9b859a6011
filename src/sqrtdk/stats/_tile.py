"""The arithmetic of one tile of logits, in two buffers of its size; every operation writes into one of them.

A tile is (..., R, C): R rows, C keys. The passes over it take most of the time of statistics, so each operation is
chosen for speed: reductions along the rows and plain arithmetic are vectorised on a CPU. exp is not if MKL takes it
over (exp2 is, and three times as fast), nor are bool fills and comparisons (so visibility is a float mask of 0 and 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.stats._partial import RowStats, within_range

if TYPE_CHECKING:
    from jaxtyping import Float

LOG2_E = 1.0 / math.log(2.0)
SMALLEST_EXPONENTS = {torch.float32: -120, torch.float64: -1000}  # smallest exponents whose negatives are exponents too
NEGLIGIBLE_WEIGHT = 2.0**-30  # below this total weight, relative to the peak's, squares may underflow
FLUSH = {torch.float32: 1e-30, torch.float64: 1e-290}  # a smaller total weight, relative to the peak's, counts as 0


@dataclass(frozen=True, slots=True)
class Shifted:
    """Values of a tile that are computed before the sums, without the row's maximum; (..., R) each."""

    keys: Float[Tensor, "*rows"]  # visible keys
    max_logit: Float[Tensor, "*rows"]
    min_logit: Float[Tensor, "*rows"]
    mean: Float[Tensor, "*rows"]
    m2: Float[Tensor, "*rows"]
    mass: Float[Tensor, "*rows"]  # sum of e^{z-m}
    a: Float[Tensor, "*rows"]  # sum of e^{z-m} (z-m)


def exponentials(
    a: Float[Tensor, "*BHq R C"],
    b: Float[Tensor, "*BHq R C"],
    mask: Float[Tensor, "*#BHq #R T"] | None,
    start: int,
    *,
    moments: bool = True,
) -> Shifted:
    """Turn the logits z in `a` into e^{z-m} in `b`, 0 at hidden keys; `a` is free afterwards.

    Args:
        a: (..., R, C) logits, C > 0.
        b: scratch of the same shape.
        mask: float 0 or 1, broadcastable to `a[..., start:]`, or None.
        start: first key that is hidden from some row.
        moments: False leaves mean and m2 at 0.
    """
    keys = a.shape[-1]
    part, part_b = a[..., start:], b[..., start:]
    if mask is None:
        n = torch.full(a.shape[:-1], float(keys), dtype=a.dtype, device=a.device)
        top, low = a.amax(-1), a.amin(-1)
    else:
        n = (mask.sum(-1) + start).expand(a.shape[:-1])
        # A minimum with ±inf is vectorised, and a masked_fill with a bool mask is not.
        cap = (mask - 0.5) * math.inf  # +inf at visible keys, -inf at hidden ones
        torch.minimum(part, cap, out=part)
        top = a.amax(-1)
        if bool(top.isnan().any()):  # a NaN at a hidden key does not count
            part.masked_fill_(mask == 0, -math.inf)
            top = a.amax(-1)
        low = torch.maximum(part, -cap, out=part_b).amin(-1)
        if start:
            low = torch.minimum(low, a[..., :start].amin(-1))
    # A row without visible keys would give -inf - (-inf) = NaN.
    shift = top.masked_fill(top == -math.inf, 0.0)
    distance = float((low - top).amin())  # NaN if a row holds NaN, or only -inf
    # Logits of opposite sign near the dtype's limit differ by more than it holds; `unit` makes the difference, and its
    # sum over the keys, fit.
    unit = 1.0 if distance * keys > -torch.finfo(a.dtype).max else within_range(keys)
    torch.add(-unit * shift.unsqueeze(-1), a, alpha=unit, out=a)  # unit (z - m) from here on
    if mask is not None:
        torch.maximum(part, -cap.clamp_(min=0.0), out=part)  # 0 at hidden keys
    mean = m2 = torch.zeros_like(top)
    if moments:
        offset = a.sum(-1) / n.clamp(min=1.0)
        # Two passes, mean then deviations: the sum of squares less the square of the sum cancels.
        torch.sub(a, offset.unsqueeze(-1), out=b)
        if mask is not None:
            part_b.mul_(mask)
        mean = torch.maximum((unit * shift + offset) / unit, low)
        m2 = (torch.linalg.vector_norm(b, dim=-1) / unit) ** 2
    torch.mul(a, LOG2_E / unit, out=b).exp2_()  # in place, as `b` may have left the cache
    if mask is not None:
        part_b.mul_(mask)
    mass = b.sum(-1)
    if not distance > -math.inf:
        a.clamp_(min=-torch.finfo(a.dtype).max)  # otherwise -inf times a weight of 0 would give NaN
    return Shifted(keys=n, max_logit=top, min_logit=low, mean=mean, m2=m2, mass=mass, a=a.mul_(b).sum(-1) / unit)


def reduce_tile(b: Float[Tensor, "*BHq R C"], scratch: Float[Tensor, "*BHq R C"], found: Shifted) -> RowStats:
    """Return the RowStats of a tile, before `exact_extremes`, from e^{z-m} in `b`; both buffers are overwritten.

    The sums leave out one key that holds the maximum: each e^0 = 1 is removed before the sum, as a 1 would round the
    others away in a row near one-hot. Further keys at the maximum are counted by the difference.
    """
    rest = b.frac_().sum(-1)
    ties = (found.mass - rest).round_().sub_(1.0).clamp_(min=0.0)
    rest += ties
    whole = rest
    if not bool(
        rest.amin() >= NEGLIGIBLE_WEIGHT
    ):  # a power of two, which rounds nothing, lifts the squares into the dtype's range
        whole = rest.masked_fill(rest == 0, 1.0)
        lift = torch.ldexp(torch.ones_like(rest), -torch.frexp(whole).exponent.clamp(min=SMALLEST_EXPONENTS[b.dtype]))
        lift = torch.where(whole < NEGLIGIBLE_WEIGHT, lift, 1.0)
        b.mul_(lift.unsqueeze(-1))
        whole, ties = whole * lift, ties * lift
    # Keys at the maximum have weight 1, whose square and cube are 1, so `ties` is added as it is.
    share2 = (torch.mul(b, b, out=scratch).sum(-1) + ties) / whole**2
    share3 = (scratch.mul_(b).sum(-1) + ties) / whole**3
    return RowStats(
        keys=found.keys,
        max_logit=found.max_logit,
        min_logit=found.min_logit,
        rest=rest,
        share2=share2,
        share3=share3,
        a=found.a,
        mean=found.mean,
        m2=found.m2,
    )


def exact_extremes(rows: RowStats) -> RowStats:
    """Replace what rounding left in rows whose values are known exactly.

    These are rows without a finite maximum or minimum, and rows whose other weights are too small to count.
    """
    none = rows.rest < FLUSH[rows.rest.dtype]
    blind = rows.keys == 0
    overflowed = (rows.min_logit == -math.inf) & ~blind
    bad = ~(rows.max_logit < math.inf)
    exact = {
        "rest": rows.rest.masked_fill(none, 0.0),
        "share2": rows.share2.masked_fill(none, 0.0),
        "share3": rows.share3.masked_fill(none, 0.0),
        "a": rows.a.masked_fill(none, 0.0),
        "mean": rows.mean.masked_fill(overflowed, -math.inf).masked_fill(blind, 0.0),
        "m2": rows.m2.masked_fill(overflowed, math.inf).masked_fill(blind, 0.0),
        "max_logit": rows.max_logit,
        "min_logit": rows.min_logit,
    }
    return RowStats(keys=rows.keys, **{name: value.masked_fill(bad, math.nan) for name, value in exact.items()})
