"""Packs masks into few bytes: as a band of i - j with padding (causal, sliding window), or as one bit an entry."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from sqrtdk.masks.band import band_around, band_mask


@dataclass(frozen=True, slots=True, eq=False)
class PackedMask:
    """A bool mask (..., L, S), True where row i sees key j.

    Attributes:
        shape: shape of the mask.
        least: least i - j of a visible key (0 if causal); None means no bound.
        greatest: greatest i - j of a visible key (w - 1 for a window of w); None means no bound.
        padding: bool, (..., 1, S), True at keys that are real tokens; None if all are.
        bits: uint8, instead of these three: the entries in order, eight a byte, highest bit first.
    """

    shape: tuple[int, ...]
    least: int | None = None
    greatest: int | None = None
    padding: Tensor | None = None
    bits: Tensor | None = None


def pack_mask(mask: Tensor) -> PackedMask:
    """Return the smallest form that restores the mask exactly.

    Args:
        mask: bool, on the CPU.

    Example:
        >>> packed = pack_mask(torch.ones(4, 4, dtype=torch.bool).tril())
        >>> packed.least, packed.greatest, packed.padding, packed.bits
        (0, None, None, None)
    """
    shape = tuple(mask.shape)
    if mask.dim() >= 2 and shape[-2] == 1:  # one row for all queries: bounds of i - j would say nothing
        return PackedMask(shape, padding=mask)
    around = band_around(mask) if mask.dim() >= 2 and shape[-1] > 1 else None
    if around is not None:
        (rows, keys), (least, greatest) = shape[-2:], around
        seen_keys = mask.any(-2, keepdim=True)
        # try the fewest bounds first: padding may hide keys, so that the visible ones look narrower than the true band
        for low, high in ((None, None), (least, None), (None, greatest), (least, greatest)):
            visible = band_mask(rows, keys, low, high)
            # a key that the band hides from all rows need not be padding
            padding = seen_keys | ~visible.any(-2, keepdim=True)
            if torch.equal((visible & padding).expand(shape), mask):
                return PackedMask(shape, low, high, None if bool(padding.all()) else padding)
    return PackedMask(shape, bits=torch.from_numpy(numpy.packbits(mask.contiguous().numpy())))


def unpack_mask(packed: PackedMask) -> Tensor:
    """Return the mask that was packed.

    Example:
        >>> mask = torch.rand(2, 1, 5, 7) > 0.5
        >>> bool((unpack_mask(pack_mask(mask)) == mask).all())
        True
    """
    if packed.bits is not None:
        count = math.prod(packed.shape)
        entries = numpy.unpackbits(packed.bits.numpy(), count=count)
        return torch.from_numpy(entries.view(numpy.bool_)).reshape(packed.shape)
    rows, keys = packed.shape[-2:]
    visible = band_mask(rows, keys, packed.least, packed.greatest)
    if packed.padding is not None:
        visible = visible & packed.padding.bool()
    return visible.expand(packed.shape).clone()


def bits_needed(shape: tuple[int, ...]) -> int:
    """Return the number of bytes that a mask takes at one bit an entry.

    Example:
        >>> bits_needed((3, 3))
        2
    """
    return -(-math.prod(shape) // 8)
