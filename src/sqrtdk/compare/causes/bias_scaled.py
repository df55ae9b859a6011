"""The scale multiplies the bias or the mask as well: it was applied to the sum in place of the product.

Told from `bias` by its shape: every number of the bias is off by one and the same factor, which the trace saw multiply
the sum, or which is the scale itself. Of a mask only a finite fill can show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from sqrtdk.audit.tolerance import inverse_root
from sqrtdk.compare.addends import common_keys
from sqrtdk.compare.numbers import of_formula, one_number, ratio, same, times, total
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "bias_scaled"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """B's factor on A's bias, and on A's fill of hidden keys."""
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None:
        return
    by = factor_of_bias(a, b, sides.head_dim)
    if by is not None:  # a number that the trace saw, or a scale: neither is off by rounding
        new = a.bias_by * by
        text = _text("bias", by)
        yield Suspicion(NAME, "bias", a.bias_by, new, of_formula(lambda f: replace(f, bias_by=new)), text)
    by = factor_of_fill(a, b, sides.head_dim)
    if by is not None:
        filled = a.fill_by * by
        text = _text("mask", by)
        yield Suspicion(NAME, "mask", a.fill_by, filled, of_formula(lambda f: replace(f, fill_by=filled)), text)


def factor_of_bias(a: Formula, b: Formula, head_dim: int) -> float | None:
    """By what B's bias is off in all its numbers; None where that is nothing, or is no sign of a scale."""
    if a.bias is None or b.bias is None:
        return None
    both = common_keys(a, b)
    one, other = times(a.bias, a.bias_by), times(b.bias, b.bias_by)
    by = ratio(one, other) if both is None else ratio(times(one, both), times(other, both))
    if by is not None and same(by, 1.0):
        return None
    if a.bias_by and not same(a.bias_by, b.bias_by):
        return b.bias_by / a.bias_by  # the bias before it may be another as well
    return by if by is not None and _is_scale(by, a, b, head_dim) else None


def factor_of_fill(a: Formula, b: Formula, head_dim: int) -> float | None:
    """The same of the fill of hidden keys."""
    fill_a, fill_b = a.fill * a.fill_by, b.fill * b.fill_by
    if a.visible is None or b.visible is None or not math.isfinite(fill_a) or not math.isfinite(fill_b):
        return None
    if not fill_a or not fill_b or same(fill_a, fill_b):
        return None
    by = fill_b / fill_a
    return by if (same(a.fill, b.fill) and not same(a.fill_by, b.fill_by)) or _is_scale(by, a, b, head_dim) else None


def _is_scale(by: float, a: Formula, b: Formula, head_dim: int) -> bool:
    """Whether a number is the scale of a side, or the usual one, which a factor of each row may hide."""
    scales = [scale for scale in (one_number(total(a)), one_number(total(b)), inverse_root(head_dim)) if scale]
    return any(same(by, value) for scale in scales if scale != 1.0 for value in (scale, 1.0 / scale))


def _text(what: str, by: float) -> str:
    return f"multiplies the {what} by {by:.4g} as well, as if it were a part of the product"
