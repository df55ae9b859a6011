"""What comes into each attention, on both sides: whether it differs by more than rounding.

Between two attentions lies whatever the model has there, so no formula tells how much rounding may have piled up. It is
measured: each side that is a module runs once more in float64 (of a model in half precision that can't, in float32),
and what its own inputs differ from that by is its rounding. Two inputs are the same where they differ by no more than
`SLACK` times the roundings of both together; where a side can't be run so, its rounding is taken to be the other's, by
the ratio of their dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.compare.align import name_of
from sqrtdk.compare.pair import Judged
from sqrtdk.compare.records import StageDiff
from sqrtdk.compare.sides import Exact, Side, entering_of
from sqrtdk.compare.stages import hidden_rows
from sqrtdk.compare.words import short
from sqrtdk.errors import SqrtdkError
from sqrtdk.tracing.tensors import CallTensors

Blind = dict[tuple[int, int], Tensor]  # (B, L) by B and L, True where the row sees no key on one side, or is padding
ANOTHER = 0.1  # of the size, and beyond: a run in float64 that is off by so much computes something else
SLACK = 4.0  # two draws of roundings of one size, and what the order of operations makes of it
UNMEASURED = (
    16.0  # roundings of the dtype, times the root of the number of attentions before, where nothing is measured
)


@dataclass(frozen=True, slots=True)
class Entering:
    """The inputs of one pair.

    Attributes:
        same: within rounding; None where one of them is not known.
        stage: for the record.
        a: root mean square of A's.
        b: of B's.
        text: half a sentence.
        by_v: it is told from v, as the input itself is not recorded on both sides.
    """

    same: bool | None
    stage: StageDiff
    a: float | None = None
    b: float | None = None
    text: str = ""
    by_v: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Both:
    """What comes into one pair, of the first kind that both sides have.

    Attributes:
        kind: of `entering_of`; "" where there is none.
        a: A's.
        b: B's.
        rows: (B, L), True for those that count; None for all.
    """

    kind: str
    a: Tensor | None = None
    b: Tensor | None = None
    rows: Tensor | None = None

    def size(self, values: Tensor) -> float:
        """Root mean square over the rows that count."""
        if self.rows is not None:
            values = values[self.rows] if values.dim() == 3 else values.transpose(1, 2)[self.rows]
        return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


def compare_inputs(
    a: Side,
    b: Side,
    calls: Sequence[tuple[CallTensors, CallTensors]],
    judged: Sequence[Judged],
    listen: bool = False,
) -> list[Entering]:
    """Compare what comes into every pair.

    Args:
        a: A.
        b: B.
        calls: the pairs.
        judged: what each is by itself.
        listen: a run in float64 keeps what the modules take and give as well.
    """
    blind = padding_of(a, b)
    both = [_both(one, other, own, blind) for (one, other), own in zip(calls, judged, strict=True)]
    gaps = [_gap(pair) for pair in both]
    roundings = _roundings(a, b, calls, both, listen) if any(gap for gap in gaps) else [(0.0, 0.0)] * len(calls)
    return [_entering(pair, gap, *rounding) for pair, gap, rounding in zip(both, gaps, roundings, strict=True)]


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
                own[rows] = own[rows] & hidden if rows in own else hidden
        for rows, hidden in own.items():
            padding[rows] = padding[rows] | hidden if rows in padding else hidden
    return {rows: hidden for rows, hidden in padding.items() if bool(hidden.any())}


def blind_rows(a: Side, b: Side, calls: Sequence[tuple[CallTensors, CallTensors]], judged: Sequence[Judged]) -> Blind:
    """The rows that see no key in some pair, and those of padding."""
    blind = padding_of(a, b)
    for (one, other), own in zip(calls, judged, strict=True):
        _both(one, other, own, blind)
    return blind


def rows_of(shape: torch.Size, blind: Blind) -> Tensor | None:
    """True for the entries of a tensor that are of rows which see a key; None where all are.

    Rows are the second axis (B, L, D), the third of one with heads (B, H, L, E), or the first of rows without a batch.
    """
    for (batch, length), hidden in blind.items():
        if not bool(hidden.any()):
            continue
        rows = ~hidden.cpu()
        if len(shape) > 1 and shape[:2] == (batch, length):
            return rows.view(batch, length, *[1] * (len(shape) - 2)).expand(shape)
        if len(shape) == 4 and (shape[0], shape[2]) == (batch, length):
            return rows.view(batch, 1, length, 1).expand(shape)
        if len(shape) > 1 and shape[0] == batch * length:
            return rows.view(batch * length, *[1] * (len(shape) - 1)).expand(shape)
    return None


def _both(a: CallTensors, b: CallTensors, judged: Judged, blind: Blind) -> _Both:
    """What comes into a pair; `blind` are the rows, by batch and length, that see no key here or in an earlier pair."""
    one, other = ({} if call.missing is not None else entering_of(call) for call in (a, b))
    for kind, x in one.items():
        y = other.get(kind)
        if y is not None and x.shape == y.shape:
            return _Both(kind, x, y, _counted(judged, x, blind))
    return _Both("")


def _counted(judged: Judged, entering: Tensor, blind: Blind) -> Tensor | None:
    """The rows that have seen a key on both sides so far; others may hold anything, and carry it on."""
    if judged.sides is None or not judged.sides.self_attention:
        return None
    sizes = entering.shape[0], entering.shape[-2]
    before = blind.get(sizes, torch.zeros(sizes, dtype=torch.bool))
    here = before.clone()
    for program in (judged.sides.a, judged.sides.b):
        here |= hidden_rows(program.formula, *sizes).cpu()
    blind[sizes] = here
    return ~here.to(entering.device)


def _gap(both: _Both) -> float | None:
    """Root mean square of the difference; None where there is nothing to compare."""
    return None if both.a is None or both.b is None else both.size(both.a.double() - both.b.double())


def _roundings(
    a: Side, b: Side, calls: Sequence[tuple[CallTensors, CallTensors]], both: Sequence[_Both], listen: bool
) -> list[tuple[float, float]]:
    """Of every pair, how far what comes in may be apart by rounding, as a root mean square.

    And how far it may be if all that float64 changes is taken for rounding.
    """
    exact = [exact_of(side, listen) for side in (a, b)]
    return [_rounding(number, pair, both[number], exact) for number, pair in enumerate(calls)]


def _rounding(
    number: int, calls: tuple[CallTensors, CallTensors], both: _Both, exact: Sequence[Exact | None]
) -> tuple[float, float]:
    units = [_unit(call) for call in calls]
    measured = [
        None if x is None else _error(call, x, both, reference)
        for call, x, reference in zip(calls, (both.a, both.b), exact, strict=True)
    ]
    sizes = [0.0 if x is None else both.size(x) for x in (both.a, both.b)]
    known = [as_rounding(error, size) for error, size in zip(measured, sizes, strict=True)]
    allowed, most = (apart(errors, units, sizes[0], number) for errors in (known, measured))
    return allowed, max(allowed, most) if known != measured else allowed


def as_rounding(error: float | None, size: float) -> float | None:
    """An error against float64; None where it is none: noise that a model draws is another in float64."""
    return None if error is None or not error <= ANOTHER * size else error


def apart(errors: Sequence[float | None], units: Sequence[float], size: float, before: int) -> float:
    """How far two tensors may be apart by the rounding of both sides.

    Args:
        errors: how far each side is from itself in float64; None where that is not known.
        units: the relative rounding of each side.
        size: of the tensor.
        before: how many attentions come before it.

    Example:
        >>> apart([3e-7, 4e-7], [6e-8, 6e-8], 1.0, 0) == SLACK * 5e-7
        True
    """
    known = [(error, unit) for error, unit in zip(errors, units, strict=True) if error is not None]
    if not known:
        return UNMEASURED * max(units) * math.sqrt(before + 1) * size
    sizes = [
        known[0][0] * max(1.0, unit / known[0][1]) if error is None else error
        for error, unit in zip(errors, units, strict=True)
    ]
    return SLACK * math.hypot(*sizes)


def exact_of(side: Side, listen: bool = False) -> Exact | None:
    """A side in float64, with what its modules took and gave where that is asked for; None where it can't run so."""
    if side.again is None or (side.exact is not None and (side.exact.listened or not listen)):
        return side.exact
    side.forwards += 1
    try:
        side.exact = side.again(listen, None)
    except (SqrtdkError, RuntimeError, TypeError, ValueError, NotImplementedError):
        side.again = None  # it has operations, or a copy of it, that know no float64
    return side.exact


