"""Two bands compared: where each is aligned, and by what its bounds are off then.

A causal mask of L rows and S keys begins at the upper left corner (least i - j = 0) or ends at the lower right one
(least i - j = L - S). A band is taken to be aligned as the other is where it is one key off at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sqrtdk.compare.masks import Parts, decompose, shape_of
from sqrtdk.compare.program import Formula

UPPER_LEFT, LOWER_RIGHT = "upper left", "lower right"


@dataclass(frozen=True, slots=True, eq=False)
class Bands:
    """The masks of both sides, taken apart, and the difference of their bands.

    Attributes:
        a: A's parts.
        b: B's parts.
        alignment_a: `UPPER_LEFT` or `LOWER_RIGHT`, where the two are aligned otherwise; else None.
        alignment_b: the same of B.
        shift: by what B's alignment moves A's band.
        offset: by what B's least i - j is off beyond that; None where not both have one.
        reach: by what B's greatest i - j is off beyond the shift; None where not both have one.
    """

    a: Parts
    b: Parts
    alignment_a: str | None
    alignment_b: str | None
    shift: int
    offset: int | None
    reach: int | None

    @property
    def greatest_a(self) -> int | None:
        """A's greatest i - j where B's alignment has it; None where it hides nothing there."""
        return _felt(self.a.greatest, self.shift, self.a.rows)

    @property
    def greatest_b(self) -> int | None:
        """B's greatest i - j; None where it hid nothing in A's alignment, which could not show that A has it too."""
        return self.b.greatest if _felt(self.b.greatest, -self.shift, self.a.rows) is not None else None

    @property
    def windows(self) -> bool:
        """Whether one side has a window that reaches as far ahead as back, and the other such a one or no band."""
        a, b = self.a, self.b
        return (a.symmetric and (b.symmetric or not b.banded)) or (b.symmetric and not a.banded)

    @property
    def moved(self) -> bool:
        """Whether the band as a whole stands elsewhere: both bounds are off by the same."""
        return self.offset is not None and self.offset != 0 and self.offset == self.reach


def taken_apart(a: Formula, b: Formula) -> tuple[Parts, Parts] | None:
    """The parts of both masks, None where neither side has one."""
    if a.visible is None and b.visible is None:
        return None
    shape = shape_of(a.visible, b.visible)
    left, right = decompose(a.visible, *shape), decompose(b.visible, *shape)
    return left, right


def compare_bands(a: Formula, b: Formula) -> Bands | None:
    """The difference of the bands of two formulas, None where neither hides anything."""
    both = taken_apart(a, b)
    if both is None:
        return None
    left, right = both
    corner_a, corner_b = 0, 0
    if left.rows == 1 < left.keys:  # a row that is alone sees every key if it is the last
        left, right = _alone(left, right), _alone(right, left)
    if left.least is not None and right.least is not None:
        corner_a, corner_b = _corners(left.least, right.least, left.rows - left.keys)
    shift = corner_b - corner_a
    names = (
        (None, None) if not shift else tuple(LOWER_RIGHT if corner else UPPER_LEFT for corner in (corner_a, corner_b))
    )
    return Bands(
        left, right, names[0], names[1], shift, _beyond(left.least, right.least, shift),
        _beyond(left.greatest, right.greatest, shift),
    )  # fmt: skip


def _alone(parts: Parts, other: Parts) -> Parts:
    return replace(parts, least=1 - parts.keys) if parts.least is None and other.least == 0 else parts


def _corners(a: int, b: int, lower_right: int) -> tuple[int, int]:
    """The least i - j of the alignments of two bands; the same number twice where one alignment would do for both."""
    exact = {0, lower_right}
    if a in exact and b in exact:
        return a, b
    near = [{corner for corner in exact if abs(least - corner) <= 1} for least in (a, b)]
    if not near[0] or not near[1] or near[0] & near[1]:
        return 0, 0
    return min(near[0]), min(near[1])


def _felt(greatest: int | None, shift: int, rows: int) -> int | None:
    return None if greatest is None or greatest + shift >= rows - 1 else greatest + shift


def _beyond(a: int | None, b: int | None, shift: int) -> int | None:
    return None if a is None or b is None else b - a - shift
