"""Differences of two masks: alignment, causal bound, window, padding, and other structure.

A causal mask of L rows and S keys starts at the upper left corner (least i - j = 0), like SDPA's `is_causal`, or ends
at the lower right one (least i - j = L - S), like that of a decoder with a cache. A band that is at most one key off a
corner counts as aligned to it. A bound that is off beyond the alignment is the causal bound (`mask_offset`), the other
bound, or both bounds of a window that reaches equally far ahead and back (`window`). A window whose bounds are both off
by the same number is shifted as a whole, which is an offset too. A key that no row sees, although the band allows it,
is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.causes.structure import layout_words, single_keys_words, stretches_words
from sqrtdk.compare.inside.program import Formula
from sqrtdk.compare.inside.suspect import (
    NO_VALUE,
    BothParts,
    DifferenceWords,
    Edit,
    PartDifference,
    Sides,
    change_formula,
    formula_pairs,
)
from sqrtdk.compare.numbers import span
from sqrtdk.masks.band import Band
from sqrtdk.masks.decompose import common_mask_shape, decompose
from sqrtdk.masks.parts import CLOSED, NOT_APART, OPEN, Parts, recompose, rows_differ, with_padding, with_pattern
from sqrtdk.messages import Message, joined

UPPER_LEFT, LOWER_RIGHT = "causes.mask_alignment.upper_left", "causes.mask_alignment.lower_right"
FIRST, LAST = "causes.padding.first", "causes.padding.last"
Among = Callable[[Tensor], Tensor]
SPECIAL_ROWS: tuple[tuple[Among, str, str], ...] = (  # code of a special row, how many rows see what, what B does
    (lambda apart: apart == OPEN, "causes.padding.seeing_all", "causes.padding.rows_see_all"),
    (lambda apart: apart > NOT_APART, "causes.padding.seeing_own", "causes.padding.rows_see_own"),
    (lambda apart: apart == CLOSED, "causes.padding.seeing_none", "causes.padding.rows_see_none"),
)
SENTENCE_ORDER = (0, 2, 1)  # rows of `SPECIAL_ROWS` in the order of a sentence that counts them


def _taken_apart(a: Formula, b: Formula) -> tuple[Parts, Parts]:
    shape = common_mask_shape(a.visible, b.visible)
    return decompose(a.visible, *shape), decompose(b.visible, *shape)


def mask_pairs(sides: Sides) -> Iterator[BothParts[Parts]]:
    """Yield both masks, decomposed into bounds, padding and other structure; nothing if neither side has a mask."""
    for both in formula_pairs(sides):
        if both.a.visible is not both.b.visible:
            yield BothParts(sides, *_taken_apart(both.a, both.b), change_formula)


def band_pairs(sides: Sides) -> Iterator[BothParts[Parts]]:
    """Yield both masks as `mask_pairs` does, if a comparison of their bounds is meaningful.

    Nothing is yielded if only one mask has single keys that no structure explains, or if one mask is the other in
    another layout, such as transposed.
    """
    for both in mask_pairs(sides):
        if _lopsided(both) or _layout_of_b(both) is not None:
            continue
        a, b = both.a, both.b
        if a.rows == 1 < a.keys:  # a single row sees every key if it is the last
            a, b = _as_last_row(a, b), _as_last_row(b, a)
        yield replace(both, a=a, b=b)


def _lopsided(both: BothParts[Parts]) -> bool:
    """Return whether only one side hides keys that no named part explains; its other parts are then unreliable."""
    return (both.a.rest is None) != (both.b.rest is None)


def _layout_of_b(both: BothParts[Parts]) -> DifferenceWords | None:
    """Return how B's mask is A's laid out differently; None if one bound or the padding is all that differs."""
    a, b = both.a, both.b
    plain = None is a.rest is b.rest is a.documents is b.documents is a.blocks is b.blocks
    unlike = [a.least != b.least, a.greatest != b.greatest, bool((a.padding != b.padding).any())]
    return None if plain and sum(unlike) < 2 else layout_words(a, b, _whole_masks(both), "mask")


def _as_last_row(parts: Parts, other: Parts) -> Parts:
    return replace(parts, least=1 - parts.keys) if parts.least is None and other.least == 0 else parts


def _corners(a: Parts, b: Parts) -> tuple[int, int]:
    """Return the least i - j of both bands' corners; equal numbers if one alignment explains both."""
    exact = {0, a.rows - a.keys}
    if a.least is None or b.least is None:
        return 0, 0
    if a.least in exact and b.least in exact:
        return a.least, b.least
    # one key off a corner is `tril(1)` at that corner, `mask_offset`, and no other alignment
    near = [{corner for corner in exact if abs(least - corner) <= 1} for least in (a.least, b.least)]
    if not near[0] or not near[1] or near[0] & near[1]:
        return 0, 0
    return min(near[0]), min(near[1])


