"""The formats of a cache: one a file, each a pure function from numbers to what is read back; one literal table."""

from __future__ import annotations

from collections.abc import Callable
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
    """

    store: Callable[[Tensor, Tensor, Tensor], Tensor]
    bits: float
    scale: str
    grains: dict[str, str]
    source: str


_ANY = {"tensor": "tensor", "head": "head", "token": "token", "channel": "channel"}
FORMATS: dict[str, Format] = {
    "fp8_e4m3": Format(fp8.store_e4m3, 8.0, "tensor", _ANY, fp8.SOURCE),
    "fp8_e5m2": Format(fp8.store_e5m2, 8.0, "tensor", _ANY, fp8.SOURCE),
    "int8": Format(int8.store, 8.0, "tensor", _ANY, int8.SOURCE),
    "q8_0": Format(q8_0.store, 8.0, "block", {"block": "block"}, q8_0.SOURCE),
    "int4": Format(int4.store, 4.0, "group", _ANY | {"group": "group", "channel": "tokens64"}, int4.SOURCE),
}
