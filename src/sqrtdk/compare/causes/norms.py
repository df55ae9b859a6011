"""Differences of the norms of q and k: missing, other kind, features, eps or gain, before or after the rotation.

Norms are compared number by number. An "l2" whose gain is sqrt(features) times that of an "rms" is the same norm except
for its eps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from sqrtdk.compare.inside.program import QK, NormStep, Rotation, VectorPath
from sqrtdk.compare.inside.suspect import (
    NO_VALUE,
    READER_TOLERANCE,
    BothParts,
    PartDifference,
    Sides,
    change_step,
    norms_of,
    path_of,
    rotation_of,
)
from sqrtdk.compare.numbers import few_digits, range_text, same
from sqrtdk.messages import Message
from sqrtdk.tracing.probe.rotation import halves

NORM_WORDS = {"rms": "RMS", "layer": "LayerNorm", "l2": "L2"}
# x * (1 + weight) for x * weight: a checkpoint may store a gain as its distance from 1
OFF_BY_ONE = {1.0: "causes.weights.plus_one", -1.0: "causes.weights.minus_one"}


def norm_pairs(sides: Sides) -> Iterator[BothParts[NormStep]]:
    """Yield the first norm of q on both sides, then the second, and so on; then those of k.

    A norm that only one side has is left out.
    """
    for vector in QK:
        both = zip(norms_of(path_of(sides.a, vector)), norms_of(path_of(sides.b, vector)), strict=False)
        for place, (a, b) in enumerate(both):
            yield BothParts(sides, a, b, change_step(vector, NormStep, place), vector)


# -- one norm of both sides --------------------------------------------------------------------------------------------


def compare_norm_kind(both: BothParts[NormStep]) -> PartDifference | None:
    """Return the difference of the kinds, such as "RMS" and "L2"; None if they are the same.

    x / |x| equals an RMS norm with gain 1 / sqrt(n), n the number of features that are normalised together. So "l2" and
    "rms" norms with gains that make up for this are the same, and two "rms" norms whose gains differ by sqrt(n) are
    not.
    """
    a, b = both.a, both.b
    seen = _kind_by_gain(both)
    if seen is not None:
        words = NORM_WORDS["rms" if seen == "l2" else "l2"], NORM_WORDS[seen]
        return PartDifference(*words, edit=lambda own: replace(own, gain=b.gain))
    return None if a.kind == b.kind or _equivalent(both) else PartDifference(NORM_WORDS[a.kind], NORM_WORDS[b.kind])


def _equivalent(both: BothParts[NormStep]) -> bool:
    a, b = both.a, both.b
    if {a.kind, b.kind} != {"rms", "l2"} or a.over != b.over:
        return False
    return _by_root(both, 0.5 if a.kind == "rms" else -0.5)


def _kind_by_gain(both: BothParts[NormStep]) -> str | None:
    if (both.a.kind, both.b.kind) != ("rms", "rms") or both.a.over != both.b.over or _features(both) == 1:
        return None
    # x / |x| is x * rsqrt(mean(x^2)) / sqrt(E): an RMS norm with gain 1/sqrt(E)
    return next((name for name, power in (("l2", -0.5), ("rms", 0.5)) if _by_root(both, power)), None)


def _by_root(both: BothParts[NormStep], power: float) -> bool:
    """Return whether B's gain is A's times a power of the number of features that are normalised together."""
    wanted = both.a.gain * _features(both) ** power
    return bool(torch.isclose(both.b.gain, wanted, rtol=both.sides.slack, atol=0).all())


def _features(both: BothParts[NormStep]) -> int:
    """Return how many features are normalised together."""
    sides = both.sides
    affine = path_of(sides.a, both.vector).affine or path_of(sides.b, both.vector).affine
    heads = len(affine.weight) if affine is not None else len(both.a.gain) if both.vector == "key" else sides.heads
    return sides.head_dim * (heads if both.a.over == "heads" else 1)


def compare_gain(both: BothParts[NormStep]) -> PartDifference | None:
    """Return the difference of gains or shifts; None if both agree, or if the gains only reflect another kind.

    `a` and `b` are the ranges of the gains. A gain that is off by exactly 1 is described as such: x * (1 + weight).
    """
    a, b, slack = both.a, both.b, both.sides.slack
    gains = not same(a.gain, b.gain, slack)
    if not (gains or _shifts_differ(a, b, slack)) or _equivalent(both) or _kind_by_gain(both) is not None:
        return None
    by_one = next((id for plus, id in OFF_BY_ONE.items() if same(a.gain + plus, b.gain, slack)), None)
    if by_one is not None:
        how = Message(by_one)
        return PartDifference(Message("causes.weights.the_gain"), how, {"how": how}, text="causes.weights.gain_by_one")
    old, new = range_text(a.gain), range_text(b.gain)
    words = {"new": new, "old": old}
    return PartDifference(old, new, words, text="causes.weights.gain" if gains else "causes.weights.gain_shift")


def _shifts_differ(a: NormStep, b: NormStep, tolerance: float) -> bool:
    shifts = [torch.zeros_like(x.gain) if x.shift is None else x.shift for x in (a, b)]
    size = max(float(a.gain.abs().max()), float(shifts[0].abs().max()))
    return bool(((shifts[0] - shifts[1]).abs() > tolerance * size).any())


def compare_eps(both: BothParts[NormStep]) -> PartDifference | None:
    """Return the difference of the eps values; None if they agree to the precision with which they are known.

    It is also None for "l2" against another kind: its eps is added to a length, the others' to a mean square.
    """
    # The eps of "l2" is added to a length, that of "rms" to a mean square: their numbers can't be compared.
    a, b = both.a, both.b
    other_unit = (a.kind == "l2") != (b.kind == "l2")
    if other_unit or abs(a.eps - b.eps) <= READER_TOLERANCE * max(a.eps, b.eps):
        return None
    return PartDifference(*few_digits(a.eps, b.eps))


def compare_norm_axis(both: BothParts[NormStep]) -> PartDifference | None:
    """Return the difference if one norm is over the features of a head, the other over all heads; else None."""
    old, new = (Message(f"causes.qk_norm_axis.{norm.over}") for norm in (both.a, both.b))
    return None if both.a.over == both.b.over else PartDifference(old, new)


# -- all norms of q or k -----------------------------------------------------------------------------------------------


def compare_norm_count(both: BothParts[VectorPath]) -> PartDifference | None:
    """Return the difference if one side has more norms of the vector; None if both have equally many.

    `a` and `b` are the kind of the first extra norm on the side that has it. The edit removes A's extra norms or adds
    B's.
    """
    a, b, other = norms_of(both.a), norms_of(both.b), both.b
    if len(a) > len(b):
        return PartDifference(NORM_WORDS[a[len(b)].kind], Message(NO_VALUE), edit=lambda own: _first(own, len(b)))
    if len(b) > len(a):
        return PartDifference(
            Message(NO_VALUE), NORM_WORDS[b[len(a)].kind], edit=lambda own: _with_norms_of(own, other, len(a))
        )
    return None


def _first(old: VectorPath, count: int) -> VectorPath:
    """Return the path with only its first `count` norms."""
    gone = norms_of(old)[count:]
    return replace(old, steps=tuple(step for step in old.steps if not any(step is one for one in gone)))


def _with_norms_of(old: VectorPath, other: VectorPath, have: int) -> VectorPath:
    """Return the path with the norms of `other` from number `have` on, on the same side of the rotation as there."""
    before, rest = norms_before_rotation(other), norms_of(other)[have:]
    early = rest if before is None else rest[: max(0, before - have)]
    steps = list(_first(old, have).steps)
    at = next((i for i, step in enumerate(steps) if isinstance(step, Rotation)), len(steps))
    return replace(old, steps=(*steps[:at], *early, *steps[at:], *rest[len(early) :]))


def compare_norm_order(both: BothParts[VectorPath]) -> PartDifference | None:
    """Return the difference if norms stand before the rotation on one side and after it on the other; else None.

    It is also None if the order doesn't matter: without a mean or shift, if a pair of channels shares its gain.
    """
    early, wanted, own = norms_before_rotation(both.a), norms_before_rotation(both.b), norms_of(both.a)
    if early is None or wanted is None or early == wanted or len(own) != len(norms_of(both.b)):
        return None
    if all(_commutes(norm, rotation_of(both.a)) for norm in own[min(early, wanted) : max(early, wanted)]):
        return None
    before, after = Message("causes.qk_norm_order.before"), Message("causes.qk_norm_order.after")
    a, b, text = after, before, "causes.qk_norm_order.early"
    if early > wanted:
        a, b, text = before, after, "causes.qk_norm_order.late"
    return PartDifference(a, b, edit=lambda old: _with_early(old, wanted), text=text)


def norms_before_rotation(path: VectorPath) -> int | None:
    """Return the number of norms before the rotation on a path; None if the path has no rotation."""
    if rotation_of(path) is None:
        return None
    at = next(i for i, step in enumerate(path.steps) if isinstance(step, Rotation))
    return sum(isinstance(step, NormStep) for step in path.steps[:at])


def _commutes(norm: NormStep, turned: Rotation | None) -> bool:
    """Return whether the order of norm and rotation doesn't matter: lengths stay, and pairs share a gain."""
    if turned is None:
        return True
    if norm.kind == "layer" or norm.shift is not None or not bool((turned.table.abs() - 1).abs().max() < 1e-6):
        return False
    # norm(rope(x)) equals rope(norm(x)) if both channels of each pair have the same gain
    gain = norm.gain[..., turned.first : turned.first + turned.width]
    one_gain = gain.shape[-1] != turned.width  # one gain for all channels
    return one_gain or bool(torch.isclose(*halves(gain, turned.layout), rtol=1e-6, atol=0).all())


def _with_early(old: VectorPath, count: int) -> VectorPath:
    """Return the path with `count` of its norms before the rotation and the rest after; other steps stay in place."""
    if rotation_of(old) is None:
        return old
    own = norms_of(old)
    rest = [step for step in old.steps if not isinstance(step, NormStep)]
    at = next(i for i, step in enumerate(rest) if isinstance(step, Rotation))
    return replace(old, steps=(*own[:count], *rest[: at + 1], *own[count:], *rest[at + 1 :]))
