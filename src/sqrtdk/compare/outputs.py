"""What the two models return: every floating tensor of it, by a dotted name, compared by a rounding that is measured.

A difference is given as a share of the size of A's tensor, by the root mean square of all entries; where only single
entries are off, by the largest entry of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sqrtdk.compare.measured import FEW, Blind, Both, Size, as_rounding, errors_of, judged, padding_of, rows_of
from sqrtdk.compare.precision import unit
from sqrtdk.compare.records import OutputDiff
from sqrtdk.compare.sides import Exact, Side

MOST_NAMES = 4  # in a sentence


@dataclass(frozen=True, slots=True, eq=False)
class Paired:
    """The outputs of both sides.

    Attributes:
        both: those that are compared.
        missing: why there are none.
        unlike: those of one name and two shapes.
        notes: sentences on those that one side alone returns.
    """

    both: tuple[Both, ...] = ()
    missing: str = ""
    unlike: tuple[OutputDiff, ...] = ()
    notes: tuple[str, ...] = ()


def pair_outputs(a: Side, b: Side, blind: Blind) -> Paired:
    """The outputs that both sides have.

    They belong together by name; of those that are left, the first of each side, where they have one shape: a model of
    transformers returns `logits`, its port a tensor. The place in a tuple is a name where both have the same places.

    Args:
        a: A.
        b: B.
        blind: rows that see no key on one side.
    """
    for letter, side in (("A", a), ("B", b)):
        if side.outputs is None:
            return Paired(missing=f"{letter} is a {side.info.kind}")
        if not side.outputs:
            return Paired(missing=f"{letter} returns no floating tensor")
    one, other = a.outputs or {}, b.outputs or {}
    names = {name: name for name in one if name in other and one[name].shape == other[name].shape}
    left = [next((name for name in side if name not in names), "") for side in (one, other)]
    if all(left) and next(iter(one)) == left[0] and one[left[0]].shape == other[left[1]].shape:
        names[left[0]] = left[1]
    dtypes = [getattr(torch, side.info.dtype, None) for side in (a, b)]
    paired = []
    for name in one:
        if name in names:
            x, y = one[name].cpu(), other[names[name]].cpu()
            units = [max(unit(own or z.dtype), unit(z.dtype)) for own, z in zip(dtypes, (x, y), strict=True)]
            paired.append(Both(name, names[name], x, y, rows_of(x.shape, blind), (units[0], units[1])))
    taken = {*names.values()}
    shared = [name for name in one if name in other and name not in names and name not in taken]
    unlike = [name for name in shared if not name.isdecimal() or set(one) == set(other)]
    if not names and not unlike:
        shapes = [tuple(next(iter(side.values())).shape) for side in (one, other)]
        return Paired(missing=f"A returns {shapes[0]}, B {shapes[1]}")
    reasons = {name: f"A returns {tuple(one[name].shape)}, B {tuple(other[name].shape)}" for name in unlike}
    alone = ("A", [name for name in one if name not in names]), ("B", [name for name in other if name not in taken])
    notes = [_alone(letter, [name for name in lost if name not in unlike]) for letter, lost in alone]
    notes += [
        f"rows of padding are left out of what the models return: {int(hidden.sum())} of {hidden.numel()}"
        for hidden in padding_of(a, b).values()
        if any(both.rows is not None for both in paired)
    ]
    differ = tuple(OutputDiff(name, False, None, None, reason) for name, reason in reasons.items())
    return Paired(tuple(paired), unlike=differ, notes=tuple(filter(None, notes)))


def _alone(letter: str, names: Sequence[str]) -> str:
    """A note on the outputs that one side alone returns; "" where there are none."""
    listed = [f"`{name}`" for name in names[:MOST_NAMES]]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return f"{letter} alone returns {', '.join(listed + more)}: not compared" if names else ""


def compare_outputs(
    paired: Sequence[Both], exact: Sequence[Exact | None] | None, attentions: int
) -> tuple[OutputDiff, ...]:
    """Compare every output.

    Args:
        paired: by `pair_outputs`.
        exact: both in float64, as far as they ran so; None where one rounding explains every difference.
        attentions: how many come before.
    """
    errors = []
    for both in paired:
        names = (both.name, both.name_b)
        known = [None if one is None else one.outputs.get(name) for one, name in zip(exact or (), names, strict=False)]
        errors.append(errors_of(both, known or None))
    least = [_largest_share(paired, errors, side) for side in (0, 1)]
    return tuple(_told(both, own, attentions, least) for both, own in zip(paired, errors, strict=True))


def _largest_share(paired: Sequence[Both], errors: Sequence[Sequence[Size | None]], side: int) -> float:
    """The largest rounding of a side, as a share of the size, over its outputs of many entries."""
    shares = [0.0]
    for both, measured in zip(paired, errors, strict=True):
        error, size = as_rounding(both, measured)[side], both.sizes[side][0]
        if error is not None and both.a.numel() >= FEW and 0.0 < size < math.inf and math.isfinite(error[0]):
            shares.append(error[0] / size)
    return max(shares)


def _told(both: Both, errors: Sequence[Size | None], attentions: int, least: Sequence[float]) -> OutputDiff:
    verdict = judged(both, errors, attentions, least)
    if verdict.same is None and verdict.reason is None:
        return OutputDiff(both.name, None, None, None)
    difference, allowed = (x / verdict.size if verdict.size else 0.0 for x in (verdict.gap, verdict.allowed))
    return OutputDiff(
        both.name,
        verdict.same,
        math.inf if math.isinf(verdict.gap) else difference,
        allowed if math.isfinite(allowed) else None,
        verdict.reason,
    )
