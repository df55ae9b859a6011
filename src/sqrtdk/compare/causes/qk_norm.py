"""`qk_norm`: one side does not normalise q, or k, or both; or by another kind of norm.

Another gain of the same norm is `weights`, another eps `qk_norm_eps`, another set of features `qk_norm_axis`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from sqrtdk.compare.causes._norms import WORDS, equivalent, features_of, norms_before_rotation, other_kind, pairs
from sqrtdk.compare.causes._parts import QK, Finding, joined, norms, slack, way, with_norm
from sqrtdk.compare.program import Norm, Rotation, Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "qk_norm"
NONE = "none"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """Norms that one side has and the other has not, then norms of another kind."""
    yield from joined(NAME, "norm", _missing(sides))
    yield from joined(NAME, "norm", _kinds(sides))


def _missing(sides: Sides) -> Iterator[Finding]:
    for part in QK:
        a, b = norms(way(sides.a, part)), norms(way(sides.b, part))
        if len(a) > len(b):
            gone = len(b)

            def without(old: Way, gone: int = gone) -> Way:
                return _first(old, gone)

            yield Finding(
                part, WORDS[a[gone].kind], NONE, f"leaves out the norm of {{}} ({WORDS[a[gone].kind]})", without
            )
        elif len(b) > len(a):
            have, other = len(a), way(sides.b, part)

            def added(old: Way, other: Way = other, have: int = have) -> Way:
                return _with(old, other, have)

            words = WORDS[b[have].kind]
            yield Finding(part, NONE, words, f"normalises {{}} ({words}), which A does not", added)


def _first(old: Way, count: int) -> Way:
    """With no more than the first `count` norms."""
    steps, seen = [], 0
    for step in old.steps:
        seen += isinstance(step, Norm)
        if not isinstance(step, Norm) or seen <= count:
            steps.append(step)
    return replace(old, steps=tuple(steps))


def _with(old: Way, other: Way, have: int) -> Way:
    """With the norms of `other` from number `have` on, on the side of the rotation where it has them."""
    before = norms_before_rotation(other)
    rest = norms(other)[have:]
    early = rest if before is None else rest[: max(0, before - have)]
    steps = list(_first(old, have).steps)
    at = next((i for i, step in enumerate(steps) if isinstance(step, Rotation)), len(steps))
    return replace(old, steps=(*steps[:at], *early, *steps[at:], *rest[len(early) :]))


def _kinds(sides: Sides) -> Iterator[Finding]:
    for part in QK:
        for place, a, b in pairs(sides, part):
            told = other_kind(a, b, features_of(a, sides, part), slack(sides))
            if told is not None:
                gain = b.gain

                def regained(old: Way, place: int = place, gain: Tensor = gain) -> Way:
                    own = norms(old)
                    return with_norm(old, place, replace(own[place], gain=gain)) if place < len(own) else old

                words = WORDS["rms" if told == "l2" else "l2"], WORDS[told]
                yield Finding(part, *words, _instead(words), regained)
                break
            if a.kind == b.kind or equivalent(a, b, features_of(a, sides, part), slack(sides)):
                continue
            kind, eps = b.kind, b.eps  # eps is of another unit in another kind

            def other(old: Way, place: int = place, kind: str = kind, eps: float = eps) -> Way:
                own = norms(old)
                return with_norm(old, place, replace(own[place], kind=kind, eps=eps)) if place < len(own) else old

            words = WORDS[a.kind], WORDS[b.kind]
            yield Finding(part, *words, _instead(words), other)
            break


def _instead(words: tuple[str, str]) -> str:
    return f"normalises {{}} by {words[1]} instead of {words[0]}"
