"""Decides whether a tensor of both models is the same, by measured rounding.

Between two attentions a model may compute anything, so no formula tells how much rounding has accumulated. It is
measured instead: each side that is a module runs again in float64 (a half-precision model that can't, in float32). Its
own tensor's difference from that run is its rounding. Two tensors are the same if they differ by at most
`ROUNDING_SLACK` times the roundings of both together. If a side can't run so, its rounding is taken from the other
side's, by the ratio of their dtypes.

Inputs of attentions and outputs of models (`sqrtdk.compare.outside.outputs`) are compared this way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sqrtdk.compare.align import name_of
from sqrtdk.compare.inside.pair import JudgedPair
from sqrtdk.compare.numbers import entry_differences
from sqrtdk.compare.records import Cause, StageDiff
from sqrtdk.compare.rounding.precision import rounding_unit
from sqrtdk.compare.sides import FinerRun, ModelSide, entering_of
from sqrtdk.compare.words import short
from sqrtdk.errors import MODEL_ERRORS
from sqrtdk.messages import Message
from sqrtdk.tracing.tensors import CallTensors

BlindRows = dict[tuple[int, int], Tensor]  # by (B, L): True at rows that see no key on one side, or that are padding
TensorSize = tuple[float, float]  # root mean square, largest entry
ROUNDING_SLACK = 4.0  # covers two draws of equal roundings, and another order of operations
# roundings of the dtype, times the root of the number of earlier attentions, if nothing was measured
UNMEASURED_ROUNDINGS = 16.0
_ANOTHER_COMPUTATION = 0.1  # share of the size: a float64 run that is off by more computes something else
_HIDING_NUMBER = 1e30  # models don't compute with numbers beyond this; they only hide entries
FEW_ENTRIES = 64  # entries: an error measured on fewer may be small by luck


@dataclass(frozen=True, eq=False)
class TensorOfBoth:
    """One tensor of both sides.

    Attributes:
        rows: True at entries that count, in the tensor's shape; None for all.
        units: relative rounding of each side.
    """

    name: str
    name_b: str
    a: Tensor
    b: Tensor
    rows: Tensor | None
    units: tuple[float, float]

    def size(self, values: Tensor) -> TensorSize:
        """Return (root mean square, largest absolute value) of the entries of `values` that count.

        Entries of absolute value 1e30 or more (-inf, finfo.min) and NaN are taken as 0: they only hide something.
        """
        if not (values.numel() and float(values.abs().max()) < _HIDING_NUMBER):
            values = torch.where(values.double().abs() < _HIDING_NUMBER, values.double(), 0.0)
        return self._measured(values)

    def between(self, a: Tensor, b: Tensor) -> TensorSize:
        """Return (root mean square, largest absolute value) of a - b over the entries that count.

        Equal infinities, and NaN on both sides, differ by 0; if only one is infinite or NaN, they differ by infinity.
        """
        return (0.0, 0.0) if torch.equal(a, b) else self._measured(entry_differences(a.double(), b.double()))

    @cached_property
    def gap(self) -> TensorSize:
        """Return the size of A's minus B's tensor, as `between` measures it."""
        return self.between(self.a, self.b)

    @cached_property
    def sizes(self) -> tuple[TensorSize, TensorSize]:
        """Return the sizes of A's and of B's tensor, as `size` measures them."""
        return self.size(self.a), self.size(self.b)

    def nan(self) -> bool:
        """Return whether both sides have NaN at the same entry, among the entries that count."""
        both = self.a.isnan() & self.b.isnan()
        return bool((both if self.rows is None else both[self.rows]).any())

    def is_apart(self, roundings: float = ROUNDING_SLACK) -> bool:
        """Return whether both tensors differ by more than `roundings` relative roundings of both sides together.

        False means that they are equal even by the least error that is ever allowed, so that no float64 run is needed.
        """
        gap, size, by = self.gap, self.sizes[0], math.hypot(*self.units)
        return any(not off <= roundings * by * of for off, of in zip(gap, size, strict=True))

    def _measured(self, values: Tensor) -> TensorSize:
        if self.rows is not None:
            values = values[self.rows]
        if not values.numel():
            return (0.0, 0.0)
        return float(values.double().square().mean().sqrt()), float(values.abs().max())


@dataclass(frozen=True, slots=True)
class TensorVerdict:
    """Whether a tensor is the same on both sides.

    Attributes:
        same: None if unknown, for `reason` or because both sides have NaN at the same entry.
        gap: size of the difference: a root mean square, or the largest entry if only single entries differ.
        allowed: largest size that rounding explains, measured in the same way.
        size: size of A's tensor (of B's if A's is 0), measured in the same way.
        reason: why `same` is None; None if it is not, or if NaN is the reason.
    """

    same: bool | None
    gap: float
    allowed: float
    size: float
    reason: str | None = None


def errors_of(both: TensorOfBoth, references: Sequence[Tensor | None] | None) -> list[TensorSize | None]:
    """Return the rounding error of each side: its difference from its own float64 run, at least one rounding.

    Args:
        both: the tensor.
        references: for A and B, the tensor of the float64 run, or None if it is missing. None in place of both means
            that no such run is needed: one rounding of the dtype is taken.

    Returns:
        For A and B, (root mean square, largest absolute value); None if the reference is missing or has another shape.
    """
    found: list[TensorSize | None] = []
    for side, (x, size, by) in enumerate(zip((both.a, both.b), both.sizes, both.units, strict=True)):
        least = by * size[0], by * size[1]
        reference = None if references is None else references[side]
        if reference is not None and reference.shape == x.shape:
            off = both.between(x, reference.to(x.device))
            found.append((max(off[0], least[0]), max(off[1], least[1])))
        else:
            found.append(least if references is None else None)
    return found


def as_rounding(both: TensorOfBoth, errors: Sequence[TensorSize | None]) -> list[TensorSize | None]:
    """Return the errors of A and B, with None in place of each that is too large to be rounding.

    An error is too large if its root mean square exceeds a tenth of the tensor's. A model that draws random numbers
    draws other ones in float64, for example.
    """
    sizes = both.sizes
    return [
        None if error is None or not error[0] <= _ANOTHER_COMPUTATION * size[0] else error
        for error, size in zip(errors, sizes, strict=True)
    ]


def judge_tensor(
    both: TensorOfBoth,
    measured: Sequence[TensorSize | None],
    before: int,
    least: Sequence[float] = (0.0, 0.0),
    single: bool = True,
) -> TensorVerdict:
    """Judge whether one tensor is the same on both sides.

    Errors that are too large to be rounding (`as_rounding`) are ignored. If the tensor then differs, but would not with
    these errors allowed, the verdict is unknown.

    Args:
        both: the tensor.
        measured: result of `errors_of`.
        before: number of attentions before it; the allowance of an unmeasured tensor grows with sqrt(before + 1).
        least: for A and B, the least error allowed to a tensor of fewer than 64 entries, as a share of its size.
        single: whether single entries that differ count, or only the root mean square.
    """
    known = as_rounding(both, measured)
    verdict = _compared(both, known, before, least, single)
    others = [side for side, error, own in zip("AB", measured, known, strict=True) if error is not None and own is None]
    if verdict.same is not False or not others or not math.isfinite(verdict.gap):
        return verdict
    if _compared(both, measured, before, least, single).same is False:
        return verdict
    side = others[0] if len(others) == 1 else Message("outputs.both_sides")
    reason = Message("outputs.another_run", side=side)
    return TensorVerdict(None, verdict.gap, math.inf, verdict.size, reason)


def _compared(
    both: TensorOfBoth, errors: Sequence[TensorSize | None], before: int, least: Sequence[float], single: bool
) -> TensorVerdict:
    gap, sizes = both.gap, both.sizes
    allowed = [_allowed(both, errors, measure, before, least) for measure in (0, 1)]
    off = [not gap[measure] <= allowed[measure] for measure in (0, 1)]
    # One wrong entry among a million vanishes in the root mean square; the largest entry shows it.
    measure = 1 if single and off[1] and not off[0] else 0
    size = sizes[0][measure] or sizes[1][measure]
    if not math.isfinite(gap[1]):
        return TensorVerdict(False, math.inf, allowed[measure], size)
    same = None if both.nan() and not off[measure] else not off[measure]
    return TensorVerdict(same, gap[measure], allowed[measure], size)


def _allowed(
    both: TensorOfBoth, errors: Sequence[TensorSize | None], measure: int, before: int, least: Sequence[float]
) -> float:
    """Return how far apart rounding may put two tensors; an unknown rounding is taken from the other side."""
    sizes = [size[measure] for size in both.sizes]
    own = [None if error is None else error[measure] for error in errors]
    if both.a.numel() < FEW_ENTRIES:
        own = [None if x is None else max(x, share * of) for x, share, of in zip(own, least, sizes, strict=True)]
    known = [(error, by) for error, by in zip(own, both.units, strict=True) if error is not None]
    if not known:
        return UNMEASURED_ROUNDINGS * max(both.units) * math.sqrt(before + 1) * (sizes[0] or sizes[1])
    error, of = known[0]
    own = [error * max(1.0, by / of) if x is None else x for x, by in zip(own, both.units, strict=True)]
    return ROUNDING_SLACK * math.hypot(*filter(None, own))


def exact_of(side: ModelSide, listen: bool = False) -> FinerRun | None:
    """Return a side's run in float64, which is made at most once for each value of `listen` and kept in `side.exact`.

    Args:
        side: the side; its `exact`, `again` and `forwards` may change.
        listen: also record every module of the run.

    Returns:
        The run; None if the side is no module, or if its model can't run so.
    """
    if side.again is None or (side.exact is not None and (side.exact.listened or not listen)):
        return side.exact
    side.forwards += 1
    try:
        side.exact = side.again(listen, None)
    except MODEL_ERRORS:
        side.again = None  # some operation has no float64 version, or the module can't be copied
    return side.exact


# -- rows that do not count --------------------------------------------------------------------------------------------


def padding_of(a: ModelSide, b: ModelSide) -> BlindRows:
    """Return the rows that are padding by the attention masks among the inputs.

    A model may give anything there, such as zeros. If several masks of one side have one shape, such as those of
    encoder and decoder, only rows that are padding in all of them count. A row counts if it is padding on either side.

    Returns:
        Booleans (B, L), True at padding, by (B, L); shapes without padding are left out.
    """
    padding: BlindRows = {}
    for side in (a, b):
        own: BlindRows = {}
        for mask in side.tokens.masks.values():
            if mask.dim() == 2:
                rows, hidden = (mask.shape[0], mask.shape[1]), ~mask.bool().cpu()
                own[rows] = own.get(rows, hidden) & hidden
        for rows, hidden in own.items():
            padding[rows] = padding.get(rows, hidden) | hidden
    return {rows: hidden for rows, hidden in padding.items() if bool(hidden.any())}


def rows_left_out(a: ModelSide, b: ModelSide, pairs: Sequence[JudgedPair]) -> BlindRows:
    """Return the rows that are not compared: padding, and rows of self-attention that see no key in some pair.

    Their values may be anything, and later layers pass them on.

    Returns:
        Booleans (B, L), True at rows that are left out, by (B, L).
    """
    blind = padding_of(a, b)
    for own in pairs:
        if own.rows is not None and own.sides is not None and own.sides.self_attention:
            hidden, sizes = ~own.rows.cpu(), (own.rows.shape[0], own.rows.shape[1])
            blind[sizes] = blind.get(sizes, hidden) | hidden
    return blind


def seeing_entries(shape: torch.Size, blind: BlindRows, *, cache: bool = False) -> Tensor | None:
    """Return which entries of a tensor belong to rows that are compared.

    Rows are the second axis of (B, L, D), the third of (B, H, L, E), or the first of a tensor without a batch, (B * L,
    ...).

    Args:
        shape: shape of the tensor.
        blind: rows that are left out, as `rows_left_out` returns them.
        cache: whether the tensor is a cache, (B, H, W, E), of which a sliding window keeps only the last W rows.

    Returns:
        Booleans of this shape; None if every entry counts.
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
    """What enters one pair.

    Attributes:
        stage: the record; `stage.same` is None if unknown.
        sizes: sizes of A's and B's tensor if they differ.
        by_v: inferred from v, since not both sides recorded the input.
    """

    stage: StageDiff
    sizes: tuple[float, float] = (0.0, 0.0)
    by_v: bool = False

    def cause(self, where: str = "") -> Cause | None:
        """Return the cause "input"; None unless the inputs are known to differ.

        Args:
            where: text for the place where the models begin to differ; "" if unknown.
        """
        if self.stage.same is not False:
            return None
        a, b = self.sizes
        share, most = ((x or 0.0) / b if b else math.inf for x in (self.stage.largest, self.stage.allowed))
        what = Message("causes.input.other_or_v" if self.by_v else "causes.input.other")
        if where:
            what = Message("causes.input.from", what=what, place=where)
        text = Message("causes.input.off", what=what, share=short(share), most=short(most))
        return Cause("input", a, b, 1.0, text, "input")


