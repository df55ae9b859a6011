"""Dropout of the weights is on in one side, or drops other weights, or at another rate.

Two runs with the same rate and other random numbers differ as well; the change puts B's drawn weights into A.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sqrtdk.compare.numbers import of_formula, told_apart
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "dropout"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """B's dropout in A's formula."""
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None or _alike(a, b):
        return
    rate_a, rate_b = (0.0 if formula.kept is None else formula.dropout for formula in (a, b))
    change = of_formula(lambda formula: replace(formula, kept=b.kept, dropout=b.dropout))
    yield Suspicion(NAME, "weights", rate_a, rate_b, change, _text(a, b))


def _alike(a: Formula, b: Formula) -> bool:
    if a.kept is None or b.kept is None:
        return a.kept is b.kept
    return a.dropout == b.dropout and bool((a.kept == b.kept).all())


def _text(a: Formula, b: Formula) -> str:
    if b.kept is None:
        return f"drops no weights, where A does (rate {a.dropout:g})"
    if a.kept is None:
        return f"drops weights (rate {b.dropout:g}), which A does not"
    if a.dropout == b.dropout:
        return f"drops other weights at the same rate ({b.dropout:g})"
    old, new = told_apart(a.dropout, b.dropout)
    return f"drops weights at another rate ({new} in place of {old})"
