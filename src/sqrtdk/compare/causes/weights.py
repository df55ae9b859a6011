"""`weights`: a parameter is not the same: the rows of the projection of q, k or v, or the gain of a norm.

Weights that are each other's rounding are the same. Rows in another order are `head_order`, a bias is
`projection_bias`, a norm that one side has not `qk_norm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from sqrtdk.compare.causes._norms import equivalent, features_of, other_kind, pairs
from sqrtdk.compare.causes._parts import (
    LETTERS,
    QK,
    QKV,
    Edit,
    Finding,
    apart,
    edits,
    joined,
    listed,
    norms,
    number,
    slack,
    way,
    with_norm,
)
from sqrtdk.compare.causes._rows import flat, moved, same
from sqrtdk.compare.numbers import told_apart
from sqrtdk.compare.program import Affine, Norm, Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "weights"
OFF_BY_ONE = {1.0: "A's + 1", -1.0: "A's - 1"}  # a gain that is stored as its distance from 1


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """Other projections, then other gains."""
    yield from _projections(sides)
    yield from joined(NAME, "norm", _gains(sides))


def _projections(sides: Sides) -> Iterator[Suspicion]:
    """One suspicion for each parameter, as a fused one is that of three parts."""
    parts: dict[str, list[tuple[str, Affine, Affine]]] = {}
    orders: dict[str, Tensor] | None = None
    for part in QKV:
        a, b = way(sides.a, part).affine, way(sides.b, part).affine
        if a is None or b is None or a.weight.shape != b.weight.shape or bool(same(flat(a), flat(b)).all()):
            continue
        orders = moved(sides) if orders is None else orders
        if part not in orders:
            parts.setdefault(b.name or a.name or part, []).append((part, a, b))
    for name, differing in parts.items():
        first, a, b = differing[0]
        letters = listed([LETTERS[part] for part, _, _ in differing])
        text = f"has another weight for {letters}" + (f", {name}" if name not in QKV else "") + f": {_distance(a, b)}"
        change = edits([(part, _with_weight(other.weight)) for part, _, other in differing])
        yield Suspicion(NAME, first, a.name or None, b.name or None, change, text)


def _with_weight(weight: Tensor) -> Edit:
    def other(old: Way) -> Way:
        return old if old.affine is None else replace(old, affine=replace(old.affine, weight=weight))

    return other


def _distance(a: Affine, b: Affine) -> str:
    """How far apart, in words: a factor, some rows, or all."""
    mine, wanted = flat(a), flat(b)
    factor = float((mine * wanted).sum() / (mine * mine).sum().clamp_min(1e-300))
    if bool(same(mine * factor, wanted).all()):
        return f"{told_apart(1.0, factor)[1]} times A's"
    differ = int((~same(mine, wanted)).sum())
    relative = float((mine - wanted).norm() / mine.norm().clamp_min(1e-300))
    return f"{differ} of {len(mine)} rows differ, by {number(relative):g} of its size in all"


def _gains(sides: Sides) -> Iterator[Finding]:
    for part in QK:
        for place, a, b in pairs(sides, part):
            if equivalent(a, b, features_of(a, sides, part), slack(sides)) or not _differ(a, b, slack(sides)):
                continue
            if other_kind(a, b, features_of(a, sides, part), slack(sides)) is not None:
                continue
            gain, shift = b.gain, b.shift

            def other(old: Way, place: int = place, gain: Tensor = gain, shift: Tensor | None = shift) -> Way:
                own = norms(old)
                return with_norm(old, place, replace(own[place], gain=gain, shift=shift)) if place < len(own) else old

            told = _gain_words(a, b, slack(sides))
            words = ("gain", told) if told in OFF_BY_ONE.values() else (_spread(a.gain), _spread(b.gain))
            yield Finding(part, *words, f"has another gain in the norm of {{}}: {told}", other)
            break


def _differ(a: Norm, b: Norm, tolerance: float) -> bool:
    if apart(a.gain, b.gain, tolerance):
        return True
    if a.shift is None and b.shift is None:
        return False
    shifts = [x.gain * 0 if x.shift is None else x.shift for x in (a, b)]
    size = float(a.gain.abs().max())
    return bool(((shifts[0] - shifts[1]).abs() > tolerance * max(size, float(shifts[0].abs().max()))).any())


def _gain_words(a: Norm, b: Norm, tolerance: float) -> str:
    for plus, words in OFF_BY_ONE.items():
        if not apart(a.gain + plus, b.gain, tolerance):
            return words
    if not apart(a.gain, b.gain, tolerance):
        return "its shift differs"
    return f"{_spread(b.gain)} instead of {_spread(a.gain)}"


def _spread(gain: Tensor) -> str:
    least, most = number(float(gain.min())), number(float(gain.max()))
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"