def _shift(both: BothParts[Parts]) -> int:
    """Return the shift of A's band that B's alignment causes."""
    old, new = _corners(both.a, both.b)
    return new - old


def _offset(both: BothParts[Parts]) -> tuple[int | None, bool]:
    """Return the offset of B's causal bound beyond the alignment, and whether the window is shifted as a whole.

    The offset is None unless both sides have a causal bound. A shifted window has both bounds off by the same number.
    """
    bounds = (both.a.least, both.b.least), (both.a.greatest, both.b.greatest)
    low, high = (None if a is None or b is None else b - a - _shift(both) for a, b in bounds)
    return low, bool(low) and low == high


def _windows(both: BothParts[Parts]) -> bool:
    """Return whether one side has a window equally far ahead and back, and the other has such a window or no band."""
    a, b = both.a, both.b
    return any(x.symmetric and (y.symmetric or y.least is None is y.greatest) for x, y in ((a, b), (b, a)))


def _greatest_that_hides(parts: Parts, shift: int) -> int | None:
    """Return the greatest i - j after a shift of the alignment; None if it hides nothing there."""
    moved = _shifted(parts.greatest, shift)
    return None if moved is None or moved >= parts.rows - 1 else moved


def _shifted(bound: int | None, by: int) -> int | None:
    return None if bound is None else bound + by


def _mask_edit(both: BothParts[Parts], moved: Callable[[Parts, Parts], Parts] | None = None) -> Edit[Formula]:
    """Return the edit that puts `moved(current parts, B's parts)` into the formula; by default B's whole mask.

    If the formula had no mask, hidden keys also get B's fill.
    """
    b = both.sides.b.formula
    assert b is not None

    def edit(formula: Formula) -> Formula:
        visible = b.visible if moved is None else recompose(moved(*_taken_apart(formula, b)))
        changed = replace(formula, visible=visible)
        if formula.visible is not None or visible is None:
            return changed
        return replace(changed, mask=b.mask, fill=b.fill, fill_by=b.fill_by, fill_added=b.fill_added)

    return edit


def _banded(both: BothParts[Parts], band: Callable[[Parts], Band]) -> Edit[Formula]:
    """Return the edit that changes the band; keys that appear or vanish follow B's mask."""

    def moved(parts: Parts, other: Parts) -> Parts:
        least, greatest = band(parts)
        return with_pattern(parts, other, least=least, greatest=greatest)

    return _mask_edit(both, moved)


# -- what differs ------------------------------------------------------------------------------------------------------


