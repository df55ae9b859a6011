"""`rope_base`: the frequencies are others: another base, positions that are interpolated, YaRN's or another law.

The angles are position * frequency. Here the positions and the amplitude stay A's; other positions are `positions`,
another amplitude is `length_factor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.causes._laws import angle_slack, base_words, law_of, retold, turn_of
from sqrtdk.compare.causes._parts import QK, Finding, joined, rotation, way, with_rotation
from sqrtdk.compare.causes._turns import Turn
from sqrtdk.compare.causes._widths import like_widths
from sqrtdk.compare.numbers import told_apart
from sqrtdk.compare.program import Rotation, Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "rope_base"
MORE_DIGITS = 1e-6  # relative: bases that are less apart, as of tables that were made in float32, are one


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """Other frequencies."""
    yield from joined(NAME, "rotation", _findings(like_widths(sides)))


def _findings(sides: Sides) -> Iterator[Finding]:
    for part in QK:
        a, b, target = turn_of(sides.a, part), turn_of(sides.b, part), rotation(way(sides.b, part))
        if a is None or b is None or target is None:
            continue
        wanted = wanted_frequencies(a, b)
        span = max(a.span, b.span)
        if wanted is None or float((wanted - a.frequencies).abs().max()) * span <= 2 * angle_slack(sides, span):
            continue
        known, tolerance = a.frequencies, 2 * angle_slack(sides, span)

        def other(
            old: Way,
            wanted: Tensor = wanted,
            target: Rotation = target,
            known: Tensor = known,
            tolerance: float = tolerance,
        ) -> Way:
            own = rotation(old)
            if own is None:
                return old
            table = retold(own, target, tolerance, frequencies=wanted, known=known)
            return with_rotation(old, replace(own, table=table))

        words = base_words(a), base_words(b)
        if words[0] == words[1]:
            words = _apart(a, b, wanted)
        told = [f"base {word:g}" if isinstance(word, float) else _told(word) for word in words]
        text = f"turns {{}} with {told[1]} instead of {told[0]}"
        yield Finding(part, *words, text, other)


def _told(words: str) -> str:
    return words if words.startswith("frequenc") else f"base {words}"


def _apart(a: Turn, b: Turn, wanted: Tensor) -> tuple[str, str]:
    """What two frequencies of one law to four digits are: the base in more digits, or that of the pair farthest off."""
    laws = law_of(a), law_of(b)
    if laws[0] is not None and laws[1] is not None:
        bases = laws[0].base, laws[1].base
        if abs(bases[0] / bases[1] - 1) > MORE_DIGITS and len(a.frequencies) == len(b.frequencies):
            old, new = told_apart(*bases, 6)
            return f"{old}", f"{new}"
    pair = int((wanted.abs() - a.frequencies.abs()).abs().argmax())
    old, new = told_apart(float(a.frequencies[pair].abs()), float(wanted[pair].abs()))
    return f"frequency {old} of pair {pair}", f"frequency {new} of pair {pair}"


def wanted_frequencies(a: Turn, b: Turn) -> Tensor | None:
    """B's frequencies for as many pairs as A turns, in A's direction; None where that can't be told."""
    signs = torch.where(a.frequencies.sum() < 0, -1.0, 1.0)
    if len(a.frequencies) == len(b.frequencies):
        return b.frequencies.abs() * signs if bool((b.frequencies * b.frequencies.sum() >= 0).all()) else b.frequencies
    mine, other = law_of(a), law_of(b)
    if mine is None or other is None or _shared(a, b):
        return None
    return other.frequencies(len(a.frequencies)) * signs


def _shared(a: Turn, b: Turn) -> bool:
    """The first frequencies are the same: one law, of which one side turns fewer pairs."""
    pairs = min(len(a.frequencies), len(b.frequencies))
    return bool(torch.allclose(a.frequencies[:pairs].abs(), b.frequencies[:pairs].abs(), rtol=1e-3, atol=0))
