"""Bands, and the patterns that a mask shows: row i sees the keys j with least <= i - j <= greatest.

    Band(0, None)     causal, torch.ones(L, S).tril(): row i sees keys 0 to i
    Band(L - S, None) causal at the lower right corner, as with a cache: the last row sees the last key
    Band(0, 7)        a causal window of 8 keys, the row's own among them
    Band(-2, 2)       a window of two keys on either side

A bound on i - j needs no sizes and no memory, so kernels take the two numbers and files store them. Any other mask is
taken apart into a band and the rest by `sqrtdk.masks.decompose`.

Padding is no evidence against a band: rows that see no key are left out, and keys that no row sees where distances are
read. A pattern is that of all batch entries together, so one entry without padding shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

TRIANGLES = ("causal", "causal_lower_right")  # torch.ones(L, S).tril() and torch.ones(L, S).tril(S - L)


class Band(NamedTuple):
    """The bounds of i - j; None means no bound.

    Attributes:
        least: keys after i - least come too late.
        greatest: keys before i - greatest lie too far back.
    """

    least: int | None = None
    greatest: int | None = None


def in_band(i: Int[Tensor, "*#B R 1"], j: Int[Tensor, " S"], band: Band) -> Bool[Tensor, "*#B R S"]:
    """Return True where the row at position i sees the key at position j.

    The positions are compared as they are. Their differences would take 8 bytes a pair.

    Args:
        i: the positions of the rows, (..., R, 1).
        j: the positions of the keys, (S,).
        band: the bounds of i - j; at least one of them is not None.

    Returns:
        Bool, (..., R, S).
    """
    in_time = None if band.least is None else j <= i - band.least
    near = None if band.greatest is None else j >= i - band.greatest
    if in_time is not None and near is not None:
        return in_time & near
    bounded = near if in_time is None else in_time
    assert bounded is not None
    return bounded


def band_mask(
    rows: int, keys: int, least: int | None, greatest: int | None, device: torch.device | None = None
) -> Tensor:
    """Return the bool mask (L, S) that is True where least <= i - j <= greatest.

    Row i and key j are at the positions i and j, counted from 0.

    Args:
        rows: L.
        keys: S.
        least: the least visible i - j; None is no bound.
        greatest: the greatest visible i - j; None is no bound.
        device: device of the mask; None is the default device.

    Example:
        >>> band_mask(2, 3, 0, None).int().tolist()
        [[1, 0, 0], [1, 1, 0]]
        >>> band_mask(3, 3, 0, 1).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    def near(bound: int) -> int:
        return max(min(bound, rows), -keys)  # the bound of an untrusted file may lie beyond int64

    inside = torch.ones(rows, keys, dtype=torch.bool, device=device)
    inside = inside if least is None else inside.tril_(-near(least))
    return inside if greatest is None else inside.triu_(-near(greatest))


def keys_in_band(i: Int[Tensor, "R 1"], keys: int, band: Band) -> Int[Tensor, "R 1"]:
    """Return how many of the keys 0 to `keys` - 1 each row sees, int64, (R, 1), computed without a mask.

    Args:
        i: the positions of the rows, (R, 1).
        keys: S.
        band: the bounds of i - j.

    Example:
        >>> keys_in_band(torch.arange(4)[:, None], 4, Band(0, 1)).flatten().tolist()
        [1, 2, 2, 2]
    """
    first = torch.zeros_like(i) if band.greatest is None else (i - band.greatest).clamp(min=0)
    last = torch.full_like(i, keys - 1) if band.least is None else (i - band.least).clamp(max=keys - 1)
    return (last - first + 1).clamp(min=0)


def distances(rows: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Return i - j of every row i and key j, int64, (L, S), both counted from 0."""
    return torch.arange(rows, device=device)[:, None] - torch.arange(keys, device=device)


def first_and_last(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the first and the last key that each row sees, two int64 tensors (..., L).

    A row that sees no key gets S as its first key and -1 as its last.

    Args:
        visible: bool, (..., L, S), True where the row sees the key.
    """
    keys, some, flags = visible.shape[-1], visible.any(-1), visible.byte()
    first, last = flags.argmax(-1), keys - 1 - flags.flip(-1).argmax(-1)  # argmax gives the first of equal values
    return torch.where(some, first, keys), torch.where(some, last, -1)


def band_around(visible: Tensor) -> tuple[int, int] | None:
    """Return the least and greatest i - j of a visible key of (..., L, S); None if every key is hidden.

    Example:
        >>> band_around(torch.tensor([[1, 0, 0], [1, 0, 0], [0, 0, 1]]).bool())
        (0, 1)
    """
    shown = visible.flatten(0, -3).any(0) if visible.dim() > 2 else visible
    seeing = shown.any(-1)
    if not bool(seeing.any()):
        return None
    (first, last), i = first_and_last(shown), torch.arange(len(shown), device=shown.device)
    return int((i - last)[seeing].min()), int((i - first)[seeing].max())


# -- what a mask shows -------------------------------------------------------------------------------------------------


class MaskReach(TypedDict, total=False):
    """How far the rows of a mask see. All keys are absent for a mask that hides every key.

    Attributes:
        least: least i - j of a visible key; negative if a row sees keys after its own position.
        greatest: greatest i - j of a visible key.
        band: whether every row that sees any key sees all keys within these bounds, except keys that no row sees.
        ahead_by_one: the number of (L, S) matrices that are causal but one key too far, `tril(1)` in place of `tril()`.
    """

    least: int
    greatest: int
    band: bool
    ahead_by_one: int


def mask_reach(visible: Tensor, stands: int = 1) -> MaskReach:
    """Return how far the rows of a mask see; {} if every key is hidden.

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
    """Return the pattern of visible keys (..., L, S), or None if every key is visible.

    The patterns are those of `TRIANGLES`; "window", a band that hides keys on one side or both; "padding", the same
    keys for all rows; and "mask", anything else.

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
    # A band that only lets rows see a few keys ahead, tril(2), is not a window.
    if around is None or (around[0] < corner and around[1] - corner >= rows - 1):
        return "mask"
    banded = bool(((shown == band_mask(rows, keys, *around, shown.device)) | unknown).all())
    return "window" if banded else "mask"