def compare_alignment(both: BothParts[Parts]) -> PartDifference | None:
    """Return the difference if causal masks of L rows and S keys are aligned to other corners; None otherwise.

    The upper left corner means i >= j for row i and key j, the lower right one i - j >= L - S. A window moves along
    with its causal bound.
    """
    a, b, shift = both.a, both.b, _shift(both)
    if not shift:
        return None
    # a window that hides nothing in A's alignment shows only in B's
    hidden = b.greatest if _greatest_that_hides(b, -shift) is None else None

    def band(parts: Parts) -> Band:
        low = b.least if parts.least is None else parts.least + shift
        return Band(low, hidden if parts.greatest is None else parts.greatest + shift)

    old, new = (Message(LOWER_RIGHT if corner else UPPER_LEFT) for corner in _corners(a, b))
    return PartDifference(old, new, {"count": f"{a.rows}", "keys": f"{a.keys}"}, _banded(both, band))


def compare_causal_bound(both: BothParts[Parts]) -> PartDifference | None:
    """Return the difference of the least i - j of a visible key, apart from the alignment; None if there is none.

    The next key is visible, say, or the own key is hidden, or one side has no such bound. `a` and `b` are the least i -
    j.
    """
    a, b, (offset, moved) = both.a.least, both.b.least, _offset(both)
    if _windows(both) or a == b or offset == 0:
        return None
    if offset is None:
        text = Message("causes.mask_offset.missing" if b is None else "causes.mask_offset.added")
        edit = _banded(both, lambda parts: Band(b, parts.greatest))
    else:
        assert a is not None
        assert b is not None
        one, many = Message("causes.mask_offset.one_key"), Message("causes.mask_offset.keys", count=abs(offset))
        id = "causes.mask_offset.ahead" if offset < 0 else "causes.mask_offset.hides"
        text = Message(id, keys=one if abs(offset) == 1 else many, new=b, old=a)
        reach = offset if moved else 0
        edit = _banded(both, lambda parts: Band(_shifted(parts.least, offset), _shifted(parts.greatest, reach)))
    old, new = (Message(NO_VALUE) if least is None else least for least in (a, b))
    return PartDifference(old, new, edit=edit, text=text, code="causal" if a == 0 else "")


def compare_window(both: BothParts[Parts]) -> PartDifference | None:
    """Return the difference of the greatest i - j of a visible key; None if there is none.

    A window may be off by one, of another size, missing, or on other layers. `a` and `b` are its sizes in keys. Windows
    that reach equally far ahead and back are compared by both bounds.
    """
    a, b, shift, both_bounds = both.a, both.b, _shift(both), _windows(both)
    sizes = a.greatest, b.greatest
    if not both_bounds:  # a window is compared only as far as it hides a key in the other's alignment
        sizes = _greatest_that_hides(a, shift), None if _greatest_that_hides(b, -shift) is None else b.greatest
    if _offset(both)[1] or sizes[0] == sizes[1]:
        return None

    def band(parts: Parts) -> Band:
        return Band(b.least if both_bounds else parts.least, _shifted(b.greatest, -shift))

    return PartDifference(_size(a), _size(b), edit=_banded(both, band))


def _size(parts: Parts) -> int | str:
    """Return the number of keys in a row's window, its own included."""
    return Message(NO_VALUE) if parts.greatest is None else parts.greatest + 1 - (parts.least or 0)


def compare_padding(both: BothParts[Parts]) -> PartDifference | None:
    """Return the difference in which keys are padding, or in what rows of padding see; None if there is none.

    It is also None if the masks are related by another layout, or if only one mask has keys that no structure explains.
    """
    a, b = both.a, both.b
    if _lopsided(both) or _layout_of_b(both) is not None:
        return None
    if not bool((a.padding != b.padding).any()):
        # the padding agrees, but `mask | is_padding[:, None, :, None]` shows padding rows every key to avoid NaN
        rows = rows_differ(a, b)
        if not bool(rows.any()):
            return None
        words = DifferenceWords(_rows(a), _rows(b), _rows_text(a, b, rows))
    else:
        words = layout_words(a, b, _whole_masks(both), "padding") or _keys_words(a, b)
    return PartDifference(words.a, words.b, words.values, _mask_edit(both, with_padding), text=words.text)


