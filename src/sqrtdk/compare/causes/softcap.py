"""The softcap is left out, or has another value.

Told from `scale` by its curve: no factor of the logits makes up for it. One that is there on both sides and stands in
another place is `softcap_order`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sqrtdk.compare.causes.softcap_order import placed
from sqrtdk.compare.numbers import of_formula, same, told_apart
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "softcap"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """The softcap of B in A's formula; its place too, where A has none."""
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None or same(a.softcap, b.softcap):
        return

    def change(formula: Formula) -> Formula:
        if b.softcap is None:
            return replace(placed(formula, Formula()), softcap=None)
        if formula.softcap is None:
            formula = placed(formula, b)
        return replace(formula, softcap=b.softcap)

    if b.softcap is None:
        text = f"leaves out the softcap ({a.softcap:g})"
    elif a.softcap is None:
        text = f"has a softcap ({b.softcap:g}), which A has not"
    else:
        old, new = told_apart(a.softcap, b.softcap, 6)
        text = f"has a softcap of {new} in place of {old}"
    yield Suspicion(NAME, "softcap", a.softcap, b.softcap, of_formula(change), text)
