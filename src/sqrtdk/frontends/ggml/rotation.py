"""Rotary positions of ggml: `ROPE`, with frequency factors, linear scaling and YaRN.

    angle(t, i) = t freq_scale base^(-2 i / n) / factor(i),  i < n / 2

YaRN (`ext_factor` is not 0) mixes it with the angle without `freq_scale`, by a ramp over i, and multiplies cosine and
sine by `attn_factor (1 + 0.1 log(1 / freq_scale))`. Mode 0 turns neighbours (2i, 2i + 1), mode 2 turns (i, i + n / 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sqrtdk.frontends.ggml.graph import GgmlTensor
from sqrtdk.frontends.program import RunDtypes

NEIGHBOURS, HALVES = 0, 2  # modes that are read


def rotation(node: GgmlTensor, factors: bool) -> Callable[..., Tensor] | None:
    """Return the function of a `ROPE`, of x, positions and frequency factors if there are any.

    Args:
        node: The operation; its parameters hold dimensions, mode, base and the numbers of YaRN.
        factors: Whether it reads frequency factors.

    Returns:
        The function; None for a mode that is not read, such as that of positions in images.
    """
    count, mode, original = (int(node.whole[at]) for at in (1, 2, 4))
    base, linear, mixed, gain, fast, slow = (float(node.real[at]) for at in range(5, 11))
    if mode not in (NEIGHBOURS, HALVES):
        return None
    ramp = _ramp(count, original, base, fast, slow) * mixed if mixed else None
    if mixed:
        gain *= 1 + 0.1 * math.log(1 / linear)

    def run(numbers: RunDtypes, x: Tensor, positions: Tensor, *given: Tensor) -> Tensor:
        powers = torch.arange(0, count, 2, dtype=x.dtype, device=x.device) / count
        full = positions.reshape(-1, 1).to(x.dtype) * base**-powers
        if factors:
            full = full / given[0].to(x.dtype)
        angles = full * linear if linear != 1 else full
        if ramp is not None:
            mix = ramp.to(x)
            angles = angles * (1 - mix) + full * mix
        angles = angles.unsqueeze(-2)  # one for all heads
        cos, sin = angles.cos(), angles.sin()
        if gain != 1:
            cos, sin = cos * gain, sin * gain
        return _turned(x, cos, sin, count, mode)

    return run


def _turned(x: Tensor, cos: Tensor, sin: Tensor, count: int, mode: int) -> Tensor:
    turned, rest = (x, None) if x.shape[-1] == count else (x[..., :count], x[..., count:])
    if mode == HALVES:
        a, b = turned.chunk(2, -1)
        made = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
        made = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return made if rest is None else torch.cat((made, rest), -1)


def _ramp(count: int, original: int, base: float, fast: float, slow: float) -> Tensor:
    """Return what share of each angle is without `freq_scale`: 1 for fast ones, 0 for slow ones."""

    def corrected(turns: float) -> float:
        return count * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(corrected(fast))), min(count - 1, math.ceil(corrected(slow)))
    at = torch.arange(count // 2, dtype=torch.float64)
    return 1 - ((at - low) / max(0.001, high - low)).clamp(0, 1)
