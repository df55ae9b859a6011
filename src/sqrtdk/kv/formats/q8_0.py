"""ggml's q8_0: blocks of 32 channels, integers of 8 bits, the scale of a block in float16.

d = max|x| / 127 in float32 (float64 of float64); the integer is x / d, halves away from zero; what is read back is the
integer times d as it was rounded to float16. 34 bytes for 32 numbers: 8.5 bits each.

Source: ggml's `quantize_row_q8_0_ref` and `block_q8_0` (ggml-quants.c, ggml-common.h), which llama.cpp's
`--cache-type-k q8_0` stores with; llama.cpp refuses head dimensions that are no multiple of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.kv.grains import wide

SOURCE = "ggml q8_0: blocks of 32, scale max|x| / 127 stored in float16 (quantize_row_q8_0_ref)"


def store(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """What is read back of numbers stored as q8_0, in float64; `low` and `high` are those of each block.

    Example:
        >>> x = torch.cat([torch.tensor([127.0, 2.5, -2.5]), torch.zeros(29)])
        >>> store(x, x.min(), x.max())[:3].tolist()
        [127.0, 3.0, -3.0]
    """
    x = wide(x)
    d = torch.maximum(low.abs(), high.abs()).to(x.dtype) / 127
    ratio = x / d.masked_fill(d == 0, 1.0)
    integers = (ratio.abs() + 0.5).floor() * ratio.sign()
    return integers.double() * d.half().double()
