"""How two masks differ: alignment, causal bound, window, padding, and structure that is none of these.

A causal mask of L rows and S keys begins at the upper left corner (least i - j = 0), as SDPA's `is_causal`, or ends at
the lower right one (least i - j = L - S), as a decoder's with a cache. A band is taken to be aligned as the other is
where it is one key off at most. What is off beyond the alignment is the causal bound (`mask_offset`), the other bound,
or both of a window that reaches as far ahead as back (`window`); a window of which both bounds are off by the same
stands elsewhere as a whole, which is an offset too. A key that no row sees, although the band lets it, is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.causes.structure import Words, blocks, documents, laid_otherwise, single_keys
from sqrtdk.compare.masks import (
    CLOSED,
    NOT_APART,
    OPEN,
    Parts,
    decompose,
    recompose,
    rows_differ,
    shape_of,
    with_padding,
    with_pattern,
    with_stretches,
)
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import NONE, Both, Difference, Edit, Sides, of_formula

UPPER_LEFT, LOWER_RIGHT = "upper left", "lower right"
Bounds = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """A mask taken apart.

    Attributes:
        parts: of the mask.
        formula: whose it is.
        corner: the least i - j of its alignment, where the two masks are aligned otherwise.
    """

    parts: Parts
    formula: Formula
    corner: int = 0


def _taken_apart(a: Formula, b: Formula) -> tuple[Parts, Parts]:
    shape = shape_of(a.visible, b.visible)
    return decompose(a.visible, *shape), decompose(b.visible, *shape)


def masks(sides: Sides) -> Iterator[Both[Masks]]:
    """The masks, where a side has one."""
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None or (a.visible is None and b.visible is None):
        return
    left, right = _taken_apart(a, b)
    yield Both(sides, Masks(left, a), Masks(right, b), of_formula)


def bands(sides: Sides) -> Iterator[Both[Masks]]:
    """The masks with their alignments."""
    for both in masks(sides):
        if _lopsided(both) or _laid(both) is not None:
            continue
        left, right = both.a.parts, both.b.parts
        if left.rows == 1 < left.keys:  # a row that is alone sees every key if it is the last
            left, right = _alone(left, right), _alone(right, left)
        corners = 0, 0
        if left.least is not None and right.least is not None:
            corners = _corners(left.least, right.least, left.rows - left.keys)
        a, b = (Masks(x, y.formula, z) for x, y, z in zip((left, right), (both.a, both.b), corners, strict=True))
        yield replace(both, a=a, b=b)


def _lopsided(both: Both[Masks]) -> bool:
    """Whether one side alone hides keys that no named part does: what its parts seem to be is then not the whole."""
    return (both.a.parts.rest is None) != (both.b.parts.rest is None)


def _laid(both: Both[Masks]) -> Words | None:
    """How B's mask is A's laid otherwise; None where one bound or the padding is all that differs."""
    a, b = both.a.parts, both.b.parts
    plain = None is a.rest is b.rest is a.documents is b.documents is a.blocks is b.blocks
    unlike = [a.least != b.least, a.greatest != b.greatest, bool((a.padding != b.padding).any())]
    return None if plain and sum(unlike) < 2 else laid_otherwise(a, b, _whole(both), "mask")


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


def _shift(both: Both[Masks]) -> int:
    """By what B's alignment moves A's band."""
    return both.b.corner - both.a.corner


def _offset(both: Both[Masks]) -> int | None:
    """By what B's causal bound is off beyond the alignment; None where not both have one."""
    return _beyond(both.a.parts.least, both.b.parts.least, _shift(both))


def _beyond(a: int | None, b: int | None, shift: int) -> int | None:
    return None if a is None or b is None else b - a - shift


def _moved(both: Both[Masks]) -> bool:
    """Whether the band as a whole stands elsewhere: both bounds are off by the same."""
    offset = _offset(both)
    return bool(offset) and offset == _beyond(both.a.parts.greatest, both.b.parts.greatest, _shift(both))


def _windows(both: Both[Masks]) -> bool:
    """Whether one side has a window that reaches as far ahead as back, and the other such a one or no band."""
    a, b = both.a.parts, both.b.parts
    return (a.symmetric and (b.symmetric or not b.banded)) or (b.symmetric and not a.banded)


def _felt(greatest: int | None, shift: int, rows: int) -> int | None:
    """A greatest i - j in an alignment that is moved by `shift`; None where it hides nothing there."""
    return None if greatest is None or greatest + shift >= rows - 1 else greatest + shift