def _error(call: CallTensors, tensor: Tensor, both: _Both, exact: Exact | None) -> float | None:
    reference = None if exact is None else exact.inputs.get(name_of(call), {}).get(both.kind)
    if reference is None or reference.shape != tensor.shape:
        return None
    return max(both.size(tensor.double() - reference.double()), _unit(call) * both.size(tensor))


def _unit(call: CallTensors) -> float:
    dtype = getattr(torch, call.dtype, torch.float32)
    return float(torch.finfo(dtype).eps) / 2


def _entering(both: _Both, gap: float | None, allowed: float, most: float) -> Entering:
    if gap is None or both.a is None or both.b is None:
        return Entering(None, StageDiff("input", None, reason="not recorded, or of other shapes"))
    if math.isnan(gap) or math.isnan(allowed):
        return Entering(None, StageDiff("input", None, reason="not finite on both sides"))
    if allowed < gap and not most < gap:
        return Entering(None, StageDiff("input", None, gap, reason="the run in float64 is another computation"))
    same = gap <= allowed
    sizes = [both.size(x) for x in (both.a, both.b)]
    share, most = (x / sizes[1] if sizes[1] else math.inf for x in (gap, allowed))
    what = "gets another input" if both.kind == "input" else "gets another input, or projects v otherwise"
    text = f"{what} (off by {short(share)} of its size, rounding allows {short(most)})"
    reason = None if both.kind == "input" else "told from v: the input itself is not recorded on both sides"
    stage = StageDiff("input", same, gap, allowed, reason=reason)
    return Entering(same, stage, sizes[0], sizes[1], text, by_v=reason is not None)
