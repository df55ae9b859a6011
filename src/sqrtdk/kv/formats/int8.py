"""Eight-bit integers, symmetric: x -> scale * round(x / scale), scale = max|x| / 127, in float32 (float64 of float64).

The integers go from -127 to 127; halves round to even.

Source: Jacob et al. 2018, "Quantization and training of neural networks for efficient integer-arithmetic-only
inference", with a zero point of 0; TensorRT-LLM's INT8 cache has one scale a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.kv.grains import wide

MOST = 127
SOURCE = "symmetric int8, scale max|x| / 127 (Jacob et al. 2018, zero point 0; TensorRT-LLM's INT8 cache)"


def store(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """What is read back of numbers stored as int8, in float64.

    Example:
        >>> x = torch.tensor([127.0, -3.4, 0.6])
        >>> store(x, x.min(), x.max()).tolist()
        [127.0, -3.0, 1.0]
    """
    x = wide(x)
    largest = torch.maximum(low.abs(), high.abs()).to(x.dtype)
    scale = (largest / MOST).clamp(min=torch.finfo(torch.float32).tiny)
    return ((x / scale).round().clamp(-MOST, MOST) * scale).double()
