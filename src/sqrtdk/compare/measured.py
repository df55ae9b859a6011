"""Whether a tensor that both models have is the same on both sides, by a rounding that is measured.

What lies between two attentions is whatever the model has there, so no formula tells how much rounding may have piled
up. It is measured: each side that is a module runs once more in float64 (a model in half precision that can't, in
float32), and what its own tensor differs from that by is its rounding. Two tensors are the same where they differ by no
more than `SLACK` times the roundings of both together. Where a side can't be run so, its rounding is taken to be the
other's, by the ratio of their dtypes.

So are compared what comes into every attention, and what the models return (`sqrtdk.compare.outputs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sqrtdk.compare.align import name_of
from sqrtdk.compare.numbers import difference
from sqrtdk.compare.pair import Judged
from sqrtdk.compare.precision import unit
from sqrtdk.compare.records import Cause, StageDiff
from sqrtdk.compare.sides import Exact, Side, entering_of
from sqrtdk.compare.words import short
from sqrtdk.errors import SqrtdkError
from sqrtdk.tracing.tensors import CallTensors

Blind = dict[tuple[int, int], Tensor]  # (B, L) by B and L, True where the row sees no key on one side, or is padding
Size = tuple[float, float]  # root mean square, largest entry
FAILED = (SqrtdkError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
SLACK = 4.0  # two draws of roundings of one size, and what the order of operations makes of it
# Roundings of the dtype, times the root of the number of attentions before, where nothing is measured.
UNMEASURED = 16.0
_ANOTHER = 0.1  # of the size, and beyond: a run in float64 that is off by so much computes something else
_HIDING = 1e30  # and beyond: no number that a model computes with
FEW = 64  # entries: an error that was measured on fewer may be small by luck


@dataclass(frozen=True, eq=False)
class Both:
    """One tensor of both sides.

    Attributes:
        rows: True for the entries that count, of the tensor's shape; None for all.
        units: the relative rounding of each side.
    """

    name: str
    name_b: str
    a: Tensor
    b: Tensor
    rows: Tensor | None
    units: tuple[float, float]

    def size(self, values: Tensor) -> Size:
        """Size of the entries that count; what hides an entry (-inf, finfo.min) is none."""
        if not (values.numel() and float(values.abs().max()) < _HIDING):
            values = torch.where(values.double().abs() < _HIDING, values.double(), 0.0)
        return self._measured(values)

    def between(self, a: Tensor, b: Tensor) -> Size:
        """Size of a difference; equal infinities, and NaN twice, are none."""
        return (0.0, 0.0) if torch.equal(a, b) else self._measured(difference(a.double(), b.double()))

    @cached_property
    def gap(self) -> Size:
        """Size of the difference of both sides."""
        return self.between(self.a, self.b)

    @cached_property
    def sizes(self) -> tuple[Size, Size]:
        """Of A's and of B's tensor."""
        return self.size(self.a), self.size(self.b)

    def nan(self) -> bool:
        """Whether both have NaN at an entry that counts."""
        both = self.a.isnan() & self.b.isnan()
        return bool((both if self.rows is None else both[self.rows]).any())

    def is_apart(self, roundings: float = SLACK) -> bool:
        """Whether it is off by more than a few roundings, the least that is ever allowed."""
        gap, size, by = self.gap, self.sizes[0], math.hypot(*self.units)
        return any(not off <= roundings * by * of for off, of in zip(gap, size, strict=True))

    def _measured(self, values: Tensor) -> Size:
        if self.rows is not None:
            values = values[self.rows]
        if not values.numel():
            return (0.0, 0.0)
        return float(values.double().square().mean().sqrt()), float(values.abs().max())


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a tensor is the same; None where that can't be told, by `reason`, or as both sides have NaN.

    `gap` and `allowed` are by the root mean square, or by the largest entry where only single entries are off; `size`
    is that of A's tensor by the same measure.
    """

    same: bool | None
    gap: float
    allowed: float
    size: float
    reason: str | None = None


def errors_of(both: Both, references: Sequence[Tensor | None] | None) -> list[Size | None]:
    """How far each side is from itself in float64, one rounding at least.

    `references` are the tensor of each side in float64; None where one rounding explains every difference.
    """
    found: list[Size | None] = []
    for side, (x, size, by) in enumerate(zip((both.a, both.b), both.sizes, both.units, strict=True)):
        least = by * size[0], by * size[1]
        reference = None if references is None else references[side]
        if reference is not None and reference.shape == x.shape:
            off = both.between(x, reference.to(x.device))
            found.append((max(off[0], least[0]), max(off[1], least[1])))
        else:
            found.append(least if references is None else None)
    return found


