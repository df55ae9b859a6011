"""Eight-bit floating point: x -> scale * fp8(x / scale), scale = max|x| / largest, in float32.

e4m3 has 3 bits of mantissa and 448 as its largest number, e5m2 2 bits and 57344. The cast rounds to nearest, ties to
even, and saturates: what lies beyond the largest number becomes that number. That happens under a fixed scale alone.

Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; the scale as in transformers' `Fp8QuantizedLayer`
(one a tensor) and vLLM's calibrated k_scale and v_scale (one a tensor, or a head).
Differs from: torch's own cast, which gives NaN (e4m3) or infinity (e5m2) there; engines saturate.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_E4M3, MOST_E5M2 = (torch.finfo(dtype).max for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
SOURCE = "FP8 (Micikevicius et al. 2022); scale max|x| / largest as in transformers' Fp8QuantizedLayer"


def store_e4m3(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """What is read back of numbers stored as `torch.float8_e4m3fn`, in float64.

    Example:
        >>> x = torch.tensor([448.0, 1.0, 1.1])
        >>> store_e4m3(x, x.min(), x.max()).tolist()
        [448.0, 1.0, 1.125]
    """
    return _store(x, low, high, torch.float8_e4m3fn)


def store_e5m2(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """What is read back of numbers stored as `torch.float8_e5m2`, in float64.

    Example:
        >>> x = torch.tensor([57344.0, 1.0, 1.1])
        >>> store_e5m2(x, x.min(), x.max()).tolist()
        [57344.0, 1.0, 1.0]
    """
    return _store(x, low, high, torch.float8_e5m2)


def _store(x: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.maximum(low.abs(), high.abs()).float()
    most = torch.finfo(dtype).max
    scale = (largest / most).clamp(min=torch.finfo(torch.float32).tiny)
    return ((x.float() / scale).clamp(-most, most).to(dtype).float() * scale).double()
