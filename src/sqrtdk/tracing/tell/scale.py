"""The effective scale, by two readings: the product of the factors on the way, and the slope of the logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqrtdk.tracing.read.reading import Reading
from sqrtdk.tracing.records import WITHOUT_PRODUCT, Factor, Scale
from sqrtdk.tracing.tell.slope import Slope

AGREEMENT = 0.01  # the two readings of the scale agree within 1%
LINEAR = 0.99  # below this R^2 a slope alone says nothing about the scale


def tell_scale(
    reading: Reading,
    factors: Sequence[Factor],
    unknown: Sequence[str],
    width: int,
    slope: Slope | None,
    no_slope: str | None,
) -> Scale:
    """Bring the two readings together.

    Where the value of a factor could not be read, the slope tells the scale. Where an operation could not be followed
    it does not: what it did to the other logits is not known.

    Args:
        reading: the attention.
        factors: on q, on k and on the logits.
        unknown: operations that could not be followed.
        width: E of the query, without padding.
        slope: the numeric reading, where there is one.
        no_slope: why there is none.
    """
    reason = _unreadable(reading, factors, unknown)
    if reading.distance is not None:
        return _of_distance(reading, factors, reason)
    symbolic: float | None = None
    per_head: tuple[float, ...] | None = None
    agree: bool | None = None
    if reason is None:
        symbolic = math.prod(f.value for f in factors if f.value is not None)
        per_head = _per_head(factors, reading.layout.heads)
        if slope is not None:
            agree = _agree(symbolic, per_head, slope)
            if not agree:
                reason = f"the two readings disagree: {symbolic:.4g} by the factors, {slope.value:.4g} by the logits"
    effective = symbolic
    if symbolic is None and slope is not None and not unknown:
        if slope.r_squared >= LINEAR:
            effective = slope.value
        else:
            reason = f"{reason}; the logits are not linear in q.k (R^2 = {slope.r_squared:.3f})"
    if effective is None and no_slope is not None and reading.score is None:
        reason = f"{reason}; {no_slope}" if reason else no_slope
    return Scale(
        effective=effective,
        ratio=effective * math.sqrt(width) if effective is not None else None,
        symbolic=symbolic,
        numeric=slope.value if slope is not None else None,
        r_squared=slope.r_squared if slope is not None else None,
        factors=tuple(factors),
        per_head=per_head,
        agree=agree,
        reason=reason or no_slope,
    )


def _of_distance(reading: Reading, factors: Sequence[Factor], reason: str | None) -> Scale:
    """A distance has no scale of q . k; `symbolic` is its coefficient, where q and k have none of their own."""
    known = reason is None and not reading.query.factors and not reading.key.factors
    return Scale(
        effective=None,
        ratio=None,
        symbolic=math.prod(factor.value for factor in factors if factor.value is not None) if known else None,
        numeric=None,
        r_squared=None,
        factors=tuple(factors),
        reason=reason or "a distance score has no product of q and k to scale",
    )


def _unreadable(reading: Reading, factors: Sequence[Factor], unknown: Sequence[str]) -> str | None:
    """Why the factors do not tell the scale; None where they do."""
    if reading.score in WITHOUT_PRODUCT:
        return (
            f"{'an' if reading.score == 'additive' else 'a'} {reading.score} score has no product of q and k to scale"
        )
    if unknown:
        return "the lineage could not follow " + ", ".join(unknown)
    missing = next((f for f in factors if f.value is None), None)
    return None if missing is None else f"the value of a factor ({missing.source}) could not be read"


def _per_head(factors: Sequence[Factor], heads: int) -> tuple[float, ...] | None:
    several = [f.per_head for f in factors if f.per_head is not None]
    if not several:
        return None
    rest = math.prod(f.value for f in factors if f.per_head is None and f.value is not None)
    return tuple(rest * math.prod(values[h % len(values)] for values in several) for h in range(heads))


def _agree(symbolic: float, per_head: tuple[float, ...] | None, slope: Slope) -> bool:
    if per_head is not None:
        return all(
            abs(read - wanted) <= AGREEMENT * abs(wanted) for read, wanted in zip(slope.per_head, per_head, strict=True)
        )
    return abs(slope.value - symbolic) <= AGREEMENT * abs(symbolic)
