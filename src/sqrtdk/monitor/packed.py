"""The row of one rank: a sampled step as bytes, of a length that all ranks agreed on, and back.

A row is a head of float64 numbers (`Head`), then for each call its scale ratio and the number of columns of each of its
tensors, then the tensors: the wide ones as float64, the others as float32. The names of the calls and their tensors are
a `StepLayout`. Every rank knows the layouts of all ranks, and they are sent again only if they change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.monitor.samples import Alarm, CallTraits, FirstNonfinite, GradientFault
from sqrtdk.monitor.sums import MAXIMUM_COLUMNS, PRODUCT_COLUMNS, SUM_COLUMNS, HeadSums, WatchedCall, WatchedStep
from sqrtdk.stats import RowStats
from sqrtdk.tracing import CallRows

_ROW_FIELDS = tuple(field.name for field in fields(RowStats))
_ROW_STATISTICS_KEY = "row statistics"  # statistics of single rows, sent if the keys of a row lie on several ranks
_BAD = ("query_nonfinite", "key_nonfinite")
_EXTRA_TENSORS = ("max_product", "padding", *_BAD, "stored_product")


class Head(NamedTuple):
    """The first numbers of a row.

    Attributes:
        needed: bytes of the row; if they exceed the agreed length, only the head is sent.
        changed: 1.0 if the layout differs from the one sent last.
        every: every n-th of the rows for quantiles is sent.
        has_loss: 1.0 if there is a loss.
        loss: of the step.
        step: its number.
        modules: number of modules whose outputs were read.
        relative_step: of the weights that give q and k; NaN if it is not known.
        drift: of these weights since the sampled step before; NaN if it is not known.
    """

    needed: float
    changed: float
    every: float
    has_loss: float
    loss: float
    step: float = 0.0
    modules: float = 0.0
    relative_step: float = math.nan
    drift: float = math.nan


HEAD = 8 * len(Head._fields)  # bytes


class PackedTensor(NamedTuple):
    """One tensor (lines, columns) of a call in the packed numbers; from step to step only its columns vary.

    Attributes:
        name: of the tensor, for the statistics of its call.
        lines: number of its lines, such as heads.
        wide: whether its numbers are float64; else they are float32.
    """

    name: str
    lines: int
    wide: bool


@dataclass(frozen=True, slots=True)
class LaidCall:
    """The part of a `WatchedCall` that is the same in most steps: names and shapes, not numbers.

    Attributes:
        site: Path of the module.
        index: Which of the module's attentions it is, from 0.
        heads: Number of heads.
        formula: The formula of its logits.
        reason: Why there are no sums of it; None if there are.
        traits: What else is the same at every step.
        tensors: Name, number of lines and dtype of each of its tensors among the packed numbers.
    """

    site: str
    index: int
    heads: int
    formula: str
    reason: str | None
    traits: CallTraits
    tensors: tuple[PackedTensor, ...]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The part of a rank's `WatchedStep` that is the same in most steps: names and shapes, not numbers.

    Attributes:
        calls: One entry for each attention.
        how: How the step ran.
        missed: What was not measured, and why.
        alarms: Alarms of the rank.
        first: The first output that was not finite; None if all were.
        faults: What is wrong with the backward passes of attentions.
    """

    calls: tuple[LaidCall, ...]
    how: str
    missed: tuple[str, ...]
    alarms: tuple[Alarm, ...]
    first: FirstNonfinite | None
    faults: tuple[GradientFault, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PackedStep:
    """One rank's step, separated into its layout, which is sent only when it changes, and its numbers.

    Attributes:
        layout: names and shapes.
        head: sizes, and numbers of the whole step.
        numbers: for each call, its scale ratio and the number of columns of each tensor; float64.
        wide: all float64 tensors, flat.
        narrow: all float32 tensors, flat.
    """

    layout: StepLayout
    head: Head
    numbers: Tensor
    wide: Tensor
    narrow: Tensor

    def bytes(self, capacity: int, device: torch.device) -> Tensor:
        """Return the step's numbers as one row of bytes, which ranks can gather.

        Args:
            capacity: Bytes of the row. If the numbers need more, the row holds the head alone, which says how many.
            device: Device of the row.

        Returns:
            (capacity,) uint8, padded with 0.
        """
        # A collective needs tensors of one size on all ranks, so each row is padded to the agreed capacity.
        row = torch.zeros(capacity, dtype=torch.uint8, device=device)
        parts = [torch.tensor(self.head, dtype=torch.float64)]
        if self.head.needed <= capacity:
            parts += [self.numbers, self.wide, self.narrow]
        flat = torch.cat([part.to(device).contiguous().view(torch.uint8) for part in parts])
        row[: len(flat)] = flat
        return row


def pack_step(step: WatchedStep, *, by_row: bool, most: int) -> PackedStep:
    """Pack a step into a row.

    Args:
        step: of this rank.
        by_row: send the statistics of every row instead of their sums.
        most: bytes for the rows that quantiles are taken over; if there are more, every second, fourth, ... is sent.
    """
    tensors = [_tensors(call, by_row) for call in step.calls]
    rows = sum(4 * one.numel() for each in tensors for name, one in each.items() if not _wide(name))
    # A power of two, so that the strides of all ranks divide the largest of them and every rank can thin to it.
    stride = 1 << max(0, math.ceil(math.log2(rows / most))) if rows else 1
    tensors = [{name: one if _wide(name) else one[:, ::stride] for name, one in each.items()} for each in tensors]
    laid = tuple(
        LaidCall(
            *call.place,
            call.heads,
            call.formula,
            call.reason,
            call.traits,
            tuple(_packed(name, each[name]) for name in each),
        )
        for call, each in zip(step.calls, tensors, strict=True)
    )
    ratios = (math.nan if call.ratio is None else call.ratio for call in step.calls)
    numbers = [
        number
        for ratio, each in zip(ratios, tensors, strict=True)
        for number in (ratio, *(float(one.shape[1]) for one in each.values()))
    ]
    every = [(name, one.flatten()) for each in tensors for name, one in each.items()]
    wide = [one.double() for name, one in every if _wide(name)]
    narrow = [one.float() for name, one in every if not _wide(name)]
    # float64 before float32, so that every value of a row starts at a multiple of its size.
    flat = torch.tensor(numbers, dtype=torch.float64), _cat(wide, torch.float64), _cat(narrow, torch.float32)
    needed = HEAD + sum(part.numel() * part.element_size() for part in flat)
    # NaN alone would not do for "no loss", since a loss may be NaN: `has_loss` says which it is.
    loss = math.nan if step.loss is None else step.loss
    moved, drift = (math.nan if one is None else one for one in (step.relative_step, step.drift))
    has_loss, modules = float(step.loss is not None), float(step.modules)
    head = Head(needed, 0.0, stride, has_loss, loss, modules=modules, relative_step=moved, drift=drift)
    return PackedStep(StepLayout(laid, step.how, step.missed, step.alarms, step.first, step.faults), head, *flat)


def unpack_step(row: Tensor, layout: StepLayout, head: Head, stride: int) -> WatchedStep:
    """Unpack the step of a row.

    Args:
        row: (capacity,) uint8.
        layout: of its rank.
        head: of the row.
        stride: common to all ranks, a multiple of the row's own stride.
    """
    count = sum(1 + len(call.tensors) for call in layout.calls)
    numbers = iter(row[HEAD : HEAD + 8 * count].clone().view(torch.float64).tolist())
    shapes = [(next(numbers), [int(next(numbers)) for _ in call.tensors]) for call in layout.calls]
    at = HEAD + 8 * count
    found: list[dict[str, Tensor]] = [{} for _ in layout.calls]
    for wide, dtype, size in ((True, torch.float64, 8), (False, torch.float32, 4)):
        for call, (_, columns), each in zip(layout.calls, shapes, found, strict=True):
            for one, n in zip(call.tensors, columns, strict=True):
                if one.wide == wide:
                    end = at + size * one.lines * n
                    # A copy, because a view of bytes as numbers needs its address to be a multiple of their size.
                    each[one.name] = row[at:end].clone().view(dtype).reshape(one.lines, n)
                    at = end
    calls = [
        _call(call, None if math.isnan(ratio) else ratio, each, stride // int(head.every))
        for call, (ratio, _), each in zip(layout.calls, shapes, found, strict=True)
    ]
    loss = head.loss if head.has_loss else None
    modules = int(head.modules)
    known = layout.how, layout.missed, loss, layout.alarms, layout.first, modules
    return WatchedStep(tuple(calls), *known, faults=layout.faults)


def _tensors(call: WatchedCall, by_row: bool) -> dict[str, Tensor]:
    """Return the tensors of a call by name: its sums over rows; with `by_row`, the statistics of each row.

    Ranks that share the rows of a head (its keys are split) can only be joined row by row.
    """
    if call.sums is None:
        return {}
    if not by_row:
        return {"sums": call.sums.sums, "maxima": call.sums.maxima, **call.sums.ordered}
    rows = {_ROW_STATISTICS_KEY: torch.cat([_lines(one.rows) for one in call.rows], -1)}
    paddings = [one.padding for one in call.rows if one.padding is not None]
    for name in PRODUCT_COLUMNS:
        products = [product for one in call.rows if (product := getattr(one, name)) is not None]
        # A maximum over some of the passes would be taken for that of all.
        if products and len(products) == len(call.rows):
            rows[name] = torch.stack([one.double() for one in products]).amax().reshape(1, 1)
    if paddings:
        rows["padding"] = torch.stack(paddings).sum().reshape(1, 1)
    for name in _BAD:
        counts = [count for one in call.rows if (count := getattr(one, name)) is not None]
        if len(counts) == len(call.rows):
            rows[name] = torch.stack(counts).sum().reshape(1, 1)
    return rows | {name: one for name, one in call.sums.ordered.items() if name == "key_grad"}


def _call(laid: LaidCall, ratio: float | None, tensors: dict[str, Tensor], stride: int) -> WatchedCall:
    ordered = {name: one[:, ::stride] for name, one in tensors.items() if not _wide(name)}
    sums: HeadSums | None = None
    rows: tuple[CallRows, ...] = ()
    if "sums" in tensors:
        sums = HeadSums(tensors["sums"], tensors["maxima"], ordered)
    elif _ROW_STATISTICS_KEY in tensors:
        product, padding, *bad = (tensors[name].reshape(()) if name in tensors else None for name in _EXTRA_TENSORS)
        lines = tensors[_ROW_STATISTICS_KEY].reshape(len(_ROW_FIELDS), laid.heads, -1)
        stats = RowStats(**dict(zip(_ROW_FIELDS, lines, strict=True)))
        rows = (CallRows(stats, product, lines.shape[-1], padding, *bad),)
        # Placeholders of the right shape: `shards` replaces them by the sums of the rows that it merges.
        nothing = lines.new_zeros
        sums = HeadSums(nothing(len(SUM_COLUMNS), laid.heads), nothing(len(MAXIMUM_COLUMNS), laid.heads), ordered)
    return WatchedCall(laid.site, laid.index, laid.heads, ratio, laid.formula, sums, laid.reason, rows, laid.traits)


def _lines(rows: RowStats) -> Tensor:
    return torch.cat([getattr(rows, name) for name in _ROW_FIELDS])


def _packed(name: str, tensor: Tensor) -> PackedTensor:
    return PackedTensor(name, tensor.shape[0], _wide(name))


def _wide(name: str) -> bool:
    return name in ("sums", "maxima", _ROW_STATISTICS_KEY, *_EXTRA_TENSORS)


def _cat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    device = parts[0].device if parts else None
    return torch.cat([part.to(device) for part in parts]) if parts else torch.empty(0, dtype=dtype)
