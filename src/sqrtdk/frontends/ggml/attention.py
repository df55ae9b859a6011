"""The attention of ggml: `SOFT_MAX` over a product, or all in one, `FLASH_ATTN_EXT`.

    SOFT_MAX        softmax(scale z + slope mask, sinks)
    FLASH_ATTN_EXT  softmax(cap tanh(scale / cap q.k) + slope mask, sinks) v

The slope of a head is that of ALiBi, or 1 without it. Sinks are one more logit of each row, whose weight is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.frontends.ggml.rounding import ggml_rounded
from sqrtdk.frontends.ggml.views import Shape
from sqrtdk.frontends.program import RunDtypes

# With this many rows of queries or more, ggml's flash kernel works on tiles in float32; with fewer it rounds the query
# to the keys' dtype, and adds up the values in float16.
ROWS_OF_A_TILE = 64


def slopes(heads: int, bias: float) -> Tensor:
    """Return the slopes of ALiBi for each head, as ggml has them.

    Args:
        heads: Number of heads.
        bias: `max_bias` of the operation, above 0.

    Example:
        >>> slopes(4, 8.0).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** math.floor(math.log2(heads))
    first, second = 2 ** (-bias / power), 2 ** (-bias / 2 / power)
    made = [first ** (h + 1) if h < power else second ** (2 * (h - power) + 1) for h in range(heads)]
    return torch.tensor(made, dtype=torch.float64)


def _addend(mask: Tensor, like: Tensor, bias: float, kept: Tensor | None) -> Tensor:
    """Return what is added to the logits: the mask for these rows and keys, times the slopes."""
    if kept is not None and mask.shape[-1] > kept.numel():
        mask = mask[..., kept]
    mask = mask[..., : like.shape[-2], :].to(like.dtype)
    if bias > 0:
        heads = like.shape[-3] if like.dim() > 3 else 1
        mask = mask * slopes(heads, bias).to(like).reshape(-1, 1, 1)
    return mask


def _weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return logits.softmax(-1)
    extra = sinks.to(logits.dtype).reshape(-1, 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat((logits, extra), -1).softmax(-1)[..., :-1]


def soft_max(scale: float, bias: float, kept: Tensor | None) -> Callable[..., Tensor]:
    """Return the function of a `SOFT_MAX`, of logits, mask and sinks.

    Args:
        scale: Factor on the logits.
        bias: `max_bias` of ALiBi; 0 for none.
        kept: Keys of the mask that the logits have; None for all.
    """

    def run(numbers: RunDtypes, logits: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        z = logits * scale if scale != 1 else logits
        if mask is not None:
            z = z + _addend(mask, z, bias, kept)
        return _weights(z, sinks)

    return run


def flash_attention(
    scale: float, bias: float, cap: float, kind: str, rows: int, shape: Shape, kept: Tensor | None
) -> Callable[..., Tensor]:
    """Return the function of a `FLASH_ATTN_EXT`, of q, k, v, mask and sinks.

    Args:
        scale: Factor on q.k.
        bias: `max_bias` of ALiBi; 0 for none.
        cap: Softcap; 0 for none.
        kind: What the query is ggml_rounded to, if it is.
        rows: Number of queries.
        shape: Of the result.
        kept: Keys of the mask that k has; None for all.
    """
    rounds = rows < ROWS_OF_A_TILE

    def run(
        numbers: RunDtypes, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        k, v = (x if x.dim() == q.dim() else x.unsqueeze(1) for x in (k, v))
        q = ggml_rounded(numbers, q, kind) if rounds else q
        addend = None if mask is None else _addend(mask, q.new_empty(*q.shape[:-1], 0), bias, kept)
        if cap == 0 and sinks is None:
            made = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=addend, scale=scale, enable_gqa=q.dim() > 3 and k.shape[-3] != q.shape[-3]
            )
        else:
            if q.dim() > 3 and k.shape[-3] != q.shape[-3]:
                k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
            z = q @ k.mT * (scale / cap if cap else scale)
            z = cap * torch.tanh(z) if cap else z
            made = _weights(z if addend is None else z + addend, sinks) @ v
        made = ggml_rounded(numbers, made, "f16") if rounds and kind == "f16" else made
        made = made.transpose(-3, -2) if made.dim() > 3 else made
        return made if made.dim() == len(shape) else made.reshape(shape)

    return run
