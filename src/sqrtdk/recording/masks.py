"""Packs masks into few bytes: as a band of i - j with padding (causal, sliding window), or as one bit an entry."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedMask:
    """A bool mask (..., L, S), True where row i sees key j.

    Attributes:
        shape: shape of the mask.
        least: least i - j of a visible key (0 if causal); None is no bound.
        greatest: greatest i - j of a visible key (w - 1 for a window of w); None is no bound.
        padding: bool, (..., 1, S), True at keys that are real tokens; None if all are.
        bits: uint8, instead of these three: the entries in order, eight a byte, highest bit first.
    """

    shape: tuple[int, ...]
    least: int | None = None
    greatest: int | None = None
    padding: Tensor | None = None
    bits: Tensor | None = None


def band_mask(rows: int, keys: int, least: int | None, greatest: int | None) -> Tensor:
    """Return a bool (rows, keys) mask that is True where least <= i - j <= greatest.

    Example:
        >>> band_mask(3, 3, 0, 1).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if least is not None:  # clamp: an untrusted bound may lie beyond int64
        visible &= j <= i - max(min(least, rows), -keys)
    if greatest is not None:
        visible &= j >= i - max(min(greatest, rows), -keys)
    return visible


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
    if mask.dim() >= 2 and shape[-1] > 1 and bool(mask.any()):
        rows, keys = shape[-2:]
        seen = mask.reshape(-1, rows, keys).any(0)  # keys that a row sees in any batch entry or head
        seeing = seen.any(-1)
        first = seen.byte().argmax(-1)  # argmax gives the first of equal values
        last = keys - 1 - seen.flip(-1).byte().argmax(-1)
        i = torch.arange(rows)
        least, greatest = int((i - last)[seeing].min()), int((i - first)[seeing].max())
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
