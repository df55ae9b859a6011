"""What comes into each attention, on both sides: whether it differs by more than rounding.

Between two attentions lies whatever the model has there, so no formula tells how much rounding may have piled up. It is
measured: each side that is a module runs once more in float64, and what its own inputs differ from that by is its
rounding. Two inputs are the same where they differ by no more than `SLACK` times the roundings of both together; where
a side can't be run in float64, its rounding is taken to be the other's, by the ratio of their dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.compare.align import name_of
from sqrtdk.compare.pair import Judged
from sqrtdk.compare.records import StageDiff
from sqrtdk.compare.sides import Side, entering_of
from sqrtdk.compare.stages import hidden_rows
from sqrtdk.compare.words import short
from sqrtdk.errors import SqrtdkError
from sqrtdk.tracing.tensors import CallTensors

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
    """

    same: bool | None
    stage: StageDiff
    a: float | None = None
    b: float | None = None
    text: str = ""


def compare_inputs(
    a: Side, b: Side, calls: Sequence[tuple[CallTensors, CallTensors]], judged: Sequence[Judged]
) -> list[Entering]:
    """Compare what comes into every pair."""
    tensors = [(entering_of(one), entering_of(other)) for one, other in calls]
    rows = [_compared(own, one) for own, (one, _) in zip(judged, tensors, strict=True)]
    gaps = [_difference(one, other, kept) for (one, other), kept in zip(tensors, rows, strict=True)]
    needed = any(gap is not None and gap > 0 for gap in gaps)
    roundings = _roundings(a, b, calls, tensors, rows) if needed else [(0.0, "")] * len(calls)
    return [
        _entering(one, other, kept, gap, rounding)
        for (one, other), kept, gap, rounding in zip(tensors, rows, gaps, roundings, strict=True)
    ]


def _compared(judged: Judged, entering: Tensor | None) -> Tensor | None:
    """(B, L), True for the rows that see a key on both sides; others may hold anything."""
    if entering is None or judged.sides is None:
        return None
    batch, length = entering.shape[0], entering.shape[-2]
    hidden = torch.zeros(batch, length, dtype=torch.bool)
    for program in (judged.sides.a, judged.sides.b):
        hidden |= hidden_rows(program.formula, batch, length)
    return ~hidden


def _difference(one: Tensor | None, other: Tensor | None, rows: Tensor | None) -> float | None:
    """Root mean square of the difference; None where there is nothing to compare."""
    if one is None or other is None or one.shape != other.shape:
        return None
    return _size(one.double() - other.double(), rows)


def _size(values: Tensor, rows: Tensor | None) -> float:
    if rows is not None and values.dim() == 3:
        values = values[rows]
    elif rows is not None and values.dim() == 4:
        values = values.transpose(1, 2)[rows]
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


def _roundings(
    a: Side,
    b: Side,
    calls: Sequence[tuple[CallTensors, CallTensors]],
    tensors: Sequence[tuple[Tensor | None, Tensor | None]],
    rows: Sequence[Tensor | None],
) -> list[tuple[float, str]]:
    """Of every pair, how far the inputs may be apart by rounding, as a root mean square, and how that is known."""
    exact = [_exact(side) for side in (a, b)]
    found = []
    for number, ((one, other), (x, y), kept) in enumerate(zip(calls, tensors, rows, strict=True)):
        errors = [
            _error(call, tensor, reference, kept)
            for call, tensor, reference in ((one, x, exact[0]), (other, y, exact[1]))
        ]
        units = [_unit(call) for call in (one, other)]
        for i in (0, 1):
            if errors[i] is None and errors[1 - i] is not None:
                errors[i] = (errors[1 - i] or 0.0) * max(1.0, units[i] / units[1 - i])
        if errors[0] is None or errors[1] is None:
            size = 0.0 if x is None else _size(x, kept)
            found.append((UNMEASURED * max(units) * math.sqrt(number + 1) * size, "by the dtype"))
        else:
            found.append((SLACK * math.hypot(errors[0], errors[1]), "against a run in float64"))
    return found


def _exact(side: Side) -> Mapping[str, Tensor] | None:
    """The inputs of a side's attentions in float64."""
    if side.again is None:
        return None
    side.forwards += 1
    try:
        return side.again()
    except (SqrtdkError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return None  # it has operations, or a copy of it, that know no float64


def _error(
    call: CallTensors, tensor: Tensor | None, exact: Mapping[str, Tensor] | None, rows: Tensor | None
) -> float | None:
    reference = None if exact is None else exact.get(name_of(call))
    if tensor is None or reference is None or reference.shape != tensor.shape:
        return None
    return max(_size(tensor.double() - reference.double(), rows), _unit(call) * _size(tensor, rows))


def _unit(call: CallTensors) -> float:
    dtype = getattr(torch, call.dtype, torch.float32)
    return float(torch.finfo(dtype).eps) / 2


def _entering(
    one: Tensor | None, other: Tensor | None, rows: Tensor | None, gap: float | None, rounding: tuple[float, str]
) -> Entering:
    if one is None or other is None or gap is None:
        reason = "not recorded" if one is None or other is None else f"{tuple(one.shape)} against {tuple(other.shape)}"
        return Entering(None, StageDiff("input", None, reason=reason))
    allowed, _ = rounding
    if math.isnan(gap) or math.isnan(allowed):
        return Entering(None, StageDiff("input", None, reason="not finite on both sides"))
    same = gap <= allowed
    sizes = [_size(x, rows) for x in (one, other)]
    share = gap / sizes[1] if sizes[1] else math.inf
    allows = short(allowed / max(sizes[1], 1e-300))
    text = f"gets another input (off by {short(share)} of its size, rounding allows {allows})"
    return Entering(same, StageDiff("input", same, gap, allowed), sizes[0], sizes[1], text)