def compare_structure(both: BothParts[Parts]) -> PartDifference | None:
    """Return the difference of documents, blocks, layout or single keys; None if there is none.

    It is also None if bounds, padding and the rows of padding already explain every difference of the masks.
    """
    a, b = both.a, both.b
    one, other = _whole_masks(both)
    if torch.equal(one, other):
        return None
    laid, edit = _layout_of_b(both), _mask_edit(both)
    if laid is None and a.rest is None and b.rest is None:
        words, edit = stretches_words(a, b), _mask_edit(both, _with_stretches)
    elif laid is None and not _lopsided(both) and _in_parts(a, b, other):
        words = None
    else:
        words = laid or single_keys_words((one, other))
    return None if words is None else PartDifference(words.a, words.b, words.values, edit, text=words.text)


def _with_stretches(parts: Parts, other: Parts) -> Parts:
    return with_pattern(parts, other, documents=other.documents, blocks=other.blocks)


def _whole_masks(both: BothParts[Parts]) -> tuple[Tensor, Tensor]:
    """Return both masks, (B, H, L, S)."""
    a = both.a
    every = torch.ones(1, 1, a.rows, a.keys, dtype=torch.bool, device=a.padding.device)
    found = (None if side.formula is None else side.formula.visible for side in (both.sides.a, both.sides.b))
    one, other = (every if mask is None else every & mask.bool() for mask in found)
    return one.expand_as(one | other), other.expand_as(one | other)


def _in_parts(a: Parts, b: Parts, mask: Tensor) -> bool:
    """Return whether B's named parts, put into A's mask, make B's mask."""
    moved = with_pattern(_with_stretches(a, b), b, least=b.least, greatest=b.greatest)
    made = recompose(with_padding(moved, b))
    return bool((mask if made is None else made == mask).all())


def _keys(parts: Parts) -> Message:
    """Return which keys are padding over all entries, as text: "none", "the last 1 to 3"."""
    hidden = ~parts.padding
    counts = hidden.sum(-1)
    if not bool(hidden.any()):
        return Message(NO_VALUE)
    most, fewest = int(counts.max()), int(counts[counts > 0].min())
    many = f"{most}" if most == fewest else span(fewest, most)
    for where, ordered in ((FIRST, hidden), (LAST, hidden.flip(-1))):
        if not bool((ordered[:, 1:] & ~ordered[:, :-1]).any()):
            return Message(where, number=many)
    return Message("causes.padding.some", some=many, all=hidden.shape[-1])


def _keys_words(of_a: Parts, of_b: Parts) -> DifferenceWords:
    a, b = _keys(of_a), _keys(of_b)
    if b.id == NO_VALUE:
        return DifferenceWords(a, b, "causes.padding.missing")
    if a.id == NO_VALUE:
        return DifferenceWords(a, b, "causes.padding.added")
    # the fix is a flip, so that has to give A's padding
    other_end = {a.id, b.id} == {FIRST, LAST} and bool((of_b.padding.flip(-1) == of_a.padding).all())
    return DifferenceWords(a, b, "causes.padding.other_end" if other_end else "causes.padding.other")


def _rows(parts: Parts) -> str:
    """Return what special rows see, as text."""
    counts = [
        (what, int(among(parts.apart).sum())) for among, what, _ in (SPECIAL_ROWS[place] for place in SENTENCE_ORDER)
    ]
    kinds = [Message(what, number=count) for what, count in counts if count]
    return joined(kinds, "clause") if kinds else Message("causes.padding.as_masked")


def _rows_text(a: Parts, b: Parts, rows: Tensor) -> str:
    for among, _, text in SPECIAL_ROWS:
        if bool((rows & among(b.apart)).any()):
            return text
    every = bool((rows & (a.apart == OPEN)).any())
    what = Message("causes.padding.every_key" if every else "causes.padding.a_key")
    return Message("causes.padding.rows_no_longer", what=what)
