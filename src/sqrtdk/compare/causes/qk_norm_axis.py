"""`qk_norm_axis`: the mean is over the features of one head on one side, over those of all heads on the other.

Kind, eps and gain stay A's; a gain that differs besides is `weights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sqrtdk.compare.causes._norms import pairs
from sqrtdk.compare.causes._parts import QK, Finding, joined, norms, with_norm
from sqrtdk.compare.program import Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "qk_norm_axis"
WORDS = {"head": "each head", "heads": "all heads together"}


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """A norm over other features."""
    yield from joined(NAME, "norm", _findings(sides))


def _findings(sides: Sides) -> Iterator[Finding]:
    for part in QK:
        for place, a, b in pairs(sides, part):
            if a.over == b.over:
                continue
            over = b.over

            def other(old: Way, place: int = place, over: str = over) -> Way:
                own = norms(old)
                return with_norm(old, place, replace(own[place], over=over)) if place < len(own) else old

            words = WORDS[a.over], WORDS[b.over]
            yield Finding(part, *words, f"normalises {{}} over {words[1]} instead of {words[0]}", other)
            break
