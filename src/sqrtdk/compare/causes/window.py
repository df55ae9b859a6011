"""The window is off by one, of another size, missing, or there where the other side has none (on the wrong layers).

The greatest i - j of a visible key differs, beyond what an alignment moves; or, of a window that reaches as far ahead
as back, both bounds. The causal bound alone is `mask_offset`.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqrtdk.compare.bands import Bands, compare_bands, taken_apart
from sqrtdk.compare.causes.mask_offset import NONE, filled
from sqrtdk.compare.mask_changes import with_band
from sqrtdk.compare.masks import Parts, recompose
from sqrtdk.compare.numbers import of_formula
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "window"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """B's window in A's band."""
    a, b = sides.a.formula, sides.b.formula
    bands = None if a is None or b is None else compare_bands(a, b)
    if bands is None or b is None or bands.moved or not _differs(bands):
        return
    both_bounds, shift, target = bands.windows, bands.shift, bands.b

    def change(formula: Formula) -> Formula:
        both = taken_apart(formula, b)
        if both is None:
            return formula
        parts, other = both
        low = target.least if both_bounds else parts.least
        high = None if target.greatest is None else target.greatest - shift
        return filled(formula, b, recompose(with_band(parts, low, high, other)))

    size_a, size_b = _size(bands.a), _size(bands.b)
    yield Suspicion(NAME, "mask", size_a, size_b, of_formula(change), _text(size_a, size_b))


def _differs(bands: Bands) -> bool:
    if bands.windows:
        return bands.a.greatest != bands.b.greatest
    return bands.greatest_a != bands.greatest_b


def _size(parts: Parts) -> int | str:
    """Keys in the window of a row, its own among them."""
    if parts.greatest is None:
        return NONE
    return parts.greatest + 1 if parts.least is None else parts.greatest - parts.least + 1


def _text(a: int | str, b: int | str) -> str:
    if b == NONE:
        return f"leaves out the window ({a} keys)"
    if a == NONE:
        return f"has a window of {b} keys, which A has not"
    return f"has a window of {b} keys in place of {a}"
