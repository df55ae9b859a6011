"""Takes the rotary tables of both sides apart in one unit of position, and rebuilds them with another part.

If a table has one row, or rows two positions apart, the rotations of the rest of the program decide its unit. An edited
table takes over B's angles if it matches them within rounding, so that no rounding remains.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sqrtdk.compare.inside.program import QK, Program, Rotation
from sqrtdk.compare.inside.suspect import BothParts, Sides, change_step, path_of, rotation_of
from sqrtdk.tracing.probe.rotation import USUAL_BASES
from sqrtdk.tracing.probe.tables import Law, Turn, angle_gap, nearly_whole, take_apart, unit_amplitude

FLOAT32_RADIANS = 2.0**-21  # for each position: tables compute angles in float32, whatever the dtype
PAIR_COUNT_TOLERANCE = 0.03  # distance of a number of pairs from a whole number
FEW_DECODING_ROWS = 8  # rows: for so few, such as a step of decoding, usual bases are tried
LEAST_PAIRS = 4  # pairs: with only two, one of many positions fits their angles by chance
BASE_FIT_RADIANS = 1e-3  # radians by which a usual base may miss the angles
SAME_FREQUENCY = 1e-3  # relative difference of equal frequencies
HALF_PRECISION_RADIANS = 0.1  # radians that position * frequency may be off in half precision


def nearness(both: BothParts[Any], *turns: Turn | None) -> float:
    """Return the allowed difference of equal angles of both tables, in radians.

    Args:
        both: both rotations; their sides tell the precision.
        turns: tables as positions and frequencies. The longer their span of positions, the more is allowed.
    """
    span, slack = max([1.0, *(turn.span for turn in turns if turn is not None)]), both.sides.slack
    return 2 * (slack if slack < FLOAT32_RADIANS / 8 else slack + FLOAT32_RADIANS * span)


def turns_of(both: BothParts[Rotation]) -> tuple[Turn | None, Turn | None]:
    """Return A's and B's rotary table as positions and frequencies, in a common unit of position; None if unknown.

    If the frequencies of one table are a multiple of the other's and that is in plain units, these units are used for
    both. If cached keys rotate twice, most rows are two positions apart, and a step of two would count as one.
    """
    a, b = (_turn_of(side, both.vector) for side in (both.sides.a, both.sides.b))
    return _in_units_of(b, both.a.table, a), _in_units_of(a, both.b.table, b)


def _in_units_of(other: Turn | None, table: Tensor, turn: Turn | None) -> Turn | None:
    if other is None or table.shape[-1] != len(other.frequencies):
        return turn
    if turn is not None and angle_gap(other.with_frequencies(turn.frequencies).table(), table) < HALF_PRECISION_RADIANS:
        return turn  # every row agrees: the frequencies are scaled, not the positions
    return _in_units(table, turn, other.frequencies)


def _in_units(table: Tensor, turn: Turn | None, known: Tensor) -> Turn | None:
    """Return a table taken apart by known frequencies, in another unit if those of `turn` are multiples of them."""
    if turn is None:
        turn = take_apart(table, known)
        return None if turn is None or angle_gap(turn.table(), table) > HALF_PRECISION_RADIANS else turn
    ratio = turn.frequencies / known
    by = float(ratio[0].abs())
    one_ratio = bool((ratio / ratio[0] - 1).abs().max() < SAME_FREQUENCY)
    if abs(by - 1) < SAME_FREQUENCY or abs(float(known[0].abs()) - 1) > SAME_FREQUENCY or not one_ratio:
        return turn
    return replace(turn, positions=nearly_whole(turn.positions * by), frequencies=turn.frequencies / by)


def _turn_of(program: Program, vector: str) -> Turn | None:
    """Return the table of q's or k's rotation taken apart; a single row uses the frequencies of the other vector.

    For a few rows whose frequencies no other table shows, usual bases are tried.
    """
    own = rotation_of(path_of(program, vector))
    turn = None if own is None else take_apart(own.table)
    if own is None or turn is not None:
        return turn
    other = rotation_of(path_of(program, "key" if vector == "query" else "query"))
    known = None if other is None or other.width != own.width else take_apart(other.table)
    if known is not None:
        return take_apart(own.table, known.frequencies)
    few = math.prod(own.table.shape[:2]) <= FEW_DECODING_ROWS and own.width >= 2 * LEAST_PAIRS
    return next(filter(None, (_by_base(own.table, base) for base in USUAL_BASES)), None) if few else None


@lru_cache(maxsize=64)
def _by_base(table: Tensor, base: float) -> Turn | None:
    """Return positions and frequencies of a rotation's table; None if the RoPE frequencies of `base` do not fit."""
    turn = take_apart(table, Law(base).frequencies(table.shape[-1]))
    return turn if turn is not None and angle_gap(turn.table(), table) < BASE_FIT_RADIANS else None


