"""Blocks of rows, one after the other, and once more in the backward pass: memory grows with L + S, not with L S."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from sqrtdk.impl.call import Call, has_values, transformed
from sqrtdk.impl.rows import attend
from sqrtdk.stats.request import AuxOutput

if TYPE_CHECKING:
    from sqrtdk._shapes import Output

BLOCK = 2**20  # pairs of a block, times the score's width: 4 MiB a float32 tensor of that size


def block_rows(call: Call) -> int:
    """Rows of a block; a row is never split."""
    return max(1, BLOCK * call.length // max(1, call.elements))


def tiled(call: Call) -> tuple[Output, AuxOutput]:
    """Output (..., Hq, L, Ev) and statistics (..., Hq, L).

    Nothing of a block is kept for the backward pass but its output; the block is computed again there, with the same
    dropout. Under the transforms of `torch.func`, which know no recomputation, all blocks are kept.
    """
    height = block_rows(call)
    if height >= call.length:
        return attend(call, 0, call.length)
    dtype = call.value.dtype
    # Widened once, so that the gradients of the blocks are summed in that precision.
    wide = {name: getattr(call, name).to(call.dtype) for name in ("query", "key", "value")}
    call = replace(call, **wide)
    spans = [(start, min(call.length, start + height)) for start in range(0, call.length, height)]
    if not torch.is_grad_enabled() and has_values(call.query):
        return _written(call, spans, dtype)
    if torch.is_grad_enabled() and not transformed():
        blocks = [checkpoint(attend, call, start, stop, use_reentrant=False) for start, stop in spans]
    else:
        blocks = [attend(call, start, stop) for start, stop in spans]
    outputs, statistics = zip(*blocks, strict=True)
    joined = (None if parts[0] is None else torch.cat(parts, -1) for parts in zip(*statistics, strict=True))
    return torch.cat(outputs, -2).to(dtype), AuxOutput(*joined)


def _written(call: Call, spans: list[tuple[int, int]], dtype: torch.dtype) -> tuple[Output, AuxOutput]:
    """The same, each block's results written where they belong.

    Kept apart until the end, small as they are, they hold the memory of the large temporary tensors between them.
    """
    output = call.value.new_empty(*call.lead, call.length, call.value.shape[-1], dtype=dtype)
    wanted = () if call.aux is None else call.aux.wanted
    whole = {name: call.query.new_empty(*call.lead, call.length, dtype=call.dtype) for name in wanted}
    for start, stop in spans:
        output[..., start:stop, :], found = attend(call, start, stop)
        for name, field in whole.items():
            field[..., start:stop] = getattr(found, name)
    return output, AuxOutput(**whole)
