"""Blocks of rows, one after the other, and once more in the backward pass: memory grows with L + S, not with L S."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sqrtdk.impl.call import Call, transformed
from sqrtdk.impl.rows import attend
from sqrtdk.stats.request import AuxOutput

BLOCK = 2**20  # pairs of a block, times the score's width: 4 MiB a float32 tensor of that size


def block_rows(call: Call) -> int:
    """Rows of a block; a row is never split."""
    return max(1, BLOCK * call.length // max(1, call.elements))


def tiled(call: Call) -> tuple[Tensor, AuxOutput]:
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
    blocks = []
    for start in range(0, call.length, height):
        stop = min(call.length, start + height)
        if torch.is_grad_enabled() and not transformed():
            blocks.append(checkpoint(attend, call, start, stop, use_reentrant=False))
        else:
            blocks.append(attend(call, start, stop))
    outputs, statistics = zip(*blocks, strict=True)
    joined = (None if parts[0] is None else torch.cat(parts, -1) for parts in zip(*statistics, strict=True))
    return torch.cat(outputs, -2).to(dtype), AuxOutput(*joined)
