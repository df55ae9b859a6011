"""A causal mask of fewer or more rows than keys begins at the upper left corner in one side, ends at the lower right in
the other: SDPA's `is_causal` against a decoder's with a cache.

Only where L is not S. A window moves with its causal bound. What is off by a key beyond that is `mask_offset`.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqrtdk.compare.bands import compare_bands
from sqrtdk.compare.causes.mask_offset import moved_band
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "mask_alignment"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """B's alignment of A's band."""
    a, b = sides.a.formula, sides.b.formula
    bands = None if a is None or b is None else compare_bands(a, b)
    if bands is None or b is None or not bands.shift:
        return
    text = f"aligns the causal mask to the {bands.alignment_b} ({bands.a.rows} rows, {bands.a.keys} keys)"
    change = moved_band(b, bands.shift, bands.shift)
    yield Suspicion(NAME, "mask", bands.alignment_a, bands.alignment_b, change, text)