def as_rounding(both: Both, errors: Sequence[Size | None]) -> list[Size | None]:
    """The errors that are rounding: noise that a model draws is another in float64, and no rounding."""
    sizes = both.sizes
    return [
        None if error is None or not error[0] <= _ANOTHER * size[0] else error
        for error, size in zip(errors, sizes, strict=True)
    ]


def judged(
    both: Both, measured: Sequence[Size | None], before: int, least: Sequence[float] = (0.0, 0.0), single: bool = True
) -> Verdict:
    """Judge one tensor; it differs for certain where it would even if all that float64 changes were rounding.

    Args:
        both: the tensor.
        measured: by `errors_of`.
        before: how many attentions come before it.
        least: of each side the least error, as a share of the size, that is allowed to a tensor of few entries.
        single: single entries that are off count too.
    """
    known = as_rounding(both, measured)
    verdict = _compared(both, known, before, least, single)
    others = [side for side, error, own in zip("AB", measured, known, strict=True) if error is not None and own is None]
    if verdict.same is not False or not others or not math.isfinite(verdict.gap):
        return verdict
    if _compared(both, measured, before, least, single).same is False:
        return verdict
    reason = f"the float64 run of {' and '.join(others)} is another computation"
    return Verdict(None, verdict.gap, math.inf, verdict.size, reason)


def _compared(both: Both, errors: Sequence[Size | None], before: int, least: Sequence[float], single: bool) -> Verdict:
    gap, sizes = both.gap, both.sizes
    allowed = [_allowed(both, errors, measure, before, least) for measure in (0, 1)]
    off = [not gap[measure] <= allowed[measure] for measure in (0, 1)]
    measure = 1 if single and off[1] and not off[0] else 0
    size = sizes[0][measure] or sizes[1][measure]
    if not math.isfinite(gap[1]):
        return Verdict(False, math.inf, allowed[measure], size)
    same = None if both.nan() and not off[measure] else not off[measure]
    return Verdict(same, gap[measure], allowed[measure], size)


def _allowed(both: Both, errors: Sequence[Size | None], measure: int, before: int, least: Sequence[float]) -> float:
    """How far apart two tensors may be by the rounding of both sides; one that is not known is as the other's."""
    sizes = [size[measure] for size in both.sizes]
    own = [None if error is None else error[measure] for error in errors]
    if both.a.numel() < FEW:
        own = [None if x is None else max(x, share * of) for x, share, of in zip(own, least, sizes, strict=True)]
    known = [(error, by) for error, by in zip(own, both.units, strict=True) if error is not None]
    if not known:
        return UNMEASURED * max(both.units) * math.sqrt(before + 1) * (sizes[0] or sizes[1])
    error, of = known[0]
    own = [error * max(1.0, by / of) if x is None else x for x, by in zip(own, both.units, strict=True)]
    return SLACK * math.hypot(*filter(None, own))


def exact_of(side: Side, listen: bool = False) -> Exact | None:
    """A side in float64, with what its modules took and gave where that is asked for; None where it can't run so."""
    if side.again is None or (side.exact is not None and (side.exact.listened or not listen)):
        return side.exact
    side.forwards += 1
    try:
        side.exact = side.again(listen, None)
    except FAILED:
        side.again = None  # it has operations, or a copy of it, that know no float64
    return side.exact


# -- rows that do not count --------------------------------------------------------------------------------------------


def padding_of(a: Side, b: Side) -> Blind:
    """The rows that are padding: a model may do with them what it likes, as return zeros.

    Where an encoder and a decoder have rows of one size, those that are padding of both.
    """
    padding: Blind = {}
    for side in (a, b):
        own: Blind = {}
        for mask in side.tokens.masks.values():
            if mask.dim() == 2:
                rows, hidden = (mask.shape[0], mask.shape[1]), ~mask.bool().cpu()
                own[rows] = own.get(rows, hidden) & hidden
        for rows, hidden in own.items():
            padding[rows] = padding.get(rows, hidden) | hidden
    return {rows: hidden for rows, hidden in padding.items() if bool(hidden.any())}


def blind_rows(a: Side, b: Side, pairs: Sequence[Judged]) -> Blind:
    """The rows that see no key in some pair, and those of padding: they may hold anything, and carry it on."""
    blind = padding_of(a, b)
    for own in pairs:
        if own.rows is not None and own.sides is not None and own.sides.self_attention:
            hidden, sizes = ~own.rows.cpu(), (own.rows.shape[0], own.rows.shape[1])
            blind[sizes] = blind.get(sizes, hidden) | hidden
    return blind


