"""Positions of rows in words: where they start, behind a cache, in a padded sequence, on the axes of an image.

Every function takes what both sides do and returns what A does, what B does, and half a sentence with B as its subject,
in which {parts} stands for q, k or both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.compare.numbers import told_apart
from sqrtdk.compare.suspect import Both, Words, rotation, way_of
from sqrtdk.tracing.probe.tables import Turn, angle_gap, phase, take_apart, unit

APART = 16.0  # in units of the allowed error: angles this far apart belong to different positions
LEAST = 1e-4  # radians: the accuracy of frequencies that are known from few steps
WHOLE = 0.05  # distance up to which a multiple of the smallest step counts as a whole number


# -- one position a row ------------------------------------------------------------------------------------------------


def times_words(both: Both[Any], a: Turn | None, b: Turn | None, near: float) -> Words | None:
    """Returns words if one side rotates a vector twice: all its angles are twice the other's.

    If the positions of both q and k are halved, the cause is a linear scaling of the frequencies instead.
    """
    if a is None or b is None:
        return None
    # rope(rope(q)) for rope(q): angles add up
    angles = [turn.positions[..., None] * turn.frequencies for turn in (a, b)]
    if angles[0].shape[1:] != angles[1].shape[1:]:
        return None
    other = "key" if both.vector == "query" else "query"
    beside = [rotation(way_of(side, other)) for side in (both.sides.a, both.sides.b)]
    tables = [x.table for x in beside if x is not None]
    alone = len(tables) == 2 and tables[0].shape[1:] == tables[1].shape[1:] and angle_gap(*tables) <= near
    plain = abs(float(a.frequencies.abs().max()) - 1) <= near
    if float((angles[1] - 2 * angles[0]).abs().max()) <= 2 * near and (alone or plain):
        once = f"and {'k' if other == 'key' else 'q'} once" if alone else "not once"
        return "once", "twice", f"turns {{parts}} twice, {once}"
    if float((angles[0] - 2 * angles[1]).abs().max()) <= 2 * near and alone:
        return "twice", "once", "turns {parts} once, where A does twice"
    return None


def places_words(both: Both[Any], a: Tensor, b: Tensor) -> Words:
    """Returns words for the difference of positions (B or 1, L)."""
    a, b = a + 0 * b, b + 0 * a  # broadcasts both
    shift, words = b - a, (_in_words(a[0]), _in_words(b[0]))
    found = _behind_cache(both, a[0], b[0]) if bool((shift == shift[0]).all()) else None
    if found is not None:
        return *words, found
    if bool((shift == shift[0, 0]).all()):
        text = f"counts the positions of {{parts}} {words[1]} instead of {words[0]}: off by {float(shift[0, 0]):+g}"
        return *words, text
    sequence, row = divmod(int(shift.abs().flatten().argmax()), shift.shape[1])
    if bool((shift == shift[0]).all()):
        if words[0] == words[1]:
            old, new = told_apart(float(a[0, row]), float(b[0, row]), 6)
            words = f"{old} at row {row}", f"{new} at row {row}"
        since = int((shift[0] != 0).nonzero()[0])
        text = f"counts the positions of {{parts}} otherwise from row {since} on: {words[1]} instead of {words[0]}"
        return *words, text
    last = shift.shape[1] - 1
    row = last if float(shift[sequence, last]) == float(shift[sequence, row]) else row
    old, new = told_apart(float(a[sequence, row]), float(b[sequence, row]), 6)
    padding = _padding(both, sequence)
    where = f"at row {row} of sequence {sequence}" if shift.shape[1] > 1 else f"in sequence {sequence}"
    why = ""
    if padding and abs(float(shift[sequence, row])) == padding:
        counts = "counts" if new > old else "does not count"
        why = f": it {counts} the {padding} tokens of padding in front"
    text = f"gives {{parts}} position {new} in place of {old} {where}{why}"
    return f"{old} {where}", f"{new} {where}", text


def _behind_cache(both: Both[Any], a: Tensor, b: Tensor) -> str | None:
    """Returns what happens to cached keys, or to the new rows behind them, as half a sentence; None without a cache."""
    query, key = (rotation(way_of(both.sides.b, name)) for name in ("query", "key"))
    cached = 0 if query is None or key is None else key.table.shape[1] - query.table.shape[1]
    if cached <= 0:
        return None
    at = cached if both.vector == "key" else 0  # cached keys come before the new ones
    keys, new = (a[:at], b[:at]), (a[at:], b[at:])
    begins = [float(rows[0]) for rows in new]
    if torch.equal(*keys) and sorted(begins) == [0.0, cached]:
        counts = "does not count" if begins[0] else "counts"
        begin = f"turns the new rows of {{parts}} from position {begins[1]:g} on instead of {begins[0]:g}"
        return f"{begin}: it {counts} the {cached} cached keys"
    if torch.equal(*keys) or not torch.equal(*new):
        return None
    the_keys, again = f"the {cached} cached keys", "a second time where the cache holds turned ones"
    last = f"position {float(keys[1][-1]):g} instead of {float(keys[0][-1]):g} for the last of them"
    # rope(cat((past, k), 2)) for a cache that already holds rope(past)
    said = (
        (0 * keys[0], keys[0], f"turns {the_keys}, {again}: A takes them as they are"),
        (0 * keys[1], keys[1], f"takes {the_keys} as they are in the cache, where A turns them"),
        (2 * keys[0], keys[1], f"turns {the_keys} twice: {last}"),
        (2 * keys[1], keys[0], f"turns {the_keys} once, not twice: {last}"),
    )
    return next((text for wanted, positions, text in said if torch.equal(wanted, positions)), None)


def _padding(both: Both[Any], sequence: int) -> int:
    """Returns how many keys at the start of a sequence its last row does not see: those of padding on the left."""
    formula = both.sides.a.formula
    if formula is None or formula.visible is None:
        return 0
    visible = formula.visible.expand(max(sequence + 1, formula.visible.shape[0]), *formula.visible.shape[1:])
    seen = visible[sequence, 0, -1].nonzero()
    return int(seen[0]) if len(seen) else 0


def _in_words(positions: Tensor) -> str:
    """Returns the positions of a sequence as short text."""
    rows = [round(row, 3) for row in positions.tolist()]
    starts = [i for i in range(1, len(rows)) if rows[i] != round(rows[i - 1] + 1, 3)]
    if not starts:
        return f"from {rows[0]:g}"
    if len(starts) <= 3:
        again = " and ".join(f"from {rows[i]:g} at row {i}" for i in starts)
        return f"from {rows[0]:g}, then {again}"
    return f"from {rows[0]:g}, at row {starts[0]} {rows[starts[0]]:g}, and so on"


# -- positions on several axes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
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
    def words(self) -> str:
        """The places as code: `token // 6` or `token % 6`; "" if neither."""
        token, count = torch.arange(len(self.places)), int(self.places.max()) + 1
        for width in range(1, len(token)):
            if torch.equal(self.places, token // width):
                return f"token // {width}" if width > 1 else "token"
        return f"token % {count}" if torch.equal(self.places, token % count) else ""


def axes_words(a: Tensor, b: Tensor, near: float) -> Words | None:
    """Returns words if pairs rotate by positions on several axes, and the axes, their pairs or positions differ."""
    # half of the pairs by token // width, half by token % width: an image with rotary axes
    one, other = _axes(a, near), _axes(b, near)
    if one is None or other is None or max(len(one), len(other)) < 2 or not _reproduces(one, other, b, near):
        return None
    old, new = (
        " and ".join(f"pairs {_numbers(axis.pairs)} by {_name(axis, one)}" for axis in side) for side in (one, other)
    )
    return old, new, f"{_how(one, other)}: it turns {new}, not {old}"


def _name(axis: Axis, of_a: Sequence[Axis]) -> str:
    """Returns what an axis counts, or its number among A's axes."""
    if axis.words:
        return axis.words
    number = next((i for i, other in enumerate(of_a, 1) if torch.equal(axis.places, other.places)), None)
    return "other positions" if number is None else f"axis {number}"


