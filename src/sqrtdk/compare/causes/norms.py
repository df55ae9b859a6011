"""Differences of the norms of q and k: missing, other kind, features, eps or gain, before or after the rotation.

Norms are compared number by number. An "l2" whose gain is sqrt(features) times that of an "rms" is the same norm except
for its eps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from sqrtdk.compare.numbers import few_digits, same, spread
from sqrtdk.compare.program import Norm, Rotation, Way
from sqrtdk.compare.suspect import (
    ALIKE,
    NONE,
    QK,
    Both,
    Difference,
    Sides,
    norms,
    on_step,
    rotation,
    way_of,
)
from sqrtdk.messages import Message
from sqrtdk.tracing.probe.rotation import halves

WORDS = {"rms": "RMS", "layer": "LayerNorm", "l2": "L2"}
# x * (1 + weight) for x * weight: a checkpoint may store a gain as its distance from 1
OFF_BY_ONE = {1.0: "causes.weights.plus_one", -1.0: "causes.weights.minus_one"}


def norm_pairs(sides: Sides) -> Iterator[Both[Norm]]:
    """Yields the norms of q, then of k, in order."""
    for vector in QK:
        both = zip(norms(way_of(sides.a, vector)), norms(way_of(sides.b, vector)), strict=False)
        for place, (a, b) in enumerate(both):
            yield Both(sides, a, b, on_step(vector, Norm, place), vector)


# -- one norm of both sides --------------------------------------------------------------------------------------------


def kind(both: Both[Norm]) -> Difference | None:
    """Compares kinds. Also finds an "l2" that was recorded as "rms" with 1/sqrt(features) of the other side's gain."""
    a, b = both.a, both.b
    seen = _kind_by_gain(both)
    if seen is not None:
        words = WORDS["rms" if seen == "l2" else "l2"], WORDS[seen]
        return Difference(*words, edit=lambda own: replace(own, gain=b.gain))
    return None if a.kind == b.kind or _equivalent(both) else Difference(WORDS[a.kind], WORDS[b.kind])


def _equivalent(both: Both[Norm]) -> bool:
    a, b = both.a, both.b
    if {a.kind, b.kind} != {"rms", "l2"} or a.over != b.over:
        return False
    return _by_root(both, 0.5 if a.kind == "rms" else -0.5)


def _kind_by_gain(both: Both[Norm]) -> str | None:
    if (both.a.kind, both.b.kind) != ("rms", "rms") or both.a.over != both.b.over or _features(both) == 1:
        return None
    # x / |x| is x * rsqrt(mean(x^2)) / sqrt(E): an RMS norm with gain 1/sqrt(E)
    return next((name for name, power in (("l2", -0.5), ("rms", 0.5)) if _by_root(both, power)), None)


def _by_root(both: Both[Norm], power: float) -> bool:
    """Returns whether B's gain is A's times a power of the number of features that are normalised together."""
    wanted = both.a.gain * _features(both) ** power
    return bool(torch.isclose(both.b.gain, wanted, rtol=both.sides.slack, atol=0).all())


def _features(both: Both[Norm]) -> int:
    """Returns how many features are normalised together."""
    sides = both.sides
    affine = way_of(sides.a, both.vector).affine or way_of(sides.b, both.vector).affine
    heads = len(affine.weight) if affine is not None else len(both.a.gain) if both.vector == "key" else sides.heads
    return sides.head_dim * (heads if both.a.over == "heads" else 1)


def gain(both: Both[Norm]) -> Difference | None:
    """Compares gains and shifts."""
    a, b, slack = both.a, both.b, both.sides.slack
    gains = not same(a.gain, b.gain, slack)
    if not (gains or _shifts_differ(a, b, slack)) or _equivalent(both) or _kind_by_gain(both) is not None:
        return None
    by_one = next((id for plus, id in OFF_BY_ONE.items() if same(a.gain + plus, b.gain, slack)), None)
    if by_one is not None:
        how = Message(by_one)
        return Difference(Message("causes.weights.the_gain"), how, {"how": how}, text="causes.weights.gain_by_one")
    old, new = spread(a.gain), spread(b.gain)
    words = {"new": new, "old": old}
    return Difference(old, new, words, text="causes.weights.gain" if gains else "causes.weights.gain_shift")


def _shifts_differ(a: Norm, b: Norm, tolerance: float) -> bool:
    shifts = [torch.zeros_like(x.gain) if x.shift is None else x.shift for x in (a, b)]
    size = max(float(a.gain.abs().max()), float(shifts[0].abs().max()))
    return bool(((shifts[0] - shifts[1]).abs() > tolerance * size).any())


