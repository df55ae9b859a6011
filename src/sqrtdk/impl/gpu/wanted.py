"""The statistics that a kernel computes, as bits of a number: the fields of AuxOutput in order, and all of RowStats."""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.stats._partial import ROW_STATS_FIELDS
from sqrtdk.stats.request import AuxOutput

BITS = {name: 1 << place for place, name in enumerate(AuxOutput._fields)}
ROWS = 1 << len(BITS)  # all of RowStats
APART = ("lse", "entropy_nats")  # statistics with gradients, which have their own tensors


def bits_of(names: Iterable[str]) -> int:
    """Return the number that encodes these statistics, one bit for each.

    Args:
        names: Names of fields of `AuxOutput`.

    Example:
        >>> bits_of(["lse", "min_logit"])
        5
    """
    return sum(BITS[name] for name in names)


OWN_TENSORS = bits_of(APART)  # they take no plane


def planes_of(statistics: int) -> int:
    """Return how many planes (B, Hq, L) of the result `planes` the statistics fill.

    lse and the entropy fill none, as they have tensors of their own; if all of RowStats is requested, its fields do.

    Args:
        statistics: Bits as of `bits_of`, or ROWS.

    Example:
        >>> planes_of(bits_of(["lse", "min_logit", "peak"]))
        2
    """
    return len(ROW_STATS_FIELDS) if statistics & ROWS else (statistics & ~OWN_TENSORS).bit_count()
