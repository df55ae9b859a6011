"""The formats of a cache: one a file, each a pure function from numbers to what is read back; one literal table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from sqrtdk.kv.formats import fp8, int4, int8, q8_0


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        store: from numbers, and the least and largest of those that share a scale, to what is read back, in float64.
        bits: of one number, without its share of a scale.
        scale: the grain where none is asked for.
        grains: from the names that can be asked for to those of `sqrtdk.kv.grains`.
        source: where it is defined.
        most: the largest number that is stored, in units of the scale; None where a scale has a least number beside it
            or is the format's own, so that none can be fixed.
    """

    store: Callable[[Tensor, Tensor, Tensor], Tensor]
    bits: float
    scale: str
    grains: dict[str, str]
    source: str
    most: float | None = None


_ANY = {"tensor": "tensor", "head": "head", "token": "token", "channel": "channel"}
FORMATS: dict[str, Format] = {
    "fp8_e4m3": Format(fp8.store_e4m3, 8.0, "tensor", _ANY, fp8.SOURCE, fp8.MOST_E4M3),
    "fp8_e5m2": Format(fp8.store_e5m2, 8.0, "tensor", _ANY, fp8.SOURCE, fp8.MOST_E5M2),
    "int8": Format(int8.store, 8.0, "tensor", _ANY, int8.SOURCE, int8.MOST),
    "q8_0": Format(q8_0.store, 8.0, "block", {"block": "block"}, q8_0.SOURCE),
    "int4": Format(int4.store, 4.0, "group", _ANY | {"group": "group", "channel": "tokens64"}, int4.SOURCE),
}


def fixed(scale: str | float) -> float | None:
    """The number that a scale is fixed to; None for the name of a grain, whose scales are those of the numbers.

    Example:
        >>> fixed("1"), fixed("head")
        (1.0, None)
    """
    with suppress(ValueError):
        return float(scale)
    return None


def limit_of(dtype: str, scale: str) -> float | None:
    """The largest number that a fixed scale lets the format store; None where no scale is fixed.

    Example:
        >>> limit_of("fp8_e4m3", "1"), limit_of("int8", "tensor")
        (448.0, None)
    """
    most, number = FORMATS[dtype].most, fixed(scale)
    return None if number is None or most is None else number * most
