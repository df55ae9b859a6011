"""What rotary tables have in common with those of the other side: laws of frequencies, positions in words, snapping."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.compare.causes._parts import number, rotation, slack, way
from sqrtdk.compare.causes._turns import Turn, take_apart
from sqrtdk.compare.program import Program, Rotation
from sqrtdk.compare.suspect import Sides

ANGLE = 2.0**-21  # of a position: angles are computed in float32 where the tables are made, whatever the dtype
LAW = 1e-3  # of a frequency, relative: as far as one may be from the law that it follows
UNSEEN = 0.05  # angle in radians over all positions: a frequency that turns less is not known well enough to judge


@dataclass(frozen=True, slots=True)
class Law:
    """frequency of pair c: factor * base^(-c / P)."""

    base: float
    factor: float

    def frequencies(self, pairs: int) -> Tensor:
        """(pairs,), radians a position."""
        return self.factor * self.base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)


def turn_of(program: Program, part: str) -> Turn | None:
    """The table of q's or k's rotation taken apart; that of one row with the frequencies of the other of the two."""
    own = rotation(way(program, part))
    if own is None:
        return None
    turn = take_apart(own.table)
    if turn is not None:
        return turn
    other = rotation(way(program, "key" if part == "query" else "query"))
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


def position_words(turn: Turn) -> str:
    """Its positions in few words."""
    rows = turn.positions[0].tolist()
    whole = [round(row, 3) for row in rows]
    starts = [i for i in range(1, len(whole)) if whole[i] != round(whole[i - 1] + 1, 3)]
    if not starts:
        return f"from {whole[0]:g}"
    first = starts[0]
    if len(starts) <= 3:
        again = " and ".join(f"from {whole[i]:g} at row {i}" for i in starts)
        return f"from {whole[0]:g}, then {again}"
    return f"from {whole[0]:g}, at row {first} {whole[first]:g}, and so on"


def angle_slack(sides: Sides, span: float) -> float:
    """Radians that two equal tables may be apart."""
    fine = slack(sides)
    return fine if fine < ANGLE / 8 else fine + ANGLE * span


def snapped(table: Tensor, target: Tensor, tolerance: float) -> Tensor:
    """The table with the angles of `target` where all of them are the same within `tolerance`: no rounding is left."""
    if table.shape[1:] != target.shape[1:]:
        return table
    unit, wanted = (x / x.abs().clamp_min(torch.finfo(torch.float64).tiny) for x in (table, target))
    if float((unit - wanted).abs().max()) > tolerance:
        return table
    return table.abs() * wanted


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
    if frequencies is not None and len(frequencies) != len(turn.frequencies):
        if own.layout != "interleaved" or _shows(turn, frequencies, tolerance):
            return own.table
        # neighbours of which more, or fewer, were said to turn: by too little to show
        amplitude = turn.amplitude.median(-1, keepdim=True).values.expand(*turn.positions.shape, len(frequencies))
        turn = Turn(turn.positions, frequencies, amplitude)
    if frequencies is not None and float(frequencies.sum() * turn.frequencies.sum()) < 0:
        frequencies = -frequencies  # the direction is no matter of the base
    changed = Turn(
        positions=turn.positions if positions is None else positions,
        frequencies=turn.frequencies if frequencies is None else frequencies,
        amplitude=turn.amplitude,
    )
    return snapped(changed.table(), target.table.to(torch.complex128), tolerance)


def _shows(turn: Turn, frequencies: Tensor, tolerance: float) -> bool:
    """Whether pairs that the one has and the other has not turn by more than `tolerance`, radians, in all positions."""
    pairs = min(len(frequencies), len(turn.frequencies))
    beyond = torch.cat([frequencies[pairs:], turn.frequencies[pairs:]])
    return bool(float(beyond.abs().max()) * turn.span > tolerance)