# -- put together again ------------------------------------------------------------------------------------------------


def snapped(table: Tensor, target: Tensor, tolerance: float) -> Tensor:
    """Return `table` with the angles of `target`, if all agree within `tolerance`; else `table` itself.

    The amplitudes stay. This removes the rounding of a table that was rebuilt.

    Args:
        table: complex rotary table, (B, L, pairs).
        target: the other side's table.
        tolerance: allowed difference of angles, in radians.
    """
    if table.shape[1:] != target.shape[1:] or angle_gap(table, target) > tolerance:
        return table
    return table.abs() * unit_amplitude(target)


def with_table_parts(own: Rotation, target: Rotation, tolerance: float, known: Tensor, **parts: Tensor) -> Rotation:
    """Return a rotation with other positions or frequencies and the same amplitude; unchanged if they can't be put in.

    Args:
        own: rotation that is changed.
        target: the other side's rotation; its angles are taken if the result equals its table within rounding.
        tolerance: allowed difference of angles, in radians.
        known: frequencies of the rotation, for tables whose rows can't show them.
        parts: `positions` or `frequencies` that replace its own.
    """
    turn = take_apart(own.table)
    if own.table.shape[-1] == len(known):
        turn = _in_units(own.table, turn, known)
    if turn is None:
        return own
    frequencies, positions = parts.get("frequencies", turn.frequencies), parts.get("positions", turn.positions)
    pairs = min(len(frequencies), len(turn.frequencies))
    beyond = torch.cat([frequencies[pairs:], turn.frequencies[pairs:]])
    # a fit of neighbouring channels may include more or fewer slow pairs than rotate: too slow to show
    shows = bool((beyond.abs() * turn.span > tolerance).any())
    if len(beyond) and (own.layout != "interleaved" or shows):
        return own
    if float(frequencies.sum() * turn.frequencies.sum()) < 0:  # the direction is another cause
        frequencies = -frequencies
    turn = replace(turn.with_frequencies(frequencies), positions=positions)
    return replace(own, table=snapped(turn.table(), target.table, tolerance))


# -- how many neighbouring channels turn, where the slow pairs turn too little to show ---------------------------------


def like_widths(sides: Sides) -> Sides:
    """Return the sides with rotations of neighbours in the width that is most like the other side's.

    In half precision a fit can't tell whether the last pairs rotate by almost nothing or not at all, so each side may
    get another width. The width is chosen that gives one side the law of the other; else the other side's width.
    """
    for vector in QK:
        a, b = rotation_of(path_of(sides.a, vector)), rotation_of(path_of(sides.b, vector))
        if a is None or b is None or "interleaved" not in (a.layout, b.layout):
            continue
        own, other = (b, a) if b.layout == "interleaved" else (a, b)
        like = _in_other_width(own, other, sides)
        change = change_step(vector, Rotation)(lambda _, like=like: like)  # type: ignore[misc]
        sides = replace(sides, b=change(sides.b)) if own is b else replace(sides, a=change(sides.a))
    return sides


def _in_other_width(own: Rotation, other: Rotation, sides: Sides) -> Rotation:
    turn, known = take_apart(own.table), take_apart(other.table)
    law, like = (None if each is None else each.law for each in (turn, known))
    if turn is None or law is None or law.factor != 1 or law.base <= 1:
        return own
    ratio = law.base ** (-2 / own.width)
    widths = [other.width]
    if like is not None and like.factor == 1 and like.base > 1:
        pairs = -math.log(like.base) / math.log(ratio)
        if abs(pairs - round(pairs)) < PAIR_COUNT_TOLERANCE and round(pairs) > 0:
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