def _how(a: Sequence[Axis], b: Sequence[Axis]) -> str:
    """Returns how the axes differ, as half a sentence."""
    if len(b) == 1 or len(a) == 1:
        count = f"{len(b)} axes, where A has one" if len(a) == 1 else f"one axis, where A has {len(a)}"
        return f"has positions of {{parts}} on {count}"
    old, new = ([axis.words.rpartition(" ")[0] for axis in side] for side in (a, b))
    if [x.pairs for x in a] == [x.pairs for x in b] and set(old) == {"token //", "token %"} and new in (old, old[::-1]):
        swapped = "has the axes of the positions of {parts} swapped, height for width"
        return swapped if old != new else "counts the positions of {parts} on a grid of another width"
    order = [next((i for i, x in enumerate(a) if torch.equal(x.places, y.places)), None) for y in b]
    if None in order:
        return "has other positions of {parts} on its axes"
    if order == sorted(order):  # type: ignore[type-var]
        sizes = " instead of ".join(", ".join(str(len(axis.pairs)) for axis in side) for side in (b, a))
        return f"has sections of {{parts}} of other sizes for the axes of the positions ({sizes} pairs)"
    return "has the sections of {parts} for the axes of the positions in another order"


def _numbers(pairs: Sequence[int]) -> str:
    """Returns indices of pairs as text, consecutive ones as a range."""
    if pairs == tuple(range(pairs[0], pairs[-1] + 1)):
        return f"{pairs[0]} to {pairs[-1]}" if len(pairs) > 1 else f"{pairs[0]}"
    return ", ".join(map(str, pairs))


