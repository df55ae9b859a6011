"""An operation whose computation is not seen, known by its effect: a rotation keeps the length of every vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ROTATION = "rotation"
_KEPT = 1e-3


def rotated_argument(args: Sequence[Any], output: Tensor) -> int | None:
    """Position of the argument that `output` is a rotation of, by the tables among the others; None where it is none.

    Every vector keeps its length, some of them move, and a table fits the vectors: cosines and sines, or points.
    """
    if output.is_meta or output.is_nested or not output.is_floating_point() or output.dim() < 2 or not output.numel():
        return None
    tensors = {i: arg for i, arg in enumerate(args) if isinstance(arg, Tensor)}
    vectors = {i: x for i, x in tensors.items() if x.shape == output.shape and x.dtype == output.dtype}
    width = output.shape[-1]
    if not any(i not in vectors and _is_table(x, width) for i, x in tensors.items()):
        return None
    return next((i for i, x in vectors.items() if _keeps_lengths(x.detach(), output.detach())), None)


def _is_table(x: Tensor, width: int) -> bool:
    return (x.is_floating_point() or x.is_complex()) and x.dim() > 1 and x.shape[-1] in (width, width // 2)


def _keeps_lengths(before: Tensor, after: Tensor) -> bool:
    if before.data_ptr() == after.data_ptr() or torch.equal(before, after):
        return False
    old, new = (x.to(torch.float32).norm(dim=-1) for x in (before, after))
    rounding = _KEPT + 4 * torch.finfo(after.dtype).eps
    return bool(((new - old).abs() <= rounding * old).all()) and bool((old > 0).any())
