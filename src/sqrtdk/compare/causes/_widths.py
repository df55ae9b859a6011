"""How many neighbouring channels turn, where the slow pairs turn too little to show.

In half precision a fit can't tell whether the last pairs of neighbours turn by almost nothing or do not turn, and may
say another width on each side. A width that makes the law of one side that of the other is taken, else the other's.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from sqrtdk.compare.causes._laws import law_of
from sqrtdk.compare.causes._parts import QK, rotation, slack, way, with_rotation, with_way
from sqrtdk.compare.causes._turns import Turn, take_apart
from sqrtdk.compare.program import Rotation
from sqrtdk.compare.suspect import Sides

NEAR = 0.03  # of a pair: a count of pairs that near to a whole one is one


def like_widths(sides: Sides) -> Sides:
    """The sides, with rotations of neighbours of the width that is most like the other side's."""
    for part in QK:
        a, b = rotation(way(sides.a, part)), rotation(way(sides.b, part))
        if a is None or b is None or "interleaved" not in (a.layout, b.layout):
            continue
        if b.layout == "interleaved":
            own = _like(b, a, slack(sides), sides.head_dim)
            sides = replace(sides, b=with_way(sides.b, part, with_rotation(way(sides.b, part), own)))
        else:
            own = _like(a, b, slack(sides), sides.head_dim)
            sides = replace(sides, a=with_way(sides.a, part, with_rotation(way(sides.a, part), own)))
    return sides


def _like(own: Rotation, other: Rotation, noise: float, head_dim: int) -> Rotation:
    turn, known = take_apart(own.table), take_apart(other.table)
    laws = [None if each is None else law_of(each) for each in (turn, known)]
    if turn is None or laws[0] is None or laws[0].factor != 1 or laws[0].base <= 1:
        return own
    ratio = laws[0].base ** (-1 / len(turn.frequencies))
    tried = [other.width]
    if laws[1] is not None and laws[1].factor == 1 and laws[1].base > 1:
        pairs = -math.log(laws[1].base) / math.log(ratio)
        if abs(pairs - round(pairs)) < NEAR and round(pairs) > 0:
            tried.insert(0, 2 * round(pairs))
    for width in tried:
        if width == own.width:
            return own
        if own.first + width <= head_dim and _hidden(turn, ratio, min(width, own.width) // 2, noise):
            return replace(own, table=_resized(turn, ratio, width // 2))
    return own


def _hidden(turn: Turn, ratio: float, first: int, noise: float) -> bool:
    """Whether no pair from number `first` on turns enough to show."""
    rest = turn.frequencies.abs()[first:]
    most = max([ratio**first, *rest.tolist()])
    return bool(most * turn.span < noise)


def _resized(turn: Turn, ratio: float, pairs: int) -> torch.Tensor:
    have = len(turn.frequencies)
    more = torch.sign(turn.frequencies.sum()) * ratio ** torch.arange(have, max(have, pairs), dtype=torch.float64)
    frequencies = torch.cat([turn.frequencies, more])[:pairs]
    amplitude = turn.amplitude.median(-1, keepdim=True).values
    return Turn(turn.positions, frequencies, amplitude).table()
