"""Norms of both sides, pair by pair."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sqrtdk.compare.causes._parts import norms, rotation, way
from sqrtdk.compare.program import Norm, Rotation, Way
from sqrtdk.compare.suspect import Sides

WORDS = {"rms": "RMS", "layer": "LayerNorm", "l2": "L2"}


def pairs(sides: Sides, part: str) -> Iterator[tuple[int, Norm, Norm]]:
    """Norms of A and B of the same number, counted from 0."""
    for place, (a, b) in enumerate(zip(norms(way(sides.a, part)), norms(way(sides.b, part)), strict=False)):
        yield place, a, b


def equivalent(a: Norm, b: Norm, features: int, tolerance: float) -> bool:
    """One is "rms", the other "l2" with a gain that is sqrt(features) times as large: the same, but for eps."""
    if {a.kind, b.kind} != {"rms", "l2"} or a.over != b.over:
        return False
    rms, l2 = (a, b) if a.kind == "rms" else (b, a)
    return bool(torch.isclose(l2.gain, rms.gain * features**0.5, rtol=tolerance, atol=0).all())


def other_kind(a: Norm, b: Norm, features: int, tolerance: float) -> str | None:
    """The kind of B where both are said to be "rms", and the gain of one is 1/sqrt(features) of the other's: "l2"."""
    if (a.kind, b.kind) != ("rms", "rms") or a.over != b.over or features == 1:
        return None
    for kind, power in (("l2", -0.5), ("rms", 0.5)):
        if bool(torch.isclose(b.gain, a.gain * features**power, rtol=tolerance, atol=0).all()):
            return kind
    return None


def features_of(norm: Norm, sides: Sides, part: str) -> int:
    """How many features are normalised together."""
    affine = way(sides.a, part).affine or way(sides.b, part).affine
    heads = len(affine.weight) if affine is not None else len(norm.gain) if part == "key" else sides.heads
    return sides.head_dim * (heads if norm.over == "heads" else 1)


def commutes(norm: Norm, turned: Rotation | None) -> bool:
    """Whether it does not matter which of the two comes first: lengths stay, and so does the gain of a pair."""
    if turned is None:
        return True
    if norm.kind == "layer" or norm.shift is not None or not bool((turned.table.abs() - 1).abs().max() < 1e-6):
        return False
    first, second = _pair_channels(norm.gain, turned)
    return bool(torch.isclose(first, second, rtol=1e-6, atol=0).all())


def norms_before_rotation(steps: Way) -> int | None:
    """How many norms come before the rotation; None where there is none."""
    if rotation(steps) is None:
        return None
    at = next(i for i, step in enumerate(steps.steps) if isinstance(step, Rotation))
    return sum(isinstance(step, Norm) for step in steps.steps[:at])


def _pair_channels(gain: Tensor, turned: Rotation) -> tuple[Tensor, Tensor]:
    part = gain[..., turned.first : turned.first + turned.width]
    if part.shape[-1] != turned.width:  # one gain for all channels
        return part, part
    if turned.layout == "half":
        return part[..., : turned.width // 2], part[..., turned.width // 2 :]
    return part[..., ::2], part[..., 1::2]
