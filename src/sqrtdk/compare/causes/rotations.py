"""How the rotations of q and k differ: one side has none, other frequencies, positions, channels, pairing, amplitude.

The angles are position * frequency. Each cause puts one of these into A's table and leaves the others A's; where the
result is B's table within rounding, B's angles are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.compare.causes.laws import angle_slack, base_words, law_of, like_widths, retold, snapped, turn_of
from sqrtdk.compare.causes.projections import like_amplitude, relabelled
from sqrtdk.compare.causes.turns import Turn, take_apart, unit
from sqrtdk.compare.numbers import few_digits, told_apart
from sqrtdk.compare.program import Norm, Rotation, Way
from sqrtdk.compare.suspect import QK, Both, Difference, Edit, Sides, on_step, rotation, way_of

LAYOUTS = {"half": "half-split", "interleaved": "interleaved"}
MORE_DIGITS = 1e-6  # relative: bases that are less apart, as of tables that were made in float32, are one
MOST = 2**23  # numbers of which a median is taken


def rotations(sides: Sides) -> Iterator[Both[Rotation]]:
    """The rotations of q and k, where both sides turn."""
    for vector in QK:
        a, b = rotation(way_of(sides.a, vector)), rotation(way_of(sides.b, vector))
        if a is not None and b is not None:
            yield Both(sides, a, b, on_step(vector, Rotation), vector)


def like_rotations(sides: Sides) -> Iterator[Both[Rotation]]:
    """The rotations, those of neighbours in the width that makes the two most alike."""
    return rotations(like_widths(sides))


def _turns(both: Both[Any]) -> tuple[Turn | None, Turn | None]:
    return turn_of(both.sides.a, both.vector), turn_of(both.sides.b, both.vector)


def _near(both: Both[Any], *turns: Turn | None) -> float:
    """Radians that equal angles of both tables may be apart."""
    return 2 * angle_slack(both.sides, max([1.0, *(turn.span for turn in turns if turn is not None)]))


# -- there or not ------------------------------------------------------------------------------------------------------


def missing(both: Both[Way]) -> Difference | None:
    """A rotation that one side has and the other has not; a table that turns nothing is none."""
    a, b = rotation(both.a), rotation(both.b)
    if a is not None and b is None:
        return Difference("rotated", "not rotated", edit=_without)
    if b is None or a is not None:
        return None
    steps = [step for step in both.b.steps if isinstance(step, Norm | Rotation)]
    at = next(i for i, step in enumerate(steps) if isinstance(step, Rotation))  # so many norms come before it
    before = at if any(isinstance(step, Norm) for step in steps[at:]) else None

    def added(old: Way) -> Way:
        rest = list(_without(old).steps)
        places = [i for i, step in enumerate(rest) if isinstance(step, Norm)]
        place = len(rest) if before is None or before >= len(places) else places[before]
        return replace(old, steps=(*rest[:place], b, *rest[place:]))

    return Difference("not rotated", "rotated", edit=added)


def _without(old: Way) -> Way:
    return replace(old, steps=tuple(step for step in old.steps if not isinstance(step, Rotation)))


# -- which channels ----------------------------------------------------------------------------------------------------


def layout(both: Both[Rotation]) -> Difference | None:
    """The channels are paired otherwise: (c, c + R / 2) against (2 c, 2 c + 1)."""
    a, b = both.a, both.b
    if a.layout == b.layout or max(a.width, b.width) == 2 or relabelled(both.sides):
        return None
    # pairs that do not show as neighbours would be other pairs half-split
    like = rotation(way_of(like_widths(both.sides).a, both.vector)) or a

    def edit(own: Rotation) -> Rotation:
        table = like.table if like.width != a.width == own.width else own.table
        return replace(own, layout=b.layout, table=table)

    return Difference(LAYOUTS[a.layout], LAYOUTS[b.layout], edit=edit)


def direction(both: Both[Rotation]) -> Difference | None:
    """The other way round: the table is conjugated."""
    a, b = _turns(both)
    if a is None or b is None:
        return None
    old, new = ("forwards" if float(turn.frequencies.sum()) >= 0 else "backwards" for turn in (a, b))
    if old == new:
        return None
    return Difference(old, new, edit=lambda own: replace(own, table=own.table.conj().resolve_conj()))


def channels(both: Both[Rotation]) -> Difference | None:
    """Fewer channels turn, or others.

    The frequencies depend on how many channels turn, base^(-2c / R), or, where the law is that of the whole head, they
    do not: whichever of the two gives B's is taken, and what is left is `rope_base`.
    """
    a, b, turns = both.a, both.b, _turns(both)
    near = _near(both, *turns)
    moving = _moving(a, turns[0], near), _moving(b, turns[1], near)
    if (a.width, a.first, moving[0]) == (b.width, b.first, moving[1]):
        return None
    old, new = (_channels(x, both.sides.head_dim, pairs) for x, pairs in zip((a, b), moving, strict=True))
    return Difference(old, new, edit=lambda own: replace(own, table=_resized(own, b, turns[1], near), first=b.first))


def _moving(turned: Rotation, turn: Turn | None, tolerance: float) -> int:
    """How many of its pairs, the first ones, turn; all where that is not known.

    Half a head that turns by the table of the whole has pairs that stand still: cat(angles[:n], zeros).
    """
    pairs = turned.width // 2
    if turn is None:
        return pairs
    still = turn.still(tolerance)
    first, law = int((~still).sum()), law_of(turn)
    shows = law is not None and float(law.frequencies(pairs)[first:].sum()) * turn.span > 2 * tolerance
    return first if shows and not bool(still[:first].any()) else pairs


def _channels(turned: Rotation, head_dim: int, moving: int) -> str:
    where = f"all {head_dim} channels"
    if turned.width != head_dim:
        where = f"channels {turned.first} to {turned.first + turned.width - 1} of {head_dim}"
    return where if moving == turned.width // 2 else f"the first {moving} of {turned.width // 2} pairs of {where}"


def _resized(own: Rotation, target: Rotation, other: Turn | None, tolerance: float) -> Tensor:
    """A table for as many channels as `target` turns, of `own`'s positions, amplitude and law."""
    turn, pairs = take_apart(own.table), target.width // 2
    if turn is None or other is None:
        return own.table if own.width == target.width else target.table
    if own.width == target.width and torch.equal(turn.still(tolerance), other.still(tolerance)):
        return own.table
    law, wanted = law_of(turn), other.frequencies
    if law is not None:
        sign = torch.where(turn.frequencies.sum() < 0, -1.0, 1.0)
        laws = [sign * law.frequencies(pairs), sign * law.frequencies(pairs, len(turn.frequencies))]
        laws += [torch.where(wanted == 0, 0.0, one) for one in laws]
        wanted = min(laws, key=lambda one: float((one.abs() - other.frequencies.abs()).abs().max()))
    return snapped(turn.with_frequencies(wanted).table(), target.table, tolerance)


