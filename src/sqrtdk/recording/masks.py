"""Masks in few bytes: a band of i - j with the keys that are tokens, or one bit an entry."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A bool mask (..., L, S), True where row i sees key j.

    Attributes:
        shape: of the mask.
        least: least i - j of a visible key; None: no bound.
        greatest: greatest i - j; None: no bound.
        padding: bool, (..., 1, S), True at keys that are tokens; None: all are.
        bits: uint8, in place of all three: the entries in order, eight a byte, the first is the highest bit.
    """

    shape: tuple[int, ...]
    least: int | None = None
    greatest: int | None = None
    padding: Tensor | None = None
    bits: Tensor | None = None


def band(rows: int, keys: int, least: int | None, greatest: int | None) -> Tensor:
    """A bool (rows, keys) mask: least <= i - j <= greatest.

    Example:
        >>> band(3, 3, 0, 1).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if least is not None:  # i - j may be beyond int64 for no size that is read, but a stranger's bound may be: clamped
        visible &= j <= i - max(min(least, rows), -keys)
    if greatest is not None:
        visible &= j >= i - max(min(greatest, rows), -keys)
    return visible


def pack(mask: Tensor) -> Packed:
    """The mask in the form that takes least room and gives it back exactly.

    Args:
        mask: bool, on the CPU.

    Example:
        >>> packed = pack(torch.ones(4, 4, dtype=torch.bool).tril())
        >>> packed.least, packed.greatest, packed.padding, packed.bits
        (0, None, None, None)
    """
    shape = tuple(mask.shape)
    if mask.dim() >= 2 and shape[-2] == 1:  # the same for every row: bounds of i - j would say nothing
        return Packed(shape, padding=mask)
    if mask.dim() >= 2 and shape[-1] > 1 and bool(mask.any()):
        rows, keys = shape[-2:]
        seen = mask.reshape(-1, rows, keys).any(0)
        seeing = seen.any(-1)
        first = seen.byte().argmax(-1)
        last = keys - 1 - seen.flip(-1).byte().argmax(-1)
        i = torch.arange(rows)
        least, greatest = int((i - last)[seeing].min()), int((i - first)[seeing].max())
        seen_keys = mask.any(-2, keepdim=True)
        # the fewest bounds that do: where padding hides keys, those of the rule may be wider than what is left
        for low, high in ((None, None), (least, None), (None, greatest), (least, greatest)):
            visible = band(rows, keys, low, high)
            padding = seen_keys | ~visible.any(-2, keepdim=True)  # a key that the band shows to no row is no padding
            if torch.equal((visible & padding).expand(shape), mask):
                return Packed(shape, low, high, None if bool(padding.all()) else padding)
    return Packed(shape, bits=torch.from_numpy(numpy.packbits(mask.contiguous().numpy())))


def unpack(packed: Packed) -> Tensor:
    """The mask again.

    Example:
        >>> mask = torch.rand(2, 1, 5, 7) > 0.5
        >>> bool((unpack(pack(mask)) == mask).all())
        True
    """
    if packed.bits is not None:
        count = math.prod(packed.shape)
        entries = numpy.unpackbits(packed.bits.numpy(), count=count)
        return torch.from_numpy(entries.view(numpy.bool_)).reshape(packed.shape)
    rows, keys = packed.shape[-2:]
    visible = band(rows, keys, packed.least, packed.greatest)
    if packed.padding is not None:
        visible = visible & packed.padding.bool()
    return visible.expand(packed.shape).clone()


def bits_needed(shape: tuple[int, ...]) -> int:
    """Bytes of the bits of a mask.

    Example:
        >>> bits_needed((3, 3))
        2
    """
    return -(-math.prod(shape) // 8)
