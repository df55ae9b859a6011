"""The name of a mask's pattern, and how far its rows see.

    "causal"              torch.ones(L, S).tril(), row i sees keys 0 to i
    "causal_lower_right"  torch.ones(L, S).tril(S - L), the last row sees the last key: a decoder with a cache
    "window"              a band that hides keys on one side or both
    "padding"             the same keys for all rows
    "mask"                anything else

Padding is no evidence against a pattern: a row that no batch entry lets see a key, or a key that no row sees, is left
out. A causal mask beside left padding is still "causal".
"""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from sqrtdk.masks.band import band_around, band_mask

TRIANGLES = ("causal", "causal_lower_right")


class MaskReach(TypedDict, total=False):
    """How far the rows of a mask see, by the fields of the trace's `Mask`."""

    least: int
    greatest: int
    band: bool
    ahead_by_one: int


def distinct(visible: Tensor) -> Tensor:
    """Returns the mask with every broadcast leading axis (stride 0) shrunk to size 1."""
    for axis in range(visible.dim() - 2):
        if visible.stride(axis) == 0 and visible.shape[axis] > 1:
            visible = visible.narrow(axis, 0, 1)
    return visible


def mask_reach(visible: Tensor, stands: int = 1) -> MaskReach:
    """Returns how far the rows of a mask see; {} if every key is hidden.

    Args:
        visible: (..., L, S), True where the row sees the key.
        stands: how many matrices of the attention each matrix stands for.

    Example:
        >>> mask_reach(band_mask(4, 4, -1, None))
        {'least': -1, 'greatest': 3, 'band': True, 'ahead_by_one': 1}
    """
    rows, keys = visible.shape[-2:]
    matrices = visible.reshape(-1, rows, keys)
    around = band_around(matrices)
    if around is None:
        return {}
    live, blind = matrices.any(-2, keepdim=True), ~matrices.any(-1, keepdim=True)
    between = band_mask(rows, keys, *around, visible.device) & live
    # tril(1) for tril(): every row sees one key past its own, and at least one such key is there to see
    shifted = ((matrices == (band_mask(rows, keys, -1, None, visible.device) & live)) | blind).all((-1, -2))
    shifted &= (matrices & band_mask(rows, keys, -1, -1, visible.device)).any((-1, -2))
    return {
        "least": around[0],
        "greatest": around[1],
        "band": bool(((matrices == between) | blind).all()),
        "ahead_by_one": int(shifted.sum()) * stands,
    }


def mask_pattern(visible: Tensor) -> str | None:
    """Returns the pattern of visible keys (..., L, S): "causal", "window", ..., or None if every key is visible.

    Example:
        >>> mask_pattern(band_mask(5, 5, 0, None)), mask_pattern(band_mask(3, 5, -2, None))
        ('causal', 'causal_lower_right')
        >>> mask_pattern(band_mask(5, 5, 0, 2)), mask_pattern(band_mask(1, 3, -1, None).expand(4, 3))
        ('window', 'padding')
    """
    if bool(visible.all()):
        return None
    if bool((visible == visible[..., :1, :]).all()):
        return "padding"
    rows, keys = visible.shape[-2:]
    shown = visible.reshape(-1, rows, keys).any(0)
    unknown = ~shown.any(-1, keepdim=True)
    corner = rows - keys  # i - j of the last row and key
    for name, least in zip(TRIANGLES, (0, corner), strict=True):
        if bool(((shown == band_mask(rows, keys, least, None, shown.device)) | unknown).all()):
            return name
    around = band_around(shown)
    # A band that only lets rows see a few keys ahead, tril(2), is no window.
    if around is None or (around[0] < corner and around[1] - corner >= rows - 1):
        return "mask"
    banded = bool(((shown == band_mask(rows, keys, *around, shown.device)) | unknown).all())
    return "window" if banded else "mask"
