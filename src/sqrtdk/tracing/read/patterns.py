"""Patterns of visible keys: the name of one, and how far its rows see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TRIANGLES = ("causal", "causal_lower_right")


def distinct(visible: Tensor) -> Tensor:
    """The same, with each of the leading axes that only repeats a mask shrunk to 1."""
    for axis in range(visible.dim() - 2):
        if visible.stride(axis) == 0 and visible.shape[axis] > 1:
            visible = visible.narrow(axis, 0, 1)
    return visible


def reach(visible: Tensor, stands: int = 1) -> dict[str, Any]:
    """Which keys the rows of (..., L, S) see, as `least`, `greatest`, `band` and `ahead_by_one` of a `Mask`.

    Keys that no row sees and rows that see no key are padding, and say nothing. Nothing of a mask that hides all.
    Each matrix stands for as many of the attention's.
    """
    rows, columns = visible.shape[-2:]
    matrices = visible.reshape(-1, rows, columns)
    i = torch.arange(rows, device=visible.device)[:, None]
    distance = i - torch.arange(columns, device=visible.device)[None, :]
    distances = distance[matrices.any(0)]
    if not distances.numel():
        return {}
    least, greatest = int(distances.min()), int(distances.max())
    live, blind = matrices.any(-2, keepdim=True), ~matrices.any(-1, keepdim=True)
    between = (distance >= least) & (distance <= greatest) & live
    shifted = ((matrices == ((distance >= -1) & live)) | blind).all((-1, -2))
    shifted &= (matrices & (distance == -1)).any((-1, -2))
    return {
        "least": least,
        "greatest": greatest,
        "band": bool(((matrices == between) | blind).all()),
        "ahead_by_one": int(shifted.sum()) * stands,
    }


def pattern(visible: Tensor) -> str | None:
    """Name the pattern of visible keys of (..., L, S): "causal", "window", ... or None where every key is seen."""
    if bool(visible.all()):
        return None
    if bool((visible == visible[..., :1, :]).all()):
        return "padding"
    rows, columns = visible.shape[-2:]
    shown = visible.reshape(-1, rows, columns).any(0)
    i = torch.arange(rows, device=visible.device)[:, None]
    j = torch.arange(columns, device=visible.device)[None, :]
    # A row that sees nothing in any batch element (padding on the left) says nothing about the pattern.
    known = shown.any(-1, keepdim=True)
    for name, offset in (("causal", 0), ("causal_lower_right", columns - rows)):
        if bool(((shown == (j <= i + offset)) | ~known).all()):
            return name
    band = i - j + (columns - rows if columns != rows else 0)
    if bool(shown.any()):
        low, high = int(band[shown].min()), int(band[shown].max())
        if (low >= 0 or high < rows - 1) and bool(((shown == ((band >= low) & (band <= high))) | ~known).all()):
            return "window"
    return "mask"
