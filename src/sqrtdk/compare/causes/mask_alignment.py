"""A causal mask of fewer or more rows than keys begins at the upper left corner in one side, ends at the lower right in
the other: SDPA's `is_causal` against a decoder's with a cache.

Only where L is not S. A window moves with its causal bound. What is off by a key beyond that is `mask_offset`.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqrtdk.compare.bands import compare_bands, taken_apart
from sqrtdk.compare.causes.mask_offset import filled
from sqrtdk.compare.mask_changes import with_band
from sqrtdk.compare.masks import recompose
from sqrtdk.compare.numbers import of_formula
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "mask_alignment"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """B's alignment of A's band."""
    a, b = sides.a.formula, sides.b.formula
    bands = None if a is None or b is None else compare_bands(a, b)
    if bands is None or b is None or not bands.shift:
        return
    rows = "1 row" if bands.a.rows == 1 else f"{bands.a.rows} rows"
    text = f"aligns the causal mask to the {bands.alignment_b} ({rows}, {bands.a.keys} keys)"
    target, shift = bands.b, bands.shift

    def change(formula: Formula) -> Formula:
        both = taken_apart(formula, b)
        if both is None:
            return formula
        parts, other = both
        low = target.least if parts.least is None else parts.least + shift
        high = target.greatest if bands.greatest_b is None else None  # a window that only B's alignment can show
        high = high if parts.greatest is None else parts.greatest + shift
        return filled(formula, b, recompose(with_band(parts, low, high, other)))

    yield Suspicion(NAME, "mask", bands.alignment_a, bands.alignment_b, of_formula(change), text)
