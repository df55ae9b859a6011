"""The rotary tables of both sides taken apart in one unit of position, and put together again with another part.

Where a table has one row, or its rows are two positions apart, what the rest of the program turns by says its unit. An
edit of a table is given B's angles where it makes them within rounding, so that no rounding is left.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sqrtdk.compare.program import Program, Rotation
from sqrtdk.compare.suspect import QK, Both, Sides, on_step, rotation, way_of
from sqrtdk.tracing.probe.rotation import USUAL
from sqrtdk.tracing.probe.tables import Law, Turn, angle_gap, nearly_whole, take_apart, unit

ANGLE = 2.0**-21  # of a position: angles are computed in float32 where the tables are made, whatever the dtype
NEAR = 0.03  # of a pair: a count of pairs that near to a whole one is one
FEW = 8  # rows of which a usual base is tried, as the one of a step of decoding
ENOUGH = 4  # pairs: by chance one place among many fits the angles of two
FIT = 1e-3  # radians
SAME = 1e-3  # relative, of frequencies
LOOSE = 0.1  # radians that an angle of positions times frequencies may be off by, in half precision


def nearness(both: Both[Any], *turns: Turn | None) -> float:
    """Radians that equal angles of both tables may be apart."""
    span, slack = max([1.0, *(turn.span for turn in turns if turn is not None)]), both.sides.slack
    return 2 * (slack if slack < ANGLE / 8 else slack + ANGLE * span)


def turns_of(both: Both[Rotation]) -> tuple[Turn | None, Turn | None]:
    """Both tables taken apart, in positions of one size: where the frequencies are multiples, those of the unscaled.

    Where cached keys turn twice, most rows are two positions apart, and two would be taken for one.
    """
    a, b = (_turn_of(side, both.vector) for side in (both.sides.a, both.sides.b))
    return _in_units_of(b, both.a.table, a), _in_units_of(a, both.b.table, b)


def _in_units_of(other: Turn | None, table: Tensor, turn: Turn | None) -> Turn | None:
    if other is None or table.shape[-1] != len(other.frequencies):
        return turn
    if turn is not None and angle_gap(other.with_frequencies(turn.frequencies).table(), table) < LOOSE:
        return turn  # all rows alike: frequencies that are scaled
    return _in_units(table, turn, other.frequencies)


def _in_units(table: Tensor, turn: Turn | None, known: Tensor) -> Turn | None:
    """A table taken apart by known frequencies, where those of `turn` are multiples of them: its unit is another."""
    if turn is None:
        turn = take_apart(table, known)
        return None if turn is None or angle_gap(turn.table(), table) > LOOSE else turn
    ratio = turn.frequencies / known
    by = float(ratio[0].abs())
    one_ratio = bool((ratio / ratio[0] - 1).abs().max() < SAME)
    if abs(by - 1) < SAME or abs(float(known[0].abs()) - 1) > SAME or not one_ratio:
        return turn
    return replace(turn, positions=nearly_whole(turn.positions * by), frequencies=turn.frequencies / by)


def _turn_of(program: Program, vector: str) -> Turn | None:
    """The table of q's or k's rotation taken apart; that of one row with the frequencies of the other of the two.

    Of a few rows, of which no other tells the frequencies, those of a usual base are tried.
    """
    own = rotation(way_of(program, vector))
    turn = None if own is None else take_apart(own.table)
    if own is None or turn is not None:
        return turn
    other = rotation(way_of(program, "key" if vector == "query" else "query"))
    known = None if other is None or other.width != own.width else take_apart(other.table)
    if known is not None:
        return take_apart(own.table, known.frequencies)
    few = math.prod(own.table.shape[:2]) <= FEW and own.width >= 2 * ENOUGH
    return next(filter(None, (_by_base(own.table, base) for base in USUAL)), None) if few else None


@lru_cache(maxsize=64)
def _by_base(table: Tensor, base: float) -> Turn | None:
    """A table taken apart by the frequencies of a usual base; only if they fit."""
    turn = take_apart(table, Law(base).frequencies(table.shape[-1]))
    return turn if turn is not None and angle_gap(turn.table(), table) < FIT else None


# -- put together again ------------------------------------------------------------------------------------------------


def snapped(table: Tensor, target: Tensor, tolerance: float) -> Tensor:
    """The table with the angles of `target` where all of them are the same within `tolerance`: no rounding is left."""
    if table.shape[1:] != target.shape[1:] or angle_gap(table, target) > tolerance:
        return table
    return table.abs() * unit(target)


def retold(own: Rotation, target: Rotation, tolerance: float, known: Tensor, **parts: Tensor) -> Rotation:
    """A rotation with other positions or frequencies, and its amplitude; as it is where they can't be put in.

    Args:
        own: what is changed.
        target: the other side's; where the result is its table within rounding its angles are taken.
        tolerance: of that, in radians.
        known: its own frequencies, where its rows can't tell them.
        parts: `positions` or `frequencies`, in place of its own.
    """
    turn = take_apart(own.table)
    if own.table.shape[-1] == len(known):
        turn = _in_units(own.table, turn, known)
    if turn is None:
        return own
    frequencies, positions = parts.get("frequencies", turn.frequencies), parts.get("positions", turn.positions)
    pairs = min(len(frequencies), len(turn.frequencies))
    beyond = torch.cat([frequencies[pairs:], turn.frequencies[pairs:]])
    # of neighbours more, or fewer, may have been said to turn: by too little to show
    shows = bool((beyond.abs() * turn.span > tolerance).any())
    if len(beyond) and (own.layout != "interleaved" or shows):
        return own
    if float(frequencies.sum() * turn.frequencies.sum()) < 0:  # the direction is no matter of the base
        frequencies = -frequencies
    turn = replace(turn.with_frequencies(frequencies), positions=positions)
    return replace(own, table=snapped(turn.table(), target.table, tolerance))


# -- how many neighbouring channels turn, where the slow pairs turn too little to show ---------------------------------


def like_widths(sides: Sides) -> Sides:
    """The sides, with rotations of neighbours of the width that is most like the other side's.

    In half precision a fit can't tell whether the last pairs of neighbours turn by almost nothing or do not turn, and
    may say another width on each side. A width that makes the law of one side that of the other is taken, else the
    other's.
    """
    for vector in QK:
        a, b = rotation(way_of(sides.a, vector)), rotation(way_of(sides.b, vector))
        if a is None or b is None or "interleaved" not in (a.layout, b.layout):
            continue
        own, other = (b, a) if b.layout == "interleaved" else (a, b)
        like = _like(own, other, sides)
        change = on_step(vector, Rotation)(lambda _, like=like: like)  # type: ignore[misc]
        sides = replace(sides, b=change(sides.b)) if own is b else replace(sides, a=change(sides.a))
    return sides


def _like(own: Rotation, other: Rotation, sides: Sides) -> Rotation:
    turn, known = take_apart(own.table), take_apart(other.table)
    law, like = (None if each is None else each.law for each in (turn, known))
    if turn is None or law is None or law.factor != 1 or law.base <= 1:
        return own
    ratio = law.base ** (-2 / own.width)
    widths = [other.width]
    if like is not None and like.factor == 1 and like.base > 1:
        pairs = -math.log(like.base) / math.log(ratio)
        if abs(pairs - round(pairs)) < NEAR and round(pairs) > 0:
            widths.insert(0, 2 * round(pairs))
    for width in widths:
        if width == own.width:
            return own
        shown = min(width, own.width) // 2
        most = max([ratio**shown, *turn.frequencies.abs()[shown:].tolist()])
        if own.first + width <= sides.head_dim and most * turn.span < sides.slack:
            more = turn.sign * ratio ** torch.arange(shown, width // 2, dtype=torch.float64)
            return replace(own, table=turn.with_frequencies(torch.cat([turn.frequencies[:shown], more])).table())
    return own