def _put(b: Formula, moved: Callable[[Parts, Parts], Parts]) -> Edit[Formula]:
    """What `moved` makes of the parts of the mask as it is then, and of B's."""

    def edit(formula: Formula) -> Formula:
        if formula.visible is None and b.visible is None:
            return formula
        return _filled(formula, b, recompose(moved(*_taken_apart(formula, b))))

    return edit


def _banded(b: Formula, bounds: Callable[[Parts], Bounds]) -> Edit[Formula]:
    """Another band; keys that come in or go out are else as B has them."""

    def moved(parts: Parts, other: Parts) -> Parts:
        least, greatest = bounds(parts)
        return with_pattern(parts, other, least=least, greatest=greatest)

    return _put(b, moved)


def _filled(formula: Formula, other: Formula, visible: Tensor | None) -> Formula:
    """The formula with a mask; where it had none, hidden keys get what the other puts in their place."""
    changed = replace(formula, visible=visible)
    if formula.visible is not None or visible is None:
        return changed
    return replace(changed, mask=other.mask, fill=other.fill, fill_by=other.fill_by, fill_added=other.fill_added)


def _plus(bound: int | None, by: int) -> int | None:
    return None if bound is None else bound + by


# -- what differs ------------------------------------------------------------------------------------------------------


def alignment(both: Both[Masks]) -> Difference | None:
    """The corner from which the band counts, only where L is not S. A window moves with its causal bound."""
    a, b, shift = both.a.parts, both.b.parts, _shift(both)
    if not shift:
        return None
    # a window that only B's alignment can show
    hidden = b.greatest if _felt(b.greatest, -shift, a.rows) is None else None

    def bounds(parts: Parts) -> Bounds:
        low = b.least if parts.least is None else parts.least + shift
        return low, hidden if parts.greatest is None else parts.greatest + shift

    old, new = (LOWER_RIGHT if mask.corner else UPPER_LEFT for mask in (both.a, both.b))
    rows = "1 row" if a.rows == 1 else f"{a.rows} rows"
    return Difference(old, new, {"rows": rows, "keys": f"{a.keys}"}, _banded(both.b.formula, bounds))


def causal_bound(both: Both[Masks]) -> Difference | None:
    """The least i - j of a visible key: a row sees the key after its own, or not its own; or there is no such bound."""
    a, b, offset = both.a.parts.least, both.b.parts.least, _offset(both)
    if _windows(both) or a == b or offset == 0:
        return None
    if offset is None:
        text = "leaves out the causal mask" if b is None else "has a causal mask, which A has not"
        edit = _banded(both.b.formula, lambda parts: (b, parts.greatest))
    else:
        keys = "one key" if abs(offset) == 1 else f"{abs(offset)} keys"
        what = f"lets every row see {keys} more ahead" if offset < 0 else f"hides {keys} more from every row"
        text = f"{what} (least i - j {b} in place of {a})"
        reach = offset if _moved(both) else 0
        edit = _banded(both.b.formula, lambda parts: (_plus(parts.least, offset), _plus(parts.greatest, reach)))
    return Difference(NONE if a is None else a, NONE if b is None else b, {"text": text}, edit)


def window(both: Both[Masks]) -> Difference | None:
    """The greatest i - j of a visible key, or both bounds: off by one, another size, missing, on the wrong layers."""
    a, b, shift, both_bounds = both.a.parts, both.b.parts, _shift(both), _windows(both)
    sizes = a.greatest, b.greatest
    if not both_bounds:  # as far as each hides a key in the other's alignment as well
        hides = _felt(b.greatest, -shift, a.rows) is not None
        sizes = _felt(a.greatest, shift, a.rows), b.greatest if hides else None
    if _moved(both) or sizes[0] == sizes[1]:
        return None

    def bounds(parts: Parts) -> Bounds:
        return b.least if both_bounds else parts.least, _plus(b.greatest, -shift)

    return Difference(_size(a), _size(b), edit=_banded(both.b.formula, bounds))


def _size(parts: Parts) -> int | str:
    """Keys in the window of a row, its own among them."""
    if parts.greatest is None:
        return NONE
    return parts.greatest + 1 if parts.least is None else parts.greatest - parts.least + 1


