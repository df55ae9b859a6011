"""What rotary tables have in common with those of the other side: laws of frequencies, widths, angles that are B's."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.causes.turns import Turn, take_apart, unit
from sqrtdk.compare.numbers import number
from sqrtdk.compare.program import Program, Rotation
from sqrtdk.compare.suspect import QK, Sides, on_step, rotation, way_of

ANGLE = 2.0**-21  # of a position: angles are computed in float32 where the tables are made, whatever the dtype
LAW = 1e-3  # of a frequency, relative: as far as one may be from the law that it follows
NEAR = 0.03  # of a pair: a count of pairs that near to a whole one is one
UNSEEN = 0.05  # angle in radians over all positions: a frequency that turns less is not known well enough to judge


@dataclass(frozen=True, slots=True)
class Law:
    """frequency of pair c: factor * base^(-c / P)."""

    base: float
    factor: float

    def frequencies(self, pairs: int, of: int = 0) -> Tensor:
        """(pairs,), radians a position; the first ones of a law of `of` pairs, where that is given."""
        return self.factor * self.base ** (-torch.arange(pairs, dtype=torch.float64) / (of or pairs))


def turn_of(program: Program, vector: str) -> Turn | None:
    """The table of q's or k's rotation taken apart; that of one row with the frequencies of the other of the two."""
    own = rotation(way_of(program, vector))
    if own is None:
        return None
    turn = take_apart(own.table)
    if turn is not None:
        return turn
    other = rotation(way_of(program, "key" if vector == "query" else "query"))
    if other is None or other.width != own.width:
        return None
    known = take_apart(other.table)
    return None if known is None else take_apart(own.table, known.frequencies)


def law_of(turn: Turn) -> Law | None:
    """The law of its frequencies; None where they follow none, as YaRN's."""
    sizes = turn.frequencies.abs()
    pairs, number_of = len(sizes), torch.arange(len(sizes), dtype=torch.float64)
    seen = sizes * turn.span > UNSEEN
    if int(seen.sum()) < 2:
        return None
    logs, weight = sizes[seen].log(), sizes[seen] ** 2
    c = number_of[seen]
    mean_c, mean_log = (weight * c).sum() / weight.sum(), (weight * logs).sum() / weight.sum()
    slope = (weight * (c - mean_c) * (logs - mean_log)).sum() / (weight * (c - mean_c) ** 2).sum()
    factor = float((mean_log - slope * mean_c).exp())
    if abs(factor - 1) < LAW:
        factor, slope = 1.0, (weight * c * logs).sum() / (weight * c * c).sum()
    law = Law(math.exp(float(-slope) * pairs), factor)
    off = (law.frequencies(pairs)[seen] - sizes[seen]).abs()
    return law if bool((off < LAW * sizes[seen] + UNSEEN / 5 / turn.span).all()) else None


def base_words(turn: Turn) -> str | float:
    """The base of its frequencies, or what they are where they have none."""
    law = law_of(turn)
    if law is None:
        sizes = turn.frequencies.abs()
        return f"frequencies of another law, {number(float(sizes.max()))} to {number(float(sizes.min()))}"
    base = number(law.base)
    return base if law.factor == 1 else f"{base:g}, positions times {number(law.factor):g}"


def angle_slack(sides: Sides, span: float) -> float:
    """Radians that two equal tables may be apart."""
    return sides.slack if sides.slack < ANGLE / 8 else sides.slack + ANGLE * span


def snapped(table: Tensor, target: Tensor, tolerance: float) -> Tensor:
    """The table with the angles of `target` where all of them are the same within `tolerance`: no rounding is left."""
    if table.shape[1:] != target.shape[1:]:
        return table
    wanted = unit(target.to(torch.complex128))
    return table if float((unit(table) - wanted).abs().max()) > tolerance else table.abs() * wanted


def retold(
    own: Rotation,
    target: Rotation,
    tolerance: float,
    *,
    positions: Tensor | None = None,
    frequencies: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """The table of `own` with other positions or frequencies, and its amplitude; as it is where it can't be told.

    Args:
        own: what is changed.
        target: the other side's; where the result is its table within rounding its angles are taken.
        tolerance: of that, in radians.
        positions: in place of its own.
        frequencies: in place of its own.
        known: its own frequencies, where one row can't tell them.
    """
    turn = take_apart(own.table)
    turn = take_apart(own.table, known) if turn is None and known is not None else turn
    if turn is None:
        return own.table
    if frequencies is not None:
        other_width = len(frequencies) != len(turn.frequencies)
        # of neighbours more, or fewer, may have been said to turn: by too little to show
        if other_width and (own.layout != "interleaved" or _shows(turn, frequencies, tolerance)):
            return own.table
        turn = turn.with_frequencies(-frequencies if _against(frequencies, turn.frequencies) else frequencies)
    if positions is not None:
        turn = replace(turn, positions=positions)
    return snapped(turn.table(), target.table, tolerance)


def _against(one: Tensor, other: Tensor) -> bool:
    """Whether two sets of frequencies turn in opposite directions, which is no matter of the base."""
    return float(one.sum() * other.sum()) < 0


def _shows(turn: Turn, frequencies: Tensor, tolerance: float) -> bool:
    """Whether pairs that the one has and the other has not turn by more than `tolerance`, radians, in all positions."""
    pairs = min(len(frequencies), len(turn.frequencies))
    beyond = torch.cat([frequencies[pairs:], turn.frequencies[pairs:]])
    return bool(float(beyond.abs().max()) * turn.span > tolerance)


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
    law, like = (None if each is None else law_of(each) for each in (turn, known))
    if turn is None or law is None or law.factor != 1 or law.base <= 1:
        return own
    ratio = law.base ** (-1 / len(turn.frequencies))
    widths = [other.width]
    if like is not None and like.factor == 1 and like.base > 1:
        pairs = -math.log(like.base) / math.log(ratio)
        if abs(pairs - round(pairs)) < NEAR and round(pairs) > 0:
            widths.insert(0, 2 * round(pairs))
    for width in widths:
        if width == own.width:
            return own
        hidden = turn.frequencies.abs()[min(width, own.width) // 2 :]
        most = max([ratio ** (min(width, own.width) // 2), *hidden.tolist()])
        if own.first + width <= sides.head_dim and most * turn.span < sides.slack:
            more = turn.frequencies.sum().sign() * ratio ** torch.arange(width // 2, dtype=torch.float64)
            have = turn.frequencies[: width // 2]
            return replace(own, table=turn.with_frequencies(torch.cat([have, more[len(have) :]])).table())
    return own
