"""A norm whose values were rounded to a lesser dtype before anything else was done with them.

A side tells such a norm and the rounding as one step. What the norm gave before is known no better than the lesser
dtype holds it: its gain and eps are the other side's where these give the values as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.agreement import agrees
from sqrtdk.compare.compute import dtype_of
from sqrtdk.compare.fit import fit_norm
from sqrtdk.compare.observed import Seen
from sqrtdk.compare.program import Norm, Rounded, Way
from sqrtdk.compare.rounded_factor import LESSER


def rounded_norm(before: Tensor, after: Tensor, kind: str, dtype: torch.dtype) -> tuple[Norm, Rounded] | None:
    """A norm and a rounding that give the values, (B, H, L, E), of a side that computes in `dtype`; None without one.

    Example:
        >>> x = torch.randn(2, 4, 16, 8)
        >>> y = torch.nn.functional.rms_norm(x, (8,), eps=1e-6).bfloat16().float()
        >>> norm, rounding = rounded_norm(x, y, "rms", torch.float32)
        >>> norm.kind, rounding.dtype
        ('rms', 'bfloat16')
    """
    for lesser in LESSER:
        if torch.finfo(lesser).eps <= torch.finfo(dtype).eps or not torch.equal(
            after.to(lesser).to(after.dtype), after
        ):
            continue
        norm = fit_norm(before, after, kind, dtype=lesser)
        if norm is not None:
            return norm.norm, Rounded(str(lesser).removeprefix("torch."))
    return None


def with_known_norm(way: Way, seen: Seen, other: Way) -> Way:
    """The way with the numbers of the other side's norms in its own, if that was rounded and they give its values."""
    rounding = way.steps[-1] if len(way.steps) == len(seen.steps) + 1 else None
    if seen.projected is None or not isinstance(rounding, Rounded) or rounding.dtype == "int8":
        return way
    norm = way.steps[-2] if len(way.steps) > 1 else None  # `q.half().float()` has no norm before the rounding
    if not isinstance(norm, Norm):
        return way
    before = way.steps[:-2]
    unit = torch.finfo(dtype_of(rounding.dtype)).eps / 2
    for tried in _nearer(norm, [step for step in other.steps if isinstance(step, Norm)]):
        if agrees((*before, tried), seen.projected.double(), seen.used.double(), unit):
            return replace(way, steps=(*before, tried, rounding))
    return way


def _nearer(step: Norm, norms: list[Norm]) -> Iterator[Norm]:
    """The norm with the numbers of each of others, then with all but their eps."""
    for known in norms:
        if known.kind == step.kind:
            yield replace(step, gain=known.gain, shift=known.shift, eps=known.eps)
            yield replace(step, gain=known.gain, shift=known.shift)
