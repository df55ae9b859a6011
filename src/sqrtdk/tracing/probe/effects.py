"""What operations without a reader do to a vector or to logits, decided by values.

A part of the graph (`replays`) gets numbers that tell where each entry went, and is concluded only if other numbers
come out as that says: every entry of the result is one entry of the source times one factor. So is a `flip`, a
permutation by any operation, a Fourier transform with its inverse, a custom operator that doubles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.probe.replays import Part, inwards
from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.watch.graph import Node

_DEEPEST = 8  # operations inwards
_ONE = 1e-4
_NEAR = 0.02  # of a whole number, that it is one: numbers go up to 2^22, with rounding of float64
# Relative, of the check by other numbers: a rounding of float32, in which a kernel may compute whatever it is given;
# eight of them where operations run in float32.
_SAME = {torch.float64: 2.0**-24, torch.float32: 2.0**-20}


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """Every entry of `part.end` is one of `part.source`, times `by`.

    Attributes:
        part: the operations.
        by: the factor.
        order: for each entry of the end the number of its entry in the source, flat.
    """

    part: Part
    by: float
    order: Tensor

    def factor(self, where: str) -> Factor | None:
        """What it multiplies by, for the record; None where that is 1, but for the rounding of what gave it."""
        return None if math.isclose(self.by, 1.0, rel_tol=_ONE) else Factor(self.by, where, self.part.effect)

    @property
    def in_place(self) -> bool:
        """Whether each entry is where it was."""
        same = self.part.source.shape == self.part.end.shape
        return same and torch.equal(self.order, torch.arange(len(self.order), device=self.order.device))

    def place(self, value: Tensor) -> Tensor:
        """Values of the source in the places of the end, without the factor."""
        return value.reshape(-1)[self.order.to(value.device)].reshape(self.part.end.shape)


def moved(node: Node) -> Iterator[Moved]:
    """The parts that end in `node` and only move entries and multiply them by one number, the shortest first."""
    for part in inwards(node, _DEEPEST):
        if part.is_large:
            return
        for dtype in (torch.float64, torch.float32):
            try:
                found = _moved(part, dtype)
            except Exception:  # an operation that does not take the dtype, or these numbers
                continue
            if found is not None:
                yield found
            break


def _random(part: Part, dtype: torch.dtype) -> Tensor:
    return torch.randn(part.source.shape, dtype=dtype, generator=torch.Generator().manual_seed(0)).to(part.device)


def _moved(part: Part, dtype: torch.dtype) -> Moved | None:
    count = math.prod(part.source.shape)
    numbers = torch.arange(1.0, count + 1.0, dtype=dtype, device=part.device).reshape(part.source.shape)
    if not count or (dtype == torch.float32 and count > 2**12):  # whole numbers must survive its rounding
        return None
    zero, ones = part.run(torch.zeros_like(numbers)), part.run(torch.ones_like(numbers))
    if zero.is_complex() or not zero.is_floating_point() or not zero.numel() or tuple(zero.shape) != part.end.shape:
        return None
    by = float(ones.double().mean())
    rounding = _SAME[dtype] * abs(by)
    if not by or not math.isfinite(by) or any(bool((gap.abs() > rounding).any()) for gap in (zero, ones - by)):
        return None
    places = part.run(numbers).double() / by
    order = places.round()
    if bool(((places - order).abs() > _NEAR).any()) or bool((order < 1).any()) or bool((order > count).any()):
        return None
    found = Moved(part, by, order.long().flatten() - 1)
    other = _random(part, dtype)
    for scale in (1.0, 64.0):
        gap = part.run(scale * other).double() - by * scale * found.place(other).double()
        if bool((gap.abs() > 16 * rounding * scale).any()):
            return None
    return found
