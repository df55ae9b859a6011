"""Four-bit integers, asymmetric: x -> scale * round((x - low) / scale) + low, scale = (high - low) / 15, in float32
(float64 of float64).

Sixteen levels from the least to the largest number of a group; scale and least number in 16 bits each: 4.5 bits a
number in groups of 64.

Source: transformers' `QuantizedCache(backend="quanto", nbits=4, q_group_size=64)`, that is optimum-quanto's
`MaxOptimizer` and `quantize_affine`: "group" is its axis 0 (the default), "channel" its axis -1, which is what KIVI
(Liu et al. 2024) does to keys.
Differs from: the HQQ backend, which fits the zero point afterwards (Badri and Shaji 2023), and engines that round scale
and least number to 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.kv.grains import wide

LEVELS = 15
SOURCE = "asymmetric int4 in groups of 64 (transformers' QuantizedCache with quanto: MaxOptimizer)"


def store(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """What is read back of numbers stored as int4, in float64.

    Example:
        >>> x = torch.tensor([-1.0, 14.0, 3.4])
        >>> store(x, x.min(), x.max()).tolist()
        [-1.0, 14.0, 3.0]
    """
    x = wide(x)
    low = low.to(x.dtype)
    scale = ((high.to(x.dtype) - low) / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
    return (((x - low) / scale).round().clamp(0, LEVELS) * scale + low).double()
