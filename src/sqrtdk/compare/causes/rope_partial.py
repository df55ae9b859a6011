"""`rope_partial`: another part of the head turns: fewer channels, or others.

Positions, amplitude and pairing stay A's. The frequencies depend on how many channels turn, base^(-2c / R), or, where
the law is that of the whole head, they do not: whichever of the two gives B's is taken, and what is left is
`rope_base`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.causes._laws import angle_slack, law_of, snapped, turn_of
from sqrtdk.compare.causes._parts import QK, Finding, joined, rotation, way, with_rotation
from sqrtdk.compare.causes._turns import Turn, take_apart
from sqrtdk.compare.causes._widths import like_widths
from sqrtdk.compare.program import Rotation, Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "rope_partial"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """Another part of the head."""
    yield from joined(NAME, "rotation", _findings(like_widths(sides)))


def _findings(sides: Sides) -> Iterator[Finding]:
    for part in QK:
        a, b = rotation(way(sides.a, part)), rotation(way(sides.b, part))
        if a is None or b is None:
            continue
        turns = turn_of(sides.a, part), turn_of(sides.b, part)
        span = max([1.0, *(turn.span for turn in turns if turn is not None)])
        target, other, tolerance = b, turns[1], 2 * angle_slack(sides, span)
        moving = _moving(a, turns[0], tolerance), _moving(b, turns[1], tolerance)
        if (a.width, a.first, moving[0]) == (b.width, b.first, moving[1]):
            continue

        def partial(old: Way, target: Rotation = target, other: Turn | None = other, near: float = tolerance) -> Way:
            own = rotation(old)
            if own is None:
                return old
            table = _table(own, target, other, near)
            return with_rotation(old, replace(own, table=table, first=target.first))

        words = _channels(a, sides.head_dim, moving[0]), _channels(b, sides.head_dim, moving[1])
        yield Finding(part, *words, f"turns {words[1]} of {{}} instead of {words[0]}", partial)


def _moving(turned: Rotation, turn: Turn | None, tolerance: float) -> int:
    """How many of its pairs, the first ones, turn; all where that is not known.

    Half a head that turns by the table of the whole has pairs that stand still: cat(angles[:n], zeros).
    """
    pairs = turned.width // 2
    if turn is None:
        return pairs
    still = turn.frequencies.abs() * turn.span <= tolerance
    first = int((~still).sum())
    law = law_of(turn)
    shows = law is not None and float(law.frequencies(pairs)[first:].sum()) * turn.span > 2 * tolerance
    return first if shows and not bool(still[:first].any()) else pairs


def _channels(turned: Rotation, head_dim: int, moving: int) -> str:
    where = f"all {head_dim} channels"
    if turned.width != head_dim:
        where = f"channels {turned.first} to {turned.first + turned.width - 1} of {head_dim}"
    return where if moving == turned.width // 2 else f"the first {moving} of {turned.width // 2} pairs of {where}"


def _table(own: Rotation, target: Rotation, other: Turn | None, tolerance: float) -> Tensor:
    """A table for as many channels as `target` turns, of `own`'s positions, amplitude and law."""
    turn, pairs = take_apart(own.table), target.width // 2
    if own.width == target.width and (turn is None or other is None or _like(turn, other, tolerance)):
        return own.table
    if turn is None or other is None:
        return target.table
    table = Turn(turn.positions, _frequencies(turn, other, pairs), _amplitude(turn, pairs)).table()
    return snapped(table, target.table.to(torch.complex128), tolerance)


def _frequencies(turn: Turn, other: Turn, pairs: int) -> Tensor:
    law, have = law_of(turn), len(turn.frequencies)
    if law is None:
        return other.frequencies
    signs = torch.where(turn.frequencies.sum() < 0, -1.0, 1.0)
    laws = [law.frequencies(pairs) * signs]
    whole = law.factor * law.base ** (-torch.arange(pairs, dtype=torch.float64) / have) * signs
    laws.append(whole)
    laws += [torch.where(other.frequencies == 0, 0.0, one) for one in laws]
    return min(laws, key=lambda frequencies: float((frequencies.abs() - other.frequencies.abs()).abs().max()))


def _like(turn: Turn, other: Turn, tolerance: float) -> bool:
    """Whether the same pairs turn."""
    still = [one.frequencies.abs() * one.span <= tolerance for one in (turn, other)]
    return bool((still[0] == still[1]).all())


def _amplitude(turn: Turn, pairs: int) -> Tensor:
    return turn.amplitude.median(-1, keepdim=True).values.expand(*turn.amplitude.shape[:-1], pairs)
