"""What a rank measures of its part of an attention: rows over all keys that they meet, block by block.

Statistics of a row over several blocks of keys merge exactly (`RowStats.merge`), so that no q, k or logits leave the
rank: it sends the statistics of its rows, and which keys they see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk._ring import merge
from sqrtdk.ranks.tokens import AttentionPrint, BlockPrint
from sqrtdk.stats import RowStats, row_stats
from sqrtdk.stats.heads import LOGIT_BINS, Histogram, bin_counts
from sqrtdk.stats.rows import statistics_dtype
from sqrtdk.tracing import AttentionCall, CallTensors

_LOGITS_PER_STEP = 1 << 22  # of a call at once
_READ = ("scale", "softcap", "bias", "mask")


@dataclass(frozen=True, slots=True, eq=False)
class MaskBits:
    """A bool mask (b, h, L, S), of which b and h may be 1, in one bit for each pair."""

    shape: tuple[int, ...]
    bits: bytes

    @classmethod
    def of(cls, visible: Tensor) -> MaskBits:
        """Return the packed form of a bool tensor."""
        return cls(tuple(visible.shape), np.packbits(visible.cpu().numpy()).tobytes())

    def unpacked(self) -> Tensor:
        """Return the bool tensor."""
        bits = np.unpackbits(np.frombuffer(self.bits, dtype=np.uint8), count=math.prod(self.shape))
        return torch.from_numpy(bits.astype(bool)).view(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionShare:
    """A rank's part of an attention.

    Attributes:
        calls: The records of its blocks.
        rows: Statistics of its rows over all keys that they meet, (B, Hq, L).
        visible: The keys that the rows of each block see; None for all.
        squares: Sum of the squares of the output over all keys, and the number of its elements.
        histograms: Of the visible logits, one for each head.
    """

    calls: tuple[AttentionCall, ...]
    rows: RowStats
    visible: tuple[MaskBits | None, ...]
    squares: tuple[float, int]
    histograms: tuple[Histogram, ...]


def share_of(
    printed: AttentionPrint, calls: Sequence[AttentionCall], tensors: Sequence[CallTensors]
) -> AttentionShare | None:
    """Return this rank's part of an attention, or None if a step of its logits is unknown.

    Args:
        printed: The attention.
        calls: The calls of the trace.
        tensors: Their tensors.
    """
    kept = [tensors[block.call] for block in printed.blocks]
    if any(term.name not in _READ or term.value is None for one in kept for term in one.terms or ()):
        return None
    whole, output = whole_rows(printed, tensors)
    return AttentionShare(
        calls=tuple(calls[block.call] for block in printed.blocks),
        rows=whole.map(torch.Tensor.cpu),
        visible=tuple(None if (mask := visible_of(one)) is None else MaskBits.of(mask) for one in kept),
        squares=(float(output.double().square().sum()), output.numel()),
        histograms=_histograms(kept, whole),
    )


def whole_rows(printed: AttentionPrint, tensors: Sequence[CallTensors]) -> tuple[RowStats, Tensor]:
    """Return the statistics of this rank's rows over all keys that they meet, (B, Hq, L), and their output.

    Args:
        printed: The attention.
        tensors: The tensors of the trace's calls.
    """
    kept = [tensors[block.call] for block in printed.blocks]
    whole: RowStats | None = None
    outputs, lses = [], []
    for block, one in zip(printed.blocks, kept, strict=True):
        padded = found = _rows_of(one, None)
        # In a zigzag ring some blocks meet only half of the rows.
        length = len(printed.rows)
        if block.rows[1] < length:
            empty = RowStats.empty((*found.keys.shape[:2], length), dtype=found.keys.dtype, device=found.keys.device)
            start, stop = block.rows[0], sum(block.rows)
            for name in RowStats.__dataclass_fields__:
                getattr(empty, name)[..., start:stop] = getattr(found, name)
            padded = empty
        outputs.append(_padded(one.output, block, length))
        lses.append(padded.lse)
        whole = padded if whole is None else whole.merge(padded)
    assert whole is not None
    output = outputs[0] if len(outputs) == 1 else merge(outputs, lses)[0]
    return whole, output


def weight_ahead(
    printed: AttentionPrint, tensors: Sequence[CallTensors], share: AttentionShare, ahead: Sequence[Tensor]
) -> tuple[float, int]:
    """Return the sum over rows of the weight on keys after the row's own, and the number of rows that see a key.

    Args:
        printed: The attention.
        tensors: The tensors of the trace's calls.
        share: This rank's part of it.
        ahead: For each block, (L, S), True where the key comes after the row.
    """
    total = 0.0
    for block, later in zip(printed.blocks, ahead, strict=True):
        part = _rows_of(tensors[block.call], later).lse.cpu().double()
        whole = share.rows.lse[..., block.rows[0] : sum(block.rows)].double()
        total += float((part - whole).exp().nan_to_num(0.0).sum())
    return total, int((share.rows.keys > 0).sum())


def visible_of(kept: CallTensors) -> Tensor | None:
    """Return the keys that the rows of a call see, (b, h, L, S) with b and h as small as may be; None for all.

    Args:
        kept: The tensors of the call.
    """
    masks = [term.value for term in kept.terms or () if term.name == "mask" and isinstance(term.value, Tensor)]
    if not masks:
        return None
    visible = masks[0].bool()
    for mask in masks[1:]:
        visible = visible & mask.bool()
    visible = visible[(None,) * (4 - visible.dim())]
    return visible.expand(*visible.shape[:2], kept.query.values.shape[2], kept.key.values.shape[2])


def _rows_of(kept: CallTensors, only: Tensor | None) -> RowStats:
    """Return the statistics of the rows of a call, (B, Hq, L), over its keys, or some of them (L, S)."""
    parts = []
    for rows, logits, visible in _logits(kept):
        if only is not None:
            some = only[rows].to(logits.device)
            visible = some if visible is None else visible & some
        parts.append(row_stats(logits, None if visible is None else visible.expand(logits.shape)))
    return RowStats(*(torch.cat([getattr(part, name) for part in parts], -1) for name in RowStats.__dataclass_fields__))


def _logits(kept: CallTensors) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield the logits of a call in blocks of rows, with the rows and the keys that they see."""
    query, key = kept.query.values.detach(), kept.key.values.detach()
    dtype = statistics_dtype(query.dtype)
    heads, length, keys = query.shape[1], query.shape[2], key.shape[2]
    key = key.to(dtype).repeat_interleave(heads // key.shape[1], 1)
    step = max(1, _LOGITS_PER_STEP // max(1, query.shape[0] * heads * keys))
    visible = visible_of(kept)
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        logits = query[:, :, rows].to(dtype) @ key.mT
        for term in kept.terms or ():
            by: Any = term.value
            if isinstance(by, Tensor):
                by = by[..., rows, :] if by.dim() > 1 and by.shape[-2] == length != 1 else by
                by = by if term.name == "mask" else by.to(logits.device, dtype)
            if term.name == "scale":
                logits = logits * by
            elif term.name == "bias":
                logits = logits + by
            elif term.name == "softcap":
                logits = (logits if term.detail else by) * (logits / by).tanh()
        yield rows, logits, None if visible is None else visible[:, :, rows].to(logits.device)


def _padded(output: Tensor, block: BlockPrint, length: int) -> Tensor:
    """Return the output of a block with zeros in the rows that it does not meet."""
    if block.rows[1] == length:
        return output
    whole = output.new_zeros(*output.shape[:2], length, output.shape[-1])
    whole[:, :, block.rows[0] : sum(block.rows)] = output
    return whole


def _histograms(kept: Sequence[CallTensors], rows: RowStats) -> tuple[Histogram, ...]:
    """Return the histogram of each head's visible logits, between its least and its largest."""
    heads = rows.keys.shape[1]
    flat = rows.map(lambda field: field.transpose(0, 1).flatten(1))
    good = (flat.keys > 0) & flat.max_logit.isfinite() & flat.min_logit.isfinite()
    high = flat.max_logit.masked_fill(~good, -math.inf).amax(-1)
    low = torch.minimum(flat.min_logit.masked_fill(~good, math.inf).amin(-1), high)
    width = high - low
    spread = torch.where(width > 0, LOGIT_BINS / width, 0.0)
    counts = torch.zeros(heads, LOGIT_BINS, dtype=torch.int64, device=low.device)
    for one in kept:
        for _, logits, visible in _logits(one):
            counted = logits.isfinite() if visible is None else logits.isfinite() & visible
            values, shown = logits.transpose(0, 1).flatten(1), counted.transpose(0, 1).flatten(1)
            counts += bin_counts(values.nan_to_num(), shown, low[:, None], spread[:, None], LOGIT_BINS)
    return tuple(Histogram(float(low[head]), float(high[head]), tuple(counts[head].tolist())) for head in range(heads))
