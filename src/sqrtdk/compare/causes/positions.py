"""Positions of rows in words: where they start, behind a cache, in a padded sequence, on the axes of an image.

Every function takes what both sides do and returns what A does, what B does, and the sentence on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.compare.inside.suspect import QKV_LETTERS, BothParts, DifferenceWords, path_of, rotation_of
from sqrtdk.compare.numbers import span, unequal_texts
from sqrtdk.messages import Message, joined
from sqrtdk.tracing.probe.tables import Turn, angle_gap, phase, take_apart, unit_amplitude

POSITION_ERRORS = 16.0  # in units of the allowed error: angles this far apart belong to different positions
FREQUENCY_ACCURACY = 1e-4  # radians: the accuracy of frequencies that are known from few steps
MULTIPLE_TOLERANCE = 0.05  # distance up to which a multiple of the smallest step counts as a whole number
OVER, MODULO = "causes.positions.token_over", "causes.positions.token_modulo"


# -- one position a row ------------------------------------------------------------------------------------------------


def times_words(both: BothParts[Any], a: Turn | None, b: Turn | None, near: float) -> DifferenceWords | None:
    """Return what to say if one side rotates a vector twice: all its angles are twice the other's; else None.

    If the positions of both q and k are halved, the cause is a linear scaling of the frequencies instead, and None is
    returned.

    Args:
        both: both rotations of one vector.
        a: A's table as positions and frequencies; None if unknown.
        b: B's table as positions and frequencies; None if unknown.
        near: allowed difference of equal angles, in radians.
    """
    if a is None or b is None:
        return None
    # rope(rope(q)) for rope(q): angles add up
    angles = [turn.positions[..., None] * turn.frequencies for turn in (a, b)]
    if angles[0].shape[1:] != angles[1].shape[1:]:
        return None
    other = "key" if both.vector == "query" else "query"
    beside = [rotation_of(path_of(side, other)) for side in (both.sides.a, both.sides.b)]
    tables = [x.table for x in beside if x is not None]
    alone = len(tables) == 2 and tables[0].shape[1:] == tables[1].shape[1:] and angle_gap(*tables) <= near
    plain = abs(float(a.frequencies.abs().max()) - 1) <= near
    once, twice = Message("causes.positions.once"), Message("causes.positions.twice")
    if float((angles[1] - 2 * angles[0]).abs().max()) <= 2 * near and (alone or plain):
        if alone:
            return DifferenceWords(once, twice, "causes.positions.twice_beside", {"other": QKV_LETTERS[other]})
        return DifferenceWords(once, twice, "causes.positions.twice_not_once")
    if float((angles[0] - 2 * angles[1]).abs().max()) <= 2 * near and alone:
        return DifferenceWords(twice, once, "causes.positions.once_not_twice")
    return None


def places_words(both: BothParts[Any], a: Tensor, b: Tensor) -> DifferenceWords:
    """Return what to say about different positions: shifted, not counting a cache or padding, or single ones.

    Args:
        both: both rotations of one vector.
        a: A's positions, (B, L) or (1, L).
        b: B's positions, in a shape that broadcasts with A's.
    """
    a, b = a + 0 * b, b + 0 * a  # broadcasts both
    shift, was, now = b - a, _in_words(a[0]), _in_words(b[0])
    found = _behind_cache(both, a[0], b[0]) if bool((shift == shift[0]).all()) else None
    if found is not None:
        return DifferenceWords(was, now, *found)
    if bool((shift == shift[0, 0]).all()):
        by = f"{float(shift[0, 0]):+g}"
        return DifferenceWords(was, now, "causes.positions.shifted", {"new": now, "old": was, "shift": by})
    sequence, row = divmod(int(shift.abs().flatten().argmax()), shift.shape[1])
    if bool((shift == shift[0]).all()):
        if was == now:
            old, new = unequal_texts(float(a[0, row]), float(b[0, row]), 6)
            was, now = (Message("causes.positions.at_row", place=place, row=row) for place in (old, new))
        since = int((shift[0] != 0).nonzero()[0])
        return DifferenceWords(was, now, "causes.positions.since", {"row": f"{since}", "new": now, "old": was})
    last = shift.shape[1] - 1
    row = last if float(shift[sequence, last]) == float(shift[sequence, row]) else row
    old, new = unequal_texts(float(a[sequence, row]), float(b[sequence, row]), 6)
    padding = _padding(both, sequence)
    if shift.shape[1] > 1:
        where = Message("causes.positions.row_of_sequence", row=row, sequence=sequence)
        was, now = (
            Message("causes.positions.at_row_of", place=place, row=row, sequence=sequence) for place in (old, new)
        )
    else:
        where = Message("causes.positions.in_sequence", sequence=sequence)
        was, now = (Message("causes.positions.at_sequence", place=place, sequence=sequence) for place in (old, new))
    why = ""
    if padding and abs(float(shift[sequence, row])) == padding:
        id = "causes.positions.padding_counted" if new > old else "causes.positions.padding_not_counted"
        why = Message(id, tokens=padding)
    return DifferenceWords(was, now, "causes.positions.given", {"new": new, "old": old, "where": where, "why": why})


def _behind_cache(both: BothParts[Any], a: Tensor, b: Tensor) -> tuple[str, dict[str, str]] | None:
    """Return the sentence on cached keys, or on the new rows behind them; None without a cache."""
    query, key = (rotation_of(path_of(both.sides.b, name)) for name in ("query", "key"))
    cached = 0 if query is None or key is None else key.table.shape[1] - query.table.shape[1]
    if cached <= 0:
        return None
    at = cached if both.vector == "key" else 0  # cached keys come before the new ones
    keys, new = (a[:at], b[:at]), (a[at:], b[at:])
    begins = [float(rows[0]) for rows in new]
    if torch.equal(*keys) and sorted(begins) == [0.0, cached]:
        counts = "causes.positions.cache_not_counted" if begins[0] else "causes.positions.cache_counted"
        return counts, {"new": f"{begins[1]:g}", "old": f"{begins[0]:g}", "cached": f"{cached}"}
    if torch.equal(*keys) or not torch.equal(*new):
        return None
    words = {"cached": f"{cached}", "new": f"{float(keys[1][-1]):g}", "old": f"{float(keys[0][-1]):g}"}
    # rope(cat((past, k), 2)) for a cache that already holds rope(past)
    known = (
        (0 * keys[0], keys[0], "causes.positions.cache_turned"),
        (0 * keys[1], keys[1], "causes.positions.cache_not_turned"),
        (2 * keys[0], keys[1], "causes.positions.cache_twice"),
        (2 * keys[1], keys[0], "causes.positions.cache_once"),
    )
    return next(((text, words) for wanted, positions, text in known if torch.equal(wanted, positions)), None)


def _padding(both: BothParts[Any], sequence: int) -> int:
    """Return how many keys at the start of a sequence its last row does not see: those of padding on the left."""
    formula = both.sides.a.formula
    if formula is None or formula.visible is None:
        return 0
    visible = formula.visible.expand(max(sequence + 1, formula.visible.shape[0]), *formula.visible.shape[1:])
    seen = visible[sequence, 0, -1].nonzero()
    return int(seen[0]) if len(seen) else 0


def _in_words(positions: Tensor) -> Message:
    """Return the positions of a sequence as short text."""
    rows = [round(row, 3) for row in positions.tolist()]
    starts = [i for i in range(1, len(rows)) if rows[i] != round(rows[i - 1] + 1, 3)]
    if not starts:
        return Message("causes.positions.from_start", start=f"{rows[0]:g}")
    if len(starts) <= 3:
        again = joined([Message("causes.positions.again", place=f"{rows[i]:g}", row=i) for i in starts], "also")
        return Message("causes.positions.from_then", start=f"{rows[0]:g}", again=again)
    words = {"start": f"{rows[0]:g}", "place": f"{rows[starts[0]]:g}"}
    return Message("causes.positions.and_so_on", row=starts[0], **words)


# -- positions on several axes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ImageAxis:
    """Pairs that rotate by the same position in each row.

    Attributes:
        pairs: indices of the pairs.
        places: (L,), whole numbers, the least is 0.
        first: angle of each pair at place 0, as a complex number.
        steps: radians between neighbouring places, for each pair.
    """

    pairs: tuple[int, ...]
    places: Tensor
    first: Tensor
    steps: Tensor

    @property
    def counts(self) -> Message | None:
        """Return the positions as code, `token // 6` or `token % 6`; None if neither gives them."""
        token, count = torch.arange(len(self.places)), int(self.places.max()) + 1
        for width in range(1, len(token)):
            if torch.equal(self.places, token // width):
                return Message(OVER, width=width) if width > 1 else Message("causes.positions.token")
        return Message(MODULO, width=count) if torch.equal(self.places, token % count) else None


def axes_words(a: Tensor, b: Tensor, near: float) -> DifferenceWords | None:
    """Return what to say if the positions of an image's axes differ; None if they don't explain the difference.

    Some pairs of channels rotate by token // width, others by token % width, for example. None is also returned unless
    A's frequencies at B's positions give B's table, and at least one side has two axes.

    Args:
        a: complex rotary table of A, (1, L, pairs).
        b: complex rotary table of B, (1, L, pairs).
        near: allowed difference of equal angles, in radians.
    """
    # half of the pairs by token // width, half by token % width: an image with rotary axes
    one, other = _axes(a, near), _axes(b, near)
    if one is None or other is None or max(len(one), len(other)) < 2 or not _reproduces(one, other, b, near):
        return None
    old, new = (joined([_pairs_by(axis, one) for axis in side], "side_by_side") for side in (one, other))
    return DifferenceWords(old, new, *_axes_sentence(one, other))


def _pairs_by(axis: ImageAxis, of_a: Sequence[ImageAxis]) -> Message:
    """Return the pairs of an axis, and what it counts, or its number among A's axes."""
    counts = axis.counts
    if counts is None:
        number = next((i for i, other in enumerate(of_a, 1) if torch.equal(axis.places, other.places)), None)
        unknown = Message("causes.positions.other_places")
        counts = unknown if number is None else Message("causes.positions.axis", number=number)
    return Message("causes.positions.pairs_by", pairs=_numbers(axis.pairs), axis=counts)