def rows_of(shape: torch.Size, blind: Blind, *, cache: bool = False) -> Tensor | None:
    """True for the entries of a tensor that are of rows which see a key; None where all are.

    Rows are the second axis (B, L, D), the third of one with heads (B, H, L, E), or the first of rows without a batch.
    A `cache` of a sliding window holds the last rows alone, (B, H, W, E).
    """
    for (batch, length), hidden in blind.items():
        if not bool(hidden.any()):
            continue
        rows = ~hidden.cpu()
        if len(shape) > 1 and shape[:2] == (batch, length):
            return rows.view(batch, length, *[1] * (len(shape) - 2)).expand(shape)
        if len(shape) == 4 and shape[0] == batch and (shape[2] == length or (cache and shape[2] < length)):
            return rows[:, None, length - shape[2] :, None].expand(shape)
        if len(shape) > 1 and shape[0] == batch * length:
            return rows.view(batch * length, *[1] * (len(shape) - 1)).expand(shape)
    return None


# -- what comes into an attention --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entering:
    """What comes into one pair.

    Attributes:
        stage: for the record; `stage.same` is None where it is not known.
        sizes: of A's and of B's tensor, where they differ.
        by_v: it is told from v, as the input itself is not recorded on both sides.
    """

    stage: StageDiff
    sizes: tuple[float, float] = (0.0, 0.0)
    by_v: bool = False

    def cause(self, where: str = "") -> Cause | None:
        """That it differs, and where the models begin to; None where it does not, or is not known to."""
        if self.stage.same is not False:
            return None
        a, b = self.sizes
        share, most = ((x or 0.0) / b if b else math.inf for x in (self.stage.largest, self.stage.allowed))
        what = "gets another input, or projects v otherwise" if self.by_v else "gets another input"
        what += f": the first difference is in {where}" if where else ""
        text = f"{what} (off by {short(share)} of its size, rounding allows {short(most)})"
        return Cause("input", a, b, 1.0, text, "input")


def compare_inputs(
    a: Side, b: Side, calls: Sequence[tuple[CallTensors, CallTensors]], blind: Blind, listen: bool = False
) -> list[Entering]:
    """Compare what comes into every pair; with `listen` a run in float64 keeps what the modules take and give."""
    every = [_both(one, other, blind) for one, other in calls]
    exact = None
    if any(both is not None and both.is_apart() for both in every):
        exact = [exact_of(side, listen) for side in (a, b)]
    found = []
    for number, (both, pair) in enumerate(zip(every, calls, strict=True)):
        if both is None:
            found.append(Entering(StageDiff("input", None, reason="not recorded, or of other shapes")))
            continue
        known = [_reference(one, call, both) for one, call in zip(exact or (), pair, strict=False)]
        verdict, by_v = judged(both, errors_of(both, known or None), number, single=False), both.name != "input"
        if verdict.same is None:
            lost = verdict.reason or "not finite on both sides"
            found.append(Entering(StageDiff("input", None, verdict.gap if verdict.reason else None, reason=lost)))
            continue
        reason = "told from v: the input itself is not recorded on both sides" if by_v else None
        stage = StageDiff("input", verdict.same, verdict.gap, verdict.allowed, reason=reason)
        found.append(Entering(stage, (both.sizes[0][0], both.sizes[1][0]), by_v))
    return found


def _both(a: CallTensors, b: CallTensors, blind: Blind) -> Both | None:
    """What comes into a pair, of the first kind that both sides have."""
    one, other = ({} if call.missing is not None else entering_of(call) for call in (a, b))
    for kind, x in one.items():
        y = other.get(kind)
        if y is not None and x.shape == y.shape:
            x, y = (_by_rows(tensor) for tensor in (x, y))
            units = [unit(getattr(torch, call.dtype, torch.float32)) for call in (a, b)]
            return Both(kind, kind, x, y, rows_of(x.shape, blind), (units[0], units[1]))
    return None


def _by_rows(tensor: Tensor) -> Tensor:
    """(B, L, D) or (B, L, H, E): v has its heads before its rows."""
    return (tensor.transpose(1, 2) if tensor.dim() == 4 else tensor).cpu()


def _reference(exact: Exact | None, call: CallTensors, both: Both) -> Tensor | None:
    known = None if exact is None else exact.inputs.get(name_of(call), {}).get(both.name)
    return None if known is None else _by_rows(known)
