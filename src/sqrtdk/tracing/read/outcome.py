"""Whether what came out of sums over blocks is the softmax of their logits times the values, on a few rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sqrtdk.tracing.read.masks import HIDDEN

_ROWS = 8
_FAR = 0.05  # of the largest entry; rounding in bfloat16 stays well below


def is_attention(logits: Tensor, values: Sequence[tuple[int, Tensor]], output: Tensor) -> bool | None:
    """Whether the output is that of the logits; None where its layout, or the values', does not tell.

    Args:
        logits: (B, H, L, S), minus infinity where hidden.
        values: the first key of every block, and its values (..., Sv, Ev).
        output: (..., L, Ev), or with fewer columns (a sum was among the values).
    """
    batch, heads, rows, keys = logits.shape
    width = output.shape[-1]
    if output.is_meta or output.shape[-2] != rows or output.numel() != batch * heads * rows * width or not width:
        return None
    whole = logits.new_zeros(batch, heads, keys, width, dtype=torch.float64)
    for first, value in values:
        if value.numel() != batch * heads * value.shape[-2] * value.shape[-1] or value.shape[-1] < width:
            return None
        part = value.reshape(batch, heads, *value.shape[-2:])[..., :width]
        whole[:, :, first : first + value.shape[-2]] = part.to(torch.float64)
    at = torch.linspace(0, rows - 1, min(rows, _ROWS), device=logits.device).round().long()
    z, out = logits[:, :, at].to(torch.float64), output.reshape(batch, heads, rows, width)[:, :, at].to(torch.float64)
    seeing = (z.amax(-1) > HIDDEN) & (z.amax(-1) < math.inf)
    difference = (z.softmax(-1) @ whole - out).abs().amax(-1)[seeing]
    size = out.abs().amax(-1)[seeing]
    return not difference.numel() or bool((difference <= _FAR * size.max()).all())
