"""`rope_layout`: the channels are paired otherwise, (c, c + R/2) against (2c, 2c + 1), or turn the other way round.

The table stays A's: another base or other positions are `rope_base` and `positions`. Rows of the projection that are
laid out for the other pairing, with the same pairing, are `head_order`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from sqrtdk.compare.causes._laws import turn_of
from sqrtdk.compare.causes._parts import QK, Finding, joined, rotation, way, with_rotation
from sqrtdk.compare.causes._rows import relabelled
from sqrtdk.compare.causes._widths import like_widths
from sqrtdk.compare.program import Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "rope_layout"
ROTATION = "rotation"
WORDS = {"half": "half-split", "interleaved": "interleaved"}
WAYS = {1: "forwards", -1: "backwards"}


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """Another pairing, and the other direction."""
    yield from joined(NAME, ROTATION, _pairings(sides))
    yield from joined(NAME, ROTATION, _directions(sides))


def _pairings(sides: Sides) -> Iterator[Finding]:
    like = like_widths(sides)  # pairs that do not show as neighbours would be other pairs half-split
    for part in QK:
        a, b = rotation(way(sides.a, part)), rotation(way(sides.b, part))
        if a is None or b is None or a.layout == b.layout or max(a.width, b.width) == 2 or relabelled(sides, part):
            continue
        layout, told, width = b.layout, rotation(way(like.a, part)), a.width
        narrowed = None if told is None or told.width == width else told.table

        def other(old: Way, layout: str = layout, narrowed: Tensor | None = narrowed, width: int = width) -> Way:
            own = rotation(old)
            if own is None:
                return old
            table = narrowed if narrowed is not None and own.width == width else own.table
            return with_rotation(old, replace(own, layout=layout, table=table))

        words = WORDS[a.layout], WORDS[b.layout]
        yield Finding(part, *words, f"pairs the channels of {{}} {words[1]} instead of {words[0]}", other)


def _directions(sides: Sides) -> Iterator[Finding]:
    for part in QK:
        a, b = turn_of(sides.a, part), turn_of(sides.b, part)
        if a is None or b is None:
            continue
        signs = [1 if float(turn.frequencies.sum()) >= 0 else -1 for turn in (a, b)]
        if signs[0] != signs[1]:
            yield Finding(part, WAYS[signs[0]], WAYS[signs[1]], f"turns {{}} {WAYS[signs[1]]}", _mirrored)


def _mirrored(old: Way) -> Way:
    own = rotation(old)
    return old if own is None else with_rotation(old, replace(own, table=own.table.conj().resolve_conj()))
