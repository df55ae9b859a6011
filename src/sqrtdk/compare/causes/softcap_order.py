"""The softcap stands in another place: before the scale, or after the mask.

Both sides have one; its value is the business of `softcap`. Before the scale it caps the bare product, after the mask
it lifts hidden keys to minus its value, so that they leak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sqrtdk.compare.numbers import of_formula, over, total
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "softcap_order"
PLACES = {
    "scaled": "after the scale",
    "product": "before the scale",
    "masked": "after the mask",
}


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """A's softcap where B has its own."""
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None or a.softcap is None or b.softcap is None or a.softcap_at == b.softcap_at:
        return
    here, there = PLACES[a.softcap_at], PLACES[b.softcap_at]
    text = f"applies the softcap {there}, not {here}"
    yield Suspicion(NAME, "softcap", here, there, of_formula(lambda formula: placed(formula, b)), text)


def placed(formula: Formula, other: Formula) -> Formula:
    """The formula with the softcap where the other has it, and the same factors in all."""
    before = other.scale if other.softcap_at == "product" else over(total(formula), other.after)
    after = over(total(formula), other.scale) if other.softcap_at == "product" else other.after
    return replace(formula, softcap_at=other.softcap_at, scale=before, after=after)
