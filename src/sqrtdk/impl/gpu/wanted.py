"""Which statistics a kernel gives, as bits of a number: the fields of AuxOutput in their order, and all of RowStats."""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.stats._partial import FIELDS
from sqrtdk.stats.request import AuxOutput

BITS = {name: 1 << place for place, name in enumerate(AuxOutput._fields)}
ROWS = 1 << len(BITS)  # all of RowStats
APART = ("lse", "entropy")  # statistics that carry gradients, and have tensors of their own


def bits_of(names: Iterable[str]) -> int:
    """The number that stands for these statistics.

    Example:
        >>> bits_of(["lse", "min_scores"])
        5
    """
    return sum(BITS[name] for name in names)


OWN_TENSORS = bits_of(APART)  # which take no plane


def planes_of(statistics: int) -> int:
    """How many planes the statistics fill.

    Example:
        >>> planes_of(bits_of(["lse", "min_scores", "peak"]))
        2
    """
    return len(FIELDS) if statistics & ROWS else (statistics & ~OWN_TENSORS).bit_count()
