"""The causal bound is off: a row sees the key after its own, or not its own; or there is no causal bound at all.

The least i - j of a visible key differs. Where that is because of the corner from which a mask counts it is
`mask_alignment`; the other bound of the band, or a window that reaches ahead as far as back, is `window`. A window of
which both bounds are off by the same stands elsewhere as a whole, which is an offset too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from sqrtdk.compare.bands import Bands, compare_bands, taken_apart
from sqrtdk.compare.mask_changes import with_band
from sqrtdk.compare.masks import recompose
from sqrtdk.compare.numbers import of_formula
from sqrtdk.compare.program import Formula, Program
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "mask_offset"
NONE = "none"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """B's causal bound in A's band."""
    a, b = sides.a.formula, sides.b.formula
    bands = None if a is None or b is None else compare_bands(a, b)
    if bands is None or b is None or bands.windows:
        return
    if bands.offset is not None:
        if bands.offset:
            change = moved_band(b, bands.offset, bands.offset if bands.moved else 0)
            yield _suspicion(bands, change, _text(bands))
    elif bands.a.least is not None:
        yield _suspicion(bands, _set_least(b, None), "leaves out the causal mask")
    elif bands.b.least is not None:
        yield _suspicion(bands, _set_least(b, bands.b.least), "has a causal mask, which A has not")


def moved_band(b: Formula, least: int, greatest: int) -> Callable[[Program], Program]:
    """The change that moves the bounds of the band, as far as there are any."""

    def change(formula: Formula) -> Formula:
        both = taken_apart(formula, b)
        if both is None:
            return formula
        parts, other = both
        low = None if parts.least is None else parts.least + least
        high = None if parts.greatest is None else parts.greatest + greatest
        return replace(formula, visible=recompose(with_band(parts, low, high, other)))

    return of_formula(change)


def _set_least(b: Formula, least: int | None) -> Callable[[Program], Program]:
    def change(formula: Formula) -> Formula:
        both = taken_apart(formula, b)
        if both is None:
            return formula
        parts, other = both
        return filled(formula, b, recompose(with_band(parts, least, parts.greatest, other)))

    return of_formula(change)


def filled(formula: Formula, other: Formula, visible: Tensor | None) -> Formula:
    """The formula with a mask; where it had none, hidden keys get what the other puts in their place."""
    changed = replace(formula, visible=visible)
    if formula.visible is not None or visible is None:
        return changed
    return replace(changed, mask=other.mask, fill=other.fill, fill_by=other.fill_by, fill_added=other.fill_added)


def _suspicion(bands: Bands, change: Callable[[Program], Program], text: str) -> Suspicion:
    a, b = (NONE if parts.least is None else parts.least for parts in (bands.a, bands.b))
    return Suspicion(NAME, "mask", a, b, change, text)


def _text(bands: Bands) -> str:
    assert bands.offset is not None
    least, by = bands.a.least, abs(bands.offset)
    keys = "one key" if by == 1 else f"{by} keys"
    if bands.offset < 0:
        return f"lets every row see {keys} more ahead (least i - j {bands.b.least} in place of {least})"
    return f"hides {keys} more from every row (least i - j {bands.b.least} in place of {least})"
