"""In which dtype numbers were held: their own, or a lesser one that they went through."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_ENOUGH = 32  # numbers, none of them 0 or 1, that would not all be those of a lesser dtype by chance
_LOOKED_AT = 4096


def held_in(numbers: Tensor, dtype: str) -> str:
    """The name of the least dtype that numbers were held in on their way: `dtype`, or a half one where all are of it.

    Example:
        >>> x = torch.linspace(0.1, 0.9, 64)
        >>> held_in(x, "float32"), held_in(x.half().float(), "float32")
        ('float32', 'float16')
    """
    known = getattr(torch, dtype)
    if known in _HALF or not numbers.is_floating_point():
        return dtype
    if numbers.dtype in _HALF:
        return _name(numbers.dtype)
    some = numbers.detach().flatten()
    some = some[:: max(1, some.numel() // _LOOKED_AT)]
    some = some[some.isfinite() & (some != 0) & (some != 1) & (some.abs() < 1e4)]
    if some.numel() < _ENOUGH:
        return dtype
    return next((_name(half) for half in _HALF if torch.equal(some.to(half).to(some.dtype), some)), dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
