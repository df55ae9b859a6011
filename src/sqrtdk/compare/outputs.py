"""What the two models return: every floating tensor of it, by a dotted name, compared within the rounding of both.

The rounding is measured as for what enters the attentions (`sqrtdk.compare.entering`): each side runs once more in
float64. A difference is given as a share of the size of A's tensor, by the root mean square of all entries; where only
single entries are off, by the largest entry of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sqrtdk.compare.entering import SLACK, Blind, apart, as_rounding, padding_of, rows_of
from sqrtdk.compare.numbers import difference
from sqrtdk.compare.precision import unit
from sqrtdk.compare.records import OutputDiff
from sqrtdk.compare.sides import Exact, Side

_HIDING = 1e30  # and beyond: no number that a model computes with
MOST_NAMES = 4  # in a sentence
_FEW = 64  # entries: an error that was measured on fewer may be small by luck
Measured = tuple[float, float]  # root mean square, largest entry


@dataclass(frozen=True, slots=True, eq=False)
class Both:
    """One output of both sides.

    Attributes:
        name: A's.
        name_b: B's.
        a: A's tensor.
        b: B's, on A's device.
        rows: True for the entries that count, of the tensor's shape; None for all.
        known: sizes that were measured, by what they are of: tensors as large as logits are asked for several times.
    """

    name: str
    name_b: str
    a: Tensor
    b: Tensor
    rows: Tensor | None = None
    known: dict[str, Measured] = field(default_factory=dict)

    def size(self, values: Tensor) -> Measured:
        """Size of the entries of A's or B's tensor that count; what hides an entry (-inf, finfo.min) is none."""
        side = "a" if values is self.a else "b"
        if side not in self.known:
            if not (values.numel() and float(values.abs().max()) < _HIDING):
                values = torch.where(values.double().abs() < _HIDING, values.double(), 0.0)
            self.known[side] = self._measured(values)
        return self.known[side]

    def gap(self) -> Measured:
        """Size of the difference; equal infinities, and NaN on both sides, are none."""
        if "gap" not in self.known:
            equal = torch.equal(self.a, self.b)
            self.known["gap"] = (0.0, 0.0) if equal else self._measured(difference(self.a.double(), self.b.double()))
        return self.known["gap"]

    def nan(self) -> bool:
        """Whether both have NaN at an entry that counts."""
        both = self.a.isnan() & self.b.isnan()
        return bool((both if self.rows is None else both[self.rows]).any())

    def _measured(self, values: Tensor) -> Measured:
        if self.rows is not None:
            values = values[self.rows]
        if not values.numel():
            return (0.0, 0.0)
        return float(values.double().square().mean().sqrt()), float(values.abs().max())


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
    paired = []
    for name in one:
        if name in names:
            x, y = one[name].cpu(), other[names[name]].cpu()
            paired.append(Both(name, names[name], x, y, rows_of(x.shape, blind)))
    taken = {*names.values()}
    shared = [name for name in one if name in other and name not in names and name not in taken]
    unlike = [name for name in shared if not name.isdecimal() or set(one) == set(other)]
    differ = tuple(_unlike(name, one[name], other[name]) for name in unlike)
    if not names and not unlike:
        shapes = [tuple(next(iter(side.values())).shape) for side in (one, other)]
        return Paired(missing=f"A returns {shapes[0]}, B {shapes[1]}")
    alone = ("A", [name for name in one if name not in names]), ("B", [name for name in other if name not in taken])
    notes = [_alone(letter, [name for name in lost if name not in unlike]) for letter, lost in alone]
    notes += [
        f"rows of padding are left out of what the models return: {int(hidden.sum())} of {hidden.numel()}"
        for hidden in padding_of(a, b).values()
        if any(both.rows is not None for both in paired)
    ]
    return Paired(tuple(paired), unlike=differ, notes=tuple(filter(None, notes)))


def _unlike(name: str, a: Tensor, b: Tensor) -> OutputDiff:
    return OutputDiff(name, False, None, None, f"A returns {tuple(a.shape)}, B {tuple(b.shape)}")


def _alone(letter: str, names: Sequence[str]) -> str:
    """A note on the outputs that one side alone returns; "" where there are none."""
    listed = [f"`{name}`" for name in names[:MOST_NAMES]]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return f"{letter} alone returns {', '.join(listed + more)}: not compared" if names else ""


def units_of(both: Both, a: Side, b: Side) -> list[float]:
    """The relative rounding of each side at an output: of its attentions' dtype, or of the output's own."""
    pairs = ((a, both.a), (b, both.b))
    return [max(unit(getattr(torch, side.info.dtype, x.dtype)), unit(x.dtype)) for side, x in pairs]


def compare_outputs(
    paired: Sequence[Both], a: Side, b: Side, exact: Sequence[Exact | None] | None
) -> tuple[OutputDiff, ...]:
    """Compare every output.

    Args:
        paired: by `pair_outputs`.
        a: A.
        b: B.
        exact: both in float64, as far as they ran so; None where one rounding explains every difference.
    """
    errors = [_errors(both, exact, units_of(both, a, b)) for both in paired]
    known = [_known(both, own) for both, own in zip(paired, errors, strict=True)]
    least = [_largest_share(paired, [pair[side] for pair in known], side) for side in (0, 1)]
    return tuple(
        _judged(both, units_of(both, a, b), measured, own, least, len(a.calls))
        for both, measured, own in zip(paired, errors, known, strict=True)
    )


def _errors(both: Both, exact: Sequence[Exact | None] | None, units: Sequence[float]) -> list[Measured | None]:
    """How far each side is from itself in float64, one rounding at least."""
    found: list[Measured | None] = []
    if exact is None:
        sizes = [both.size(x) for x in (both.a, both.b)]
        return [(by * size[0], by * size[1]) for by, size in zip(units, sizes, strict=True)]
    for x, name, one, by in zip((both.a, both.b), (both.name, both.name_b), exact, units, strict=True):
        reference = None if one is None else one.outputs.get(name)
        if reference is None or reference.shape != x.shape:
            found.append(None)
            continue
        size, off = both.size(x), Both("", "", x, reference.cpu(), both.rows).gap()
        found.append((max(off[0], by * size[0]), max(off[1], by * size[1])))
    return found


def _known(both: Both, errors: Sequence[Measured | None]) -> list[Measured | None]:
    """The errors that are rounding: noise that a model draws is another in float64, and no rounding."""
    sizes = [both.size(x)[0] for x in (both.a, both.b)]
    return [
        None if error is None or as_rounding(error[0], size) is None else error
        for error, size in zip(errors, sizes, strict=True)
    ]


def _largest_share(paired: Sequence[Both], errors: Sequence[Measured | None], side: int) -> float:
    """The largest error of a side, as a share of the size, over its outputs of many entries."""
    shares = [0.0]
    for both, error in zip(paired, errors, strict=True):
        x = both.b if side else both.a
        size = both.size(x)[0]
        if error is not None and x.numel() >= _FEW and 0.0 < size < math.inf and math.isfinite(error[0]):
            shares.append(error[0] / size)
    return max(shares)


def _judged(
    both: Both,
    units: Sequence[float],
    measured: Sequence[Measured | None],
    known: Sequence[Measured | None],
    least: Sequence[float],
    attentions: int,
) -> OutputDiff:
    """One output; it differs for certain where it would even if all that float64 changes were rounding."""
    found = _compared(both, units, known, least, attentions)
    other = [
        letter for letter, error, own in zip("AB", measured, known, strict=True) if error is not None and own is None
    ]
    if found.same is not False or not other or not math.isfinite(found.difference or 0.0):
        return found
    if _compared(both, units, measured, least, attentions).same is False:
        return found
    who = "A and B" if len(other) > 1 else other[0]
    return OutputDiff(found.name, None, found.difference, None, f"the float64 run of {who} is another computation")


def _compared(
    both: Both, units: Sequence[float], errors: Sequence[Measured | None], least: Sequence[float], attentions: int
) -> OutputDiff:
    gap, sizes = both.gap(), [both.size(x) for x in (both.a, both.b)]
    shown: list[tuple[float, float]] = []
    for measure in (0, 1):
        size = sizes[0][measure] or sizes[1][measure]
        own = [None if error is None else error[measure] for error in errors]
        if both.a.numel() < _FEW:
            floors = [share * of[measure] for share, of in zip(least, sizes, strict=True)]
            own = [None if x is None else max(x, floor) for x, floor in zip(own, floors, strict=True)]
        allowed = apart(own, units, size, attentions + 1)
        shown.append((gap[measure] / size if size else 0.0, allowed / size if size else 0.0))
    off = [not gap[measure] <= shown[measure][1] * (sizes[0][measure] or sizes[1][measure]) for measure in (0, 1)]
    difference, allowed = shown[1] if off[1] and not off[0] else shown[0]
    if not math.isfinite(gap[1]):
        return OutputDiff(both.name, False, math.inf, allowed if math.isfinite(allowed) else None)
    if both.nan() and not any(off):
        return OutputDiff(both.name, None, None, None)
    return OutputDiff(both.name, not any(off), difference, allowed if math.isfinite(allowed) else None)


def is_apart(paired: Sequence[Both], a: Side, b: Side, roundings: float = SLACK) -> bool:
    """Whether an output is off by more than a few roundings, the least that is ever allowed."""
    for both in paired:
        gap, size, by = both.gap(), both.size(both.a), math.hypot(*units_of(both, a, b))
        if any(not gap[measure] <= roundings * by * size[measure] for measure in (0, 1)):
            return True
    return False