def padding(both: Both[Masks]) -> Difference | None:
    """Padding is seen, or other keys are taken for it; or, of the same keys, rows of padding see other ones."""
    a, b = both.a.parts, both.b.parts
    rows = rows_differ(a, b)
    if _lopsided(both) or _laid(both) is not None:
        return None
    if not bool((a.padding != b.padding).any()):
        if not bool(rows.any()):
            return None
        old, new, text = _rows(a), _rows(b), _rows_text(a, b, rows)
    elif (laid := laid_otherwise(a, b, _whole(both), "padding")) is not None:
        old, new, text = laid
    else:
        old, new = _keys(a), _keys(b)
        text = _keys_text(old, new)
    return Difference(old, new, {"text": text}, _put(both.b.formula, with_padding))


def structure(both: Both[Masks]) -> Difference | None:
    """Documents, blocks, the same mask laid otherwise; keys without a pattern where no part and no row has them all."""
    a, b, formula = both.a.parts, both.b.parts, both.b.formula
    one, other = _whole(both)
    stretches = [words for words in (documents(a, b), blocks(a, b)) if words is not None]
    plain, laid = a.rest is None and b.rest is None, _laid(both)
    if torch.equal(one, other):
        return None
    if laid is None and plain and stretches:
        old, new = (", ".join(words[side] for words in stretches) for side in (0, 1))
        text = "; ".join(words[2] for words in stretches)
        return Difference(old, new, {"text": text}, _put(formula, with_stretches))
    if laid is None and (plain or (not _lopsided(both) and _in_parts(a, b, other))):
        return None
    old, new, text = laid or single_keys((one, other))
    return Difference(old, new, {"text": text}, lambda own: _filled(own, formula, formula.visible))


def _whole(both: Both[Masks]) -> tuple[Tensor, Tensor]:
    """Both masks, (B, H, L, S)."""
    a = both.a.parts
    everything = torch.ones(1, 1, a.rows, a.keys, dtype=torch.bool, device=a.padding.device)
    found = (everything if x.visible is None else x.visible.bool() for x in (both.a.formula, both.b.formula))
    one, other = (everything & mask for mask in found)
    return one.expand_as(one | other), other.expand_as(one | other)


def _in_parts(a: Parts, b: Parts, mask: Tensor) -> bool:
    """Whether the named parts of B, put into A's mask, make it B's."""
    moved = with_pattern(with_stretches(a, b), b, least=b.least, greatest=b.greatest)
    made = recompose(with_padding(moved, b))
    return bool((mask if made is None else made == mask).all())


def _keys(parts: Parts) -> str:
    """Which keys are padding, of all entries: "none", "the last 1 to 3"."""
    hidden = ~parts.padding
    counts = hidden.sum(-1)
    if not bool(hidden.any()):
        return NONE
    most, fewest = int(counts.max()), int(counts[counts > 0].min())
    many = f"{most}" if most == fewest else f"{fewest} to {most}"
    for where, ordered in (("first", hidden), ("last", hidden.flip(-1))):
        if not bool((ordered[:, 1:] & ~ordered[:, :-1]).any()):
            return f"the {where} {many}"
    return f"{many} of {hidden.shape[-1]}"


def _keys_text(a: str, b: str) -> str:
    if b == NONE:
        return f"leaves out the padding mask ({a} keys)"
    if a == NONE:
        return f"hides keys as padding ({b}), which A does not"
    if {a[:8], b[:8]} == {"the firs", "the last"}:
        return f"takes {b} keys for padding, not {a}"
    return f"takes other keys for padding ({b} in place of {a})"


def _rows(parts: Parts) -> str:
    """What rows that stand apart see."""
    seen = {"every key": parts.apart == OPEN, "none": parts.apart == CLOSED, "their own": parts.apart > NOT_APART}
    said = [f"{int(rows.sum())} rows see {what}" for what, rows in seen.items() if bool(rows.any())]
    return ", ".join(said) or "all rows see what the mask lets them"


def _rows_text(a: Parts, b: Parts, rows: Tensor) -> str:
    if bool((rows & (b.apart == OPEN)).any()):
        return "lets rows of padding see every key"
    if bool((rows & (b.apart > NOT_APART)).any()):
        return "lets rows of padding see their own key alone"
    if bool((rows & (b.apart == CLOSED)).any()):
        return "hides every key from other rows"
    what = "every key" if bool((rows & (a.apart == OPEN)).any()) else "a key"
    return f"does not let rows of padding see {what}, as A does"
