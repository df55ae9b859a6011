"""`qk_norm_order`: the norm stands before the rotation on one side, after it on the other.

It matters where the gain differs within a pair of channels that turn together, where the mean is subtracted, and where
the table has an amplitude; without any of these the two commute and nothing is suspected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sqrtdk.compare.causes._norms import commutes, norms_before_rotation
from sqrtdk.compare.causes._parts import QK, Finding, joined, norms, rotation, way
from sqrtdk.compare.program import Norm, Rotation, Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "qk_norm_order"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """The same steps in the other order."""
    yield from joined(NAME, "norm", _findings(sides))


def _findings(sides: Sides) -> Iterator[Finding]:
    for part in QK:
        a, b = way(sides.a, part), way(sides.b, part)
        early, wanted = norms_before_rotation(a), norms_before_rotation(b)
        if early is None or wanted is None or early == wanted or len(norms(a)) != len(norms(b)):
            continue
        moved = norms(a)[min(early, wanted) : max(early, wanted)]
        if all(commutes(norm, rotation(a)) for norm in moved):
            continue

        def other(old: Way, wanted: int = wanted) -> Way:
            return _with_early(old, wanted)

        words = ("before", "after") if early > wanted else ("after", "before")
        text = f"normalises {{}} {words[1]} the rotation instead of {words[0]} it"
        yield Finding(part, f"{words[0]} the rotation", f"{words[1]} the rotation", text, other)


def _with_early(old: Way, count: int) -> Way:
    """With `count` of its norms before the rotation and the others after; other steps stay where they are."""
    if rotation(old) is None:
        return old
    own = norms(old)
    rest = [step for step in old.steps if not isinstance(step, Norm)]
    at = next(i for i, step in enumerate(rest) if isinstance(step, Rotation))
    return replace(old, steps=(*own[:count], *rest[: at + 1], *own[count:], *rest[at + 1 :]))
