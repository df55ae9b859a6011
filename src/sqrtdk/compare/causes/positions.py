"""`positions`: the rows of q or k are turned as if they stood elsewhere: off by one, not reset, padding counted or not.

The angles are position * frequency; the frequencies and the amplitude stay A's. Other frequencies are `rope_base`, also
where they are those of positions that are all divided by one number. The same shift of q and of k changes no logit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.causes._laws import angle_slack, position_words, retold, turn_of
from sqrtdk.compare.causes._parts import QK, Finding, joined, rotation, way, with_rotation
from sqrtdk.compare.causes._turns import Turn
from sqrtdk.compare.causes._widths import like_widths
from sqrtdk.compare.numbers import told_apart
from sqrtdk.compare.program import Rotation, Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "positions"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """Other positions."""
    yield from joined(NAME, "rotation", _findings(like_widths(sides)))


def _findings(sides: Sides) -> Iterator[Finding]:
    for part in QK:
        own, target = rotation(way(sides.a, part)), rotation(way(sides.b, part))
        if own is None or target is None:
            continue
        a, b = turn_of(sides.a, part), turn_of(sides.b, part)
        if a is None or b is None:
            yield from _untold(sides, part, own, target)
            continue
        shift = b.positions - a.positions
        span = max(a.span, b.span)
        tolerance = 2 * angle_slack(sides, span)
        if float(shift.abs().max()) * float(a.frequencies.abs().max()) <= tolerance:
            continue
        positions, known = b.positions, a.frequencies

        def other(
            old: Way,
            positions: Tensor = positions,
            target: Rotation = target,
            known: Tensor = known,
            tolerance: float = tolerance,
        ) -> Way:
            mine = rotation(old)
            if mine is None:
                return old
            table = retold(mine, target, tolerance, positions=positions, known=known)
            return with_rotation(old, replace(mine, table=table))

        words = position_words(a), position_words(b)
        if words[0] == words[1]:
            entry = int((shift != 0).any(-1).nonzero()[0])
            words = _range(a, entry), _range(b, entry)
        if words[0] == words[1]:
            words = _farthest(a, b)
        yield Finding(part, *words, _text(a, b, words), other)


def _range(turn: Turn, entry: int) -> str:
    """Positions of one sequence, from its first row to its last."""
    positions = turn.positions[min(entry, turn.positions.shape[0] - 1)]
    return f"from {float(positions[0]):g} to {float(positions[-1]):g} in sequence {entry}"


def _farthest(a: Turn, b: Turn) -> tuple[str, str]:
    """The position of the row that is farthest off."""
    zeros = torch.zeros_like(a.positions + b.positions)
    positions = a.positions + zeros, b.positions + zeros
    at = int((positions[0] - positions[1]).abs().flatten().argmax())
    entry, row = divmod(at, positions[0].shape[1])
    old, new = told_apart(float(positions[0][entry, row]), float(positions[1][entry, row]), 6)
    return f"{old} at row {row} of sequence {entry}", f"{new} at row {row} of sequence {entry}"


def _text(a: Turn, b: Turn, words: tuple[str, str]) -> str:
    shift = b.positions - a.positions
    first = float(shift.flatten()[0])
    if bool((shift == first).all()):
        return f"counts the positions of {{}} {words[1]} instead of {words[0]}: off by {first:+g}"
    row = int((shift != 0).any(0).nonzero()[0])
    return f"counts the positions of {{}} otherwise from row {row} on: {words[1]} instead of {words[0]}"


def _untold(sides: Sides, part: str, own: Rotation, target: Rotation) -> Iterator[Finding]:
    """Angles that are no product of positions and frequencies on one side, as of images: all of them are B's."""
    if own.width != target.width:
        return
    mine, wanted = (x / x.abs().clamp_min(torch.finfo(torch.float64).tiny) for x in (own.table, target.table))
    length = float(max(own.table.shape[1], target.table.shape[1]))
    if own.table.shape[1] != target.table.shape[1] or float((mine - wanted).abs().max()) <= angle_slack(sides, length):
        return

    def other(old: Way) -> Way:
        now = rotation(old)
        if now is None or now.width != target.width:
            return old
        return with_rotation(old, replace(now, table=now.table.abs() * wanted))

    yield Finding(part, "its own angles", "other angles", "turns {} by other angles, of no one position a row", other)