# -- frequencies, positions, amplitude ---------------------------------------------------------------------------------


def _table(both: Both[Rotation], known: Tensor, tolerance: float, **changed: Tensor) -> Edit[Rotation]:
    """The edit that puts other frequencies or positions into a table."""
    return lambda own: replace(own, table=retold(own, both.b, tolerance, known=known, **changed))


def frequencies(both: Both[Rotation]) -> Difference | None:
    """Another base, positions that are interpolated, YaRN's or another law."""
    a, b = _turns(both)
    wanted = None if a is None or b is None else _wanted(a, b)
    if a is None or b is None or wanted is None:
        return None
    near = _near(both, a, b)
    if float((wanted - a.frequencies).abs().max()) * max(a.span, b.span) <= near:
        return None
    words = base_words(a), base_words(b)
    if words[0] == words[1]:
        words = _bases_apart(a, b, wanted)
    shown = {"a": _with_base(words[0]), "b": _with_base(words[1])}
    return Difference(*words, shown, _table(both, a.frequencies, near, frequencies=wanted))


def _with_base(words: str | float) -> str:
    if isinstance(words, float):
        return f"base {words:g}"
    return words if words.startswith("frequenc") else f"base {words}"


def _bases_apart(a: Turn, b: Turn, wanted: Tensor) -> tuple[str, str]:
    """What two frequencies of one law to four digits are: the base in more digits, or that of the pair farthest off."""
    laws = law_of(a), law_of(b)
    if laws[0] is not None and laws[1] is not None:
        bases = laws[0].base, laws[1].base
        if abs(bases[0] / bases[1] - 1) > MORE_DIGITS and len(a.frequencies) == len(b.frequencies):
            return told_apart(*bases, 6)
    pair = int((wanted.abs() - a.frequencies.abs()).abs().argmax())
    old, new = told_apart(float(a.frequencies[pair].abs()), float(wanted[pair].abs()))
    return f"frequency {old} of pair {pair}", f"frequency {new} of pair {pair}"


def _wanted(a: Turn, b: Turn) -> Tensor | None:
    """B's frequencies for as many pairs as A turns, in A's direction; None where that can't be told."""
    sign = torch.where(a.frequencies.sum() < 0, -1.0, 1.0)
    pairs = min(len(a.frequencies), len(b.frequencies))
    if len(a.frequencies) == len(b.frequencies):
        return b.frequencies.abs() * sign if bool((b.frequencies * b.frequencies.sum() >= 0).all()) else b.frequencies
    mine, other = law_of(a), law_of(b)
    if mine is None or other is None:
        return None
    if torch.allclose(a.frequencies[:pairs].abs(), b.frequencies[:pairs].abs(), rtol=1e-3, atol=0):
        return None  # one law, of which one side turns fewer pairs
    return other.frequencies(len(a.frequencies)) * sign