def eps(both: Both[Norm]) -> Difference | None:
    """Compares eps beyond the rounding of A's; whether a difference matters depends on the sizes of q and k."""
    # The eps of "l2" is added to a length, that of "rms" to a mean square: their numbers can't be compared.
    a, b = both.a, both.b
    other_unit = (a.kind == "l2") != (b.kind == "l2")
    if other_unit or abs(a.eps - b.eps) <= ALIKE * max(a.eps, b.eps):
        return None
    return Difference(*few_digits(a.eps, b.eps))


def axis(both: Both[Norm]) -> Difference | None:
    """Compares the features of the mean: those of one head, or those of all heads."""
    old, new = (Message(f"causes.qk_norm_axis.{norm.over}") for norm in (both.a, both.b))
    return None if both.a.over == both.b.over else Difference(old, new)


# -- all norms of q or k -----------------------------------------------------------------------------------------------


def missing(both: Both[Way]) -> Difference | None:
    """Compares the number of norms: a norm that only one side has."""
    a, b, other = norms(both.a), norms(both.b), both.b
    if len(a) > len(b):
        return Difference(WORDS[a[len(b)].kind], Message(NONE), edit=lambda own: _first(own, len(b)))
    if len(b) > len(a):
        return Difference(Message(NONE), WORDS[b[len(a)].kind], edit=lambda own: _with(own, other, len(a)))
    return None


def _first(old: Way, count: int) -> Way:
    """Returns the way with only its first `count` norms."""
    gone = norms(old)[count:]
    return replace(old, steps=tuple(step for step in old.steps if not any(step is one for one in gone)))


def _with(old: Way, other: Way, have: int) -> Way:
    """Returns the way with the norms of `other` from number `have` on, on the same side of the rotation as there."""
    before, rest = norms_before_rotation(other), norms(other)[have:]
    early = rest if before is None else rest[: max(0, before - have)]
    steps = list(_first(old, have).steps)
    at = next((i for i, step in enumerate(steps) if isinstance(step, Rotation)), len(steps))
    return replace(old, steps=(*steps[:at], *early, *steps[at:], *rest[len(early) :]))


def order(both: Both[Way]) -> Difference | None:
    """Compares the order of norm and rotation, if it differs and the two don't commute."""
    early, wanted, own = norms_before_rotation(both.a), norms_before_rotation(both.b), norms(both.a)
    if early is None or wanted is None or early == wanted or len(own) != len(norms(both.b)):
        return None
    if all(_commutes(norm, rotation(both.a)) for norm in own[min(early, wanted) : max(early, wanted)]):
        return None
    before, after = Message("causes.qk_norm_order.before"), Message("causes.qk_norm_order.after")
    a, b, text = after, before, "causes.qk_norm_order.early"
    if early > wanted:
        a, b, text = before, after, "causes.qk_norm_order.late"
    return Difference(a, b, edit=lambda old: _with_early(old, wanted), text=text)


def norms_before_rotation(way: Way) -> int | None:
    """Returns how many norms come before the rotation; None without a rotation."""
    if rotation(way) is None:
        return None
    at = next(i for i, step in enumerate(way.steps) if isinstance(step, Rotation))
    return sum(isinstance(step, Norm) for step in way.steps[:at])


def _commutes(norm: Norm, turned: Rotation | None) -> bool:
    """Returns whether the order of norm and rotation doesn't matter: lengths stay, and pairs share a gain."""
    if turned is None:
        return True
    if norm.kind == "layer" or norm.shift is not None or not bool((turned.table.abs() - 1).abs().max() < 1e-6):
        return False
    # norm(rope(x)) equals rope(norm(x)) if both channels of each pair have the same gain
    gain = norm.gain[..., turned.first : turned.first + turned.width]
    one_gain = gain.shape[-1] != turned.width  # one gain for all channels
    return one_gain or bool(torch.isclose(*halves(gain, turned.layout), rtol=1e-6, atol=0).all())


def _with_early(old: Way, count: int) -> Way:
    """Returns the way with `count` of its norms before the rotation and the rest after; other steps stay in place."""
    if rotation(old) is None:
        return old
    own = norms(old)
    rest = [step for step in old.steps if not isinstance(step, Norm)]
    at = next(i for i, step in enumerate(rest) if isinstance(step, Rotation))
    return replace(old, steps=(*own[:count], *rest[: at + 1], *own[count:], *rest[at + 1 :]))
