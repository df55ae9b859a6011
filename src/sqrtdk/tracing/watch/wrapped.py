"""Weights that are tensors of a class of their own, and hold plain tensors: quantised weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_DEEPEST = 4  # tensors within tensors


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: of a DTensor the plain one in it."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, Tensor) else tensor


def within(tensor: Tensor, depth: int = 0) -> Iterator[Tensor]:
    """The tensor, and those that it holds where its class is a stranger's."""
    yield tensor
    if type(tensor) in (Tensor, nn.Parameter, torch.nn.Buffer) or depth == _DEEPEST:
        return
    for item in vars(tensor).values():
        if isinstance(item, Tensor):
            yield from within(item, depth + 1)