def positions(both: Both[Rotation]) -> Difference | None:
    """Rows are turned as if they stood elsewhere: off by one, not reset, padding counted or not.

    The same shift of q and of k changes no logit.
    """
    a, b = _turns(both)
    if a is None or b is None:
        return None
    shift, near = b.positions - a.positions, _near(both, a, b)
    if float(shift.abs().max()) * float(a.frequencies.abs().max()) <= near:
        return None
    entry, row = divmod(int(shift.abs().flatten().argmax()), shift.shape[1])
    words = _positions(a), _positions(b)
    if words[0] == words[1]:
        first = int((shift != 0).any(-1).nonzero()[0])
        words = _ends(a, first), _ends(b, first)
    if words[0] == words[1]:
        x, y = (float(turn.positions.expand_as(shift)[entry, row]) for turn in (a, b))
        old, new = told_apart(x, y, 6)
        words = f"{old} at row {row} of sequence {entry}", f"{new} at row {row} of sequence {entry}"
    offset = float(shift.flatten()[0])
    if bool((shift == offset).all()):
        how = {"since": "", "off": f": off by {offset:+g}"}
    else:
        since = int((shift != 0).any(0).nonzero()[0])
        how = {"since": f"otherwise from row {since} on: ", "off": ""}
    return Difference(*words, how, _table(both, a.frequencies, near, positions=b.positions))


def _positions(turn: Turn) -> str:
    """Its positions in few words."""
    rows = [round(row, 3) for row in turn.positions[0].tolist()]
    starts = [i for i in range(1, len(rows)) if rows[i] != round(rows[i - 1] + 1, 3)]
    if not starts:
        return f"from {rows[0]:g}"
    if len(starts) <= 3:
        again = " and ".join(f"from {rows[i]:g} at row {i}" for i in starts)
        return f"from {rows[0]:g}, then {again}"
    return f"from {rows[0]:g}, at row {starts[0]} {rows[starts[0]]:g}, and so on"


def _ends(turn: Turn, entry: int) -> str:
    """Positions of one sequence, from its first row to its last."""
    positions = turn.positions[min(entry, turn.positions.shape[0] - 1)]
    return f"from {float(positions[0]):g} to {float(positions[-1]):g} in sequence {entry}"


def angles(both: Both[Rotation]) -> Difference | None:
    """Angles that are no product of positions and frequencies on one side, as of images: all of them are B's."""
    a, b = both.a, both.b
    if None not in _turns(both):
        return None
    length = float(max(a.table.shape[1], b.table.shape[1]))
    if a.table.shape[1:] != b.table.shape[1:]:
        return None
    wanted = unit(b.table)
    if float((unit(a.table) - wanted).abs().max()) <= angle_slack(both.sides, length):
        return None

    def edit(own: Rotation) -> Rotation:
        return own if own.width != b.width else replace(own, table=own.table.abs() * wanted)

    return Difference("its own angles", "other angles", edit=edit)


def amplitude(both: Both[Rotation]) -> Difference | None:
    """What the table multiplies by, as YaRN's; its angles stay A's."""
    mine, wanted = both.a.table.abs(), both.b.table.abs()
    if both.a.width != both.b.width:  # of the channels that both turn
        mine, wanted = (x.median(-1, keepdim=True).values for x in (mine, wanted))
    if mine.shape[1] != wanted.shape[1]:
        return None
    ratio = (wanted / mine.clamp_min(torch.finfo(torch.float64).tiny)).flatten()[:MOST]
    if max(abs(float(ratio.median()) - 1), float((ratio - 1).abs().quantile(0.5))) <= both.sides.slack:
        return None

    def edit(own: Rotation) -> Rotation:
        size = wanted if wanted.shape[-1] in (1, own.table.shape[-1]) else wanted[..., :1]
        return replace(own, table=unit(own.table) * size)

    old, new = (float(x.flatten()[:MOST].median()) for x in (mine, wanted))
    return Difference(*few_digits(old, new), edit=edit)


def amplitude_as_factor(both: Both[Way]) -> Difference | None:
    """One and the same factor on q and on k, both rotated: an amplitude that could not be told from a factor."""
    if not like_amplitude(both.sides):
        return None
    old, new = (float(torch.as_tensor(way.scaled).flatten()[0]) for way in (both.a, both.b))
    return Difference(*few_digits(old, new))