def _axes_sentence(a: Sequence[ImageAxis], b: Sequence[ImageAxis]) -> tuple[str, dict[str, str]]:
    """Return the sentence on how the axes differ."""
    if len(a) == 1:
        return "causes.positions.more_axes", {"axes": f"{len(b)}"}
    if len(b) == 1:
        return "causes.positions.one_axis", {"axes": f"{len(a)}"}
    counts = [[axis.counts for axis in side] for side in (a, b)]
    old, new = ([None if axis is None else axis.id for axis in side] for side in counts)
    if [x.pairs for x in a] == [x.pairs for x in b] and set(old) == {OVER, MODULO} and new in (old, old[::-1]):
        return "causes.positions.axes_swapped" if old != new else "causes.positions.other_grid", {}
    order = [next((i for i, x in enumerate(a) if torch.equal(x.places, y.places)), None) for y in b]
    if None in order:
        return "causes.positions.other_on_axes", {}
    if order == sorted(order):  # type: ignore[type-var]
        others, sizes = (joined([str(len(axis.pairs)) for axis in side], "comma") for side in (a, b))
        return "causes.positions.sections_resized", {"sizes": sizes, "others": others}
    return "causes.positions.sections_moved", {}


def _numbers(pairs: Sequence[int]) -> str:
    """Return indices of pairs as text, consecutive ones as a range."""
    if pairs == tuple(range(pairs[0], pairs[-1] + 1)):
        return span(pairs[0], pairs[-1]) if len(pairs) > 1 else f"{pairs[0]}"
    return joined([str(pair) for pair in pairs], "comma")


