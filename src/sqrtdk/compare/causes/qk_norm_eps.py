"""`qk_norm_eps`: the norms of q or k add another eps.

Whether it matters depends on the sizes of q and k, which are the proof's; here it is enough that the two are no
rounding of each other. Kinds whose eps is of another unit are `qk_norm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sqrtdk.compare.causes._norms import pairs
from sqrtdk.compare.causes._parts import ALIKE, QK, Finding, joined, norms, with_norm
from sqrtdk.compare.numbers import told_apart
from sqrtdk.compare.program import Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "qk_norm_eps"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """Another eps."""
    yield from joined(NAME, "norm", _findings(sides))


def _findings(sides: Sides) -> Iterator[Finding]:
    for part in QK:
        for place, a, b in pairs(sides, part):
            if (a.kind == "l2") != (b.kind == "l2") or abs(a.eps - b.eps) <= ALIKE * max(a.eps, b.eps):
                continue
            eps = b.eps

            def other(old: Way, place: int = place, eps: float = eps) -> Way:
                own = norms(old)
                return with_norm(old, place, replace(own[place], eps=eps)) if place < len(own) else old

            old, new = told_apart(a.eps, b.eps)
            text = f"adds {new} instead of {old} in the norm of {{}}"
            yield Finding(part, float(old), float(new), text, other)
            break
