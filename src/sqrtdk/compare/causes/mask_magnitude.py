"""Hidden keys have a number in place of minus infinity, or another one, and take weight.

A fill far below all logits gives no weight, whatever it is, where the row sees any key; a row that sees none shows it:
all hidden keys on average, or 0. A fill that is off by the scale is `bias_scaled`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from sqrtdk.compare.addends import FAR
from sqrtdk.compare.causes.bias_scaled import factor_of_fill
from sqrtdk.compare.numbers import of_formula, same, told_apart
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "mask_magnitude"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """B's fill in A's mask."""
    a, b = sides.a.formula, sides.b.formula
    if (
        a is None
        or b is None
        or a.visible is None
        or b.visible is None
        or factor_of_fill(a, b, sides.head_dim) is not None
    ):
        return
    left, right = _applied(a), _applied(b)
    if same(left, right) and (a.fill_added == b.fill_added or math.isinf(left)):
        return
    if max(left, right) <= FAR and not _blind(a.visible) and not _blind(b.visible):
        return

    def change(formula: Formula) -> Formula:
        return replace(formula, fill=b.fill, fill_by=b.fill_by, fill_added=b.fill_added)

    yield Suspicion(NAME, "mask", _said(a), _said(b), of_formula(change), _text(a, b))


def _applied(formula: Formula) -> float:
    fill = formula.fill * formula.fill_by
    return -math.inf if math.isnan(fill) else fill


def _blind(visible: Tensor) -> bool:
    """Whether a row sees no key."""
    return not bool(visible.any(-1).all())


def _said(formula: Formula) -> float | str:
    fill = _applied(formula)
    return "-inf" if math.isinf(fill) else float(f"{fill:.6g}")


def _text(a: Formula, b: Formula) -> str:
    left, right = _applied(a), _applied(b)
    if same(left, right):
        how = ("adds", "writes") if b.fill_added else ("writes", "adds")
        return f"{how[0]} {right:.4g} {'to' if b.fill_added else 'over'} the logits of hidden keys, where A {how[1]} it"
    old, new = told_apart(left, right)
    return f"marks hidden keys with {new} in place of {old}"