def _axes(table: Tensor, near: float) -> list[ImageAxis] | None:
    """Return the axes of a table (1, L, P), ordered by their first pairs; None if pairs have no whole positions.

    Pairs of one axis have equal angles in the same rows. A pair that rotates too slowly to tell joins the axis before.
    """
    if len(table) != 1:
        return None
    turned = unit_amplitude(table)[0]
    rows_of: dict[tuple[int, ...], list[int]] = {}
    last: tuple[int, ...] | None = None
    for pair in range(turned.shape[1]):
        last = _classes(turned[:, pair], near) or last
        if last is None:
            return None
        rows_of.setdefault(last, []).append(pair)
    axes = [_axis(tuple(pairs), turned[:, pairs], classes) for classes, pairs in rows_of.items()]
    known = [axis for axis in axes if axis is not None]
    return known if len(known) == len(axes) else None


def _classes(turned: Tensor, near: float) -> tuple[int, ...] | None:
    """Returns, for each row, the first row with the same angle; None if angles are neither equal nor clearly apart."""
    angles, rows = turned.angle().sort()
    gaps = angles.diff()
    if bool(((gaps > near) & (gaps < POSITION_ERRORS * near)).any()) or not bool((gaps > near).any()):
        return None
    numbers = torch.cat([torch.zeros(1, dtype=torch.long), (gaps > near).cumsum(0)])
    if float(angles[0] + 2 * torch.pi - angles[-1]) <= near:  # -pi and pi are the same angle
        numbers[numbers == numbers[-1]] = 0
    first = torch.full((len(rows),), len(rows)).scatter_reduce(0, numbers, rows, "amin")
    return tuple(torch.empty_like(rows).scatter(0, rows, first[numbers]).tolist())


def _axis(pairs: tuple[int, ...], turned: Tensor, classes: Sequence[int]) -> ImageAxis | None:
    """Return the axis of some pairs; rows with distinct angles, in order, are its places."""
    rows = sorted(set(classes))
    back = turned[rows] * turned[rows[0]].conj()
    places, steps = torch.tensor([0.0, 1.0]), back[-1].angle()
    if len(rows) > 2:
        turn = take_apart(back[None])
        if turn is None:
            return None
        places, steps = turn.positions[0], turn.frequencies
    first = turned[rows[0]] * phase((places.min() - places[0]) * steps)
    places = places - places.min()
    if float((places - places.round()).abs().max()) > MULTIPLE_TOLERANCE:
        return None
    return ImageAxis(pairs, places.round().long()[[rows.index(row) for row in classes]], first, steps)


def _reproduces(a: Sequence[ImageAxis], b: Sequence[ImageAxis], target: Tensor, near: float) -> bool:
    """Return whether A's frequencies at B's places give B's table."""
    made = torch.empty_like(unit_amplitude(target)[0])
    places_of = {pair: axis.places for axis in b for pair in axis.pairs}
    for axis in a:
        for pair, first, step in zip(axis.pairs, axis.first, axis.steps, strict=True):
            made[:, pair] = first * phase(step * places_of[pair])
    return angle_gap(made[None], target) <= max(near, FREQUENCY_ACCURACY)
