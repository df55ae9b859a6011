"""Rows of a parameter multiplied in place: of a plain one, of a shard, and of the copies that an optimizer holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.repair.ranks import laid_as
from sqrtdk.repair.rows import Rows

if TYPE_CHECKING:
    from jaxtyping import Float


def scale_(parameter: Tensor, copies: Sequence[Tensor], pairs: Sequence[tuple[Rows, Float[Tensor, " Hq"]]]) -> None:
    """Multiply rows in place, and those of the copies; all others keep every bit."""
    axis, offset = pairs[0][0].axis, pairs[0][0].offset
    count = parameter.numel() if axis is None else parameter.shape[axis]
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    factor = torch.ones(count, dtype=dtype, device=parameter.device)
    for rows, by in pairs:
        factor[rows.index.to(factor.device)] = by.to(device=factor.device, dtype=dtype)[:, None].expand(
            rows.index.shape
        )
    shape = parameter.shape if axis is None else [count if i == axis else 1 for i in range(parameter.dim())]
    factor = laid_as(factor.view(shape), parameter)
    for tensor in copies or (parameter,):
        by = factor.to(tensor.device)
        if offset:
            tensor.copy_(torch.where(by == 1, tensor, (tensor + offset) * by - offset))
        else:
            tensor.mul_(by)
    if copies:  # what the optimizer would write back, to the bit
        parameter.copy_(torch.where(factor == 1, parameter, copies[0].to(parameter.device)))