def _axes(table: Tensor, near: float) -> list[Axis] | None:
    """Returns the axes of a table (1, L, P), ordered by their first pairs; None if pairs have no whole positions.

    Pairs of one axis have equal angles in the same rows. A pair that rotates too slowly to tell joins the axis before.
    """
    if len(table) != 1:
        return None
    turned = unit(table)[0]
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
    if bool(((gaps > near) & (gaps < APART * near)).any()) or not bool((gaps > near).any()):
        return None
    numbers = torch.cat([torch.zeros(1, dtype=torch.long), (gaps > near).cumsum(0)])
    if float(angles[0] + 2 * torch.pi - angles[-1]) <= near:  # -pi and pi are the same angle
        numbers[numbers == numbers[-1]] = 0
    first = torch.full((len(rows),), len(rows)).scatter_reduce(0, numbers, rows, "amin")
    return tuple(torch.empty_like(rows).scatter(0, rows, first[numbers]).tolist())


def _axis(pairs: tuple[int, ...], turned: Tensor, classes: Sequence[int]) -> Axis | None:
    """Returns the axis of some pairs; rows with distinct angles, in order, are its places."""
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
    if float((places - places.round()).abs().max()) > WHOLE:
        return None
    return Axis(pairs, places.round().long()[[rows.index(row) for row in classes]], first, steps)


def _reproduces(a: Sequence[Axis], b: Sequence[Axis], target: Tensor, near: float) -> bool:
    """Returns whether A's frequencies at B's places give B's table."""
    made = torch.empty_like(unit(target)[0])
    places_of = {pair: axis.places for axis in b for pair in axis.pairs}
    for axis in a:
        for pair, first, step in zip(axis.pairs, axis.first, axis.steps, strict=True):
            made[:, pair] = first * phase(step * places_of[pair])
    return angle_gap(made[None], target) <= max(near, LEAST)
