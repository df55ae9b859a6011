"""Measures a call of `sqrtdk.attention` that ran in blocks of rows, from the call itself: any score, any function."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.impl.call import Call
from sqrtdk.impl.rows import block_rows, block_stats, logits_and_mask
from sqrtdk.stats import AttentionRows, CallStats, LogitSource, RowStats, call_stats_of_rows, logit_source
from sqrtdk.stats._partial import ROW_STATS_FIELDS


@dataclass(frozen=True, slots=True, eq=False)
class CallSource:
    """The logits of a call of `sqrtdk.attention`, computed block by block, so that they never lie in memory at once.

    It has the attributes and methods of the other sources of statistics, such as `LogitSource`.

    Attributes:
        call: the call.
        shape: (B, Hq, L, S) of the logits; leading axes before the heads are flattened into B.
    """

    call: Call
    shape: tuple[int, int, int, int]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the statistics, which is that of the call."""
        return self.call.dtype

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.call.query.device

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of each block of rows, where `stop` is the row after the last."""
        height = block_rows(self.call)
        for start in range(0, self.call.length, height):
            yield start, min(self.call.length, start + height)

    def rows(self, *, future: bool = False) -> AttentionRows:
        """Return the statistics of every row.

        Args:
            future: whether to measure the weight on keys j > i as well.

        Returns:
            Tensors of shape (B, Hq, L); their `future` is None unless it was asked for.
        """
        parts = [block_stats(self.call, *span) for span in self.spans()]
        joined = RowStats(*(torch.cat([getattr(part, name) for part in parts], -1) for name in ROW_STATS_FIELDS))
        sizes = self.shape[:3]
        ahead = torch.cat([self._ahead(*span) for span in self.spans()], -1) if future else None
        rows = joined.map(lambda field: field.reshape(sizes))
        return AttentionRows(rows, future=None if ahead is None else ahead.expand(sizes))

    def _ahead(self, start: int, stop: int) -> Tensor:
        logits, _ = logits_and_mask(self.call, start, stop, guarded=False)
        return self._four(logits, stop - start).softmax(-1).nan_to_num().triu(start + 1).sum(-1)

    def sample(self, batch: slice, rows: Tensor) -> LogitSource:
        """Return the logits of some rows of some batch elements, as a source of statistics.

        Args:
            batch: the elements, as a slice of B.
            rows: int64, (R,), the indices of the rows.
        """
        logits, visible = logits_and_mask(self.call.sample(rows), 0, len(rows), guarded=False)
        visible = None if visible is None else self._four(visible, len(rows))[batch]
        return logit_source(self._four(logits, len(rows))[batch], visible)

    def _four(self, tensor: Tensor, rows: int) -> Tensor:
        """Return (B, Hq, rows, S) from a tensor that broadcasts to (..., Hq, rows, S)."""
        batch, heads, _, keys = self.shape
        return tensor.expand(*self.call.lead, rows, keys).reshape(batch, heads, rows, keys)


def source_of_call(call: Call) -> CallSource:
    """Return the logits of a call as a source of statistics; all axes before the heads are flattened into B."""
    lead = call.lead
    return CallSource(call, (math.prod(lead[:-1]), lead[-1] if lead else 1, call.length, call.keys))


def stats_of_call(call: Call, *, future: bool) -> CallStats:
    """Return the statistics of all rows of a call, without the largest product, as a call may compute any score.

    Args:
        call: the call.
        future: whether to measure the weight on keys j > i; it is measured only if there are as many rows as keys.
    """
    source = source_of_call(call)
    return call_stats_of_rows(source, source.rows(future=future and call.length == call.keys))


def sampled_rows(call: Call, rows: Tensor | None) -> AttentionRows:
    """Return the statistics of some rows of a call, in tensors of shape (B, Hq, R).

    Args:
        call: the call.
        rows: int64, (R,), the indices of the rows; None takes all.
    """
    return source_of_call(call if rows is None else call.sample(rows)).rows()
