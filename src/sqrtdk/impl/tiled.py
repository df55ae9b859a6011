"""Blocks of rows in plain torch: the implementation that runs everywhere, and the one that returns the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sqrtdk._modes import as_one
from sqrtdk.impl import rows
from sqrtdk.impl.blocks import by_blocks, join_statistics, widened_call
from sqrtdk.impl.call import Call
from sqrtdk.impl.rows import attend_rows, dense, weighed_rows
from sqrtdk.stats.request import AuxOutput

if TYPE_CHECKING:
    from sqrtdk._shapes import Logits, Output


def tiled(call: Call) -> tuple[Output, AuxOutput]:
    """Compute a call by the plain formula in blocks of rows, so that no matrix (L, S) is held whole.

    Returns:
        The output (..., Hq, L, Ev), and the requested statistics, (..., Hq, L) each.
    """
    if rows.block_rows(call) >= call.length:
        return dense(call)
    return by_blocks(call, attend_rows)


def weighed(call: Call) -> tuple[Output, Logits, AuxOutput]:
    """Return the output (..., Hq, L, Ev), the weights (..., Hq, L, S) and the statistics (..., Hq, L).

    They are computed in blocks of rows, so that of all (L, S) matrices only the weights are held.
    """
    blocks = rows.block_rows(call) < call.length or call.score is not None
    result: tuple[Output, Logits, AuxOutput] = as_one(call, _weighed_blocks) if blocks else _weighed_blocks(call)
    return result


def _weighed_blocks(call: Call) -> tuple[Output, Logits, AuxOutput]:
    dtype, height = call.value.dtype, rows.block_rows(call)
    call = widened_call(call)
    starts = range(0, max(1, call.length), height)
    blocks = [weighed_rows(call, start, min(call.length, start + height)) for start in starts]
    outputs, statistics, parts = zip(*blocks, strict=True)
    weights = [part.expand(*call.lead, *part.shape[-2:]).to(dtype) for part in parts]
    return (
        torch.cat(outputs, -2).to(dtype),
        weights[0] if len(weights) == 1 else torch.cat(weights, -2),
        join_statistics(statistics),
    )