def compare_inputs(
    a: ModelSide, b: ModelSide, calls: Sequence[tuple[CallTensors, CallTensors]], blind: BlindRows, listen: bool = False
) -> list[Entering]:
    """Compare what enters the attentions of every pair: their input, or v if not both sides recorded the input.

    Args:
        a: side A; it may run again in float64.
        b: side B; it may run again in float64.
        calls: the pairs.
        blind: rows that are left out, as `rows_left_out` returns them.
        listen: whether float64 runs also record every module.

    Returns:
        One result for each pair, in order.
    """
    every = [_entering_of_both(one, other, blind) for one, other in calls]
    exact = None
    if any(both is not None and both.is_apart() for both in every):
        exact = [exact_of(side, listen) for side in (a, b)]
    found = []
    for number, (both, pair) in enumerate(zip(every, calls, strict=True)):
        if both is None:
            found.append(Entering(StageDiff("input", None, reason=Message("compare.stage.unlike"))))
            continue
        known = [_reference(one, call, both) for one, call in zip(exact or (), pair, strict=False)]
        verdict, by_v = judge_tensor(both, errors_of(both, known or None), number, single=False), both.name != "input"
        if verdict.same is None:
            lost = verdict.reason or Message("compare.stage.not_finite")
            found.append(Entering(StageDiff("input", None, verdict.gap if verdict.reason else None, reason=lost)))
            continue
        reason = Message("compare.stage.by_v") if by_v else None
        stage = StageDiff("input", verdict.same, verdict.gap, verdict.allowed, reason=reason)
        found.append(Entering(stage, (both.sizes[0][0], both.sizes[1][0]), by_v))
    return found


def _entering_of_both(a: CallTensors, b: CallTensors, blind: BlindRows) -> TensorOfBoth | None:
    """Return what enters a pair, of the first kind that both sides have."""
    one, other = ({} if call.missing is not None else entering_of(call) for call in (a, b))
    for kind, x in one.items():
        y = other.get(kind)
        if y is not None and x.shape == y.shape:
            x, y = (_by_rows(tensor) for tensor in (x, y))
            units = [rounding_unit(getattr(torch, call.dtype, torch.float32)) for call in (a, b)]
            return TensorOfBoth(kind, kind, x, y, seeing_entries(x.shape, blind), (units[0], units[1]))
    return None


def _by_rows(tensor: Tensor) -> Tensor:
    """Return (B, L, D) or (B, L, H, E): v has its heads before its rows."""
    return (tensor.transpose(1, 2) if tensor.dim() == 4 else tensor).cpu()


def _reference(exact: FinerRun | None, call: CallTensors, both: TensorOfBoth) -> Tensor | None:
    known = None if exact is None else exact.inputs.get(name_of(call), {}).get(both.name)
    return None if known is None else _by_rows(known)
