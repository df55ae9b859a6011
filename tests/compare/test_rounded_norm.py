"""Norms whose values were rounded to a lesser dtype at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sqrtdk.compare.compute import apply_norm
from sqrtdk.compare.observed import Seen
from sqrtdk.compare.program import Norm, Rounded, Way
from sqrtdk.compare.rounded_norm import rounded_norm, with_known_norm
from sqrtdk.tracing.tensors import Waypoint


def seen_of(projected: torch.Tensor, used: torch.Tensor) -> Seen:
    heads = torch.arange(projected.shape[1])
    return Seen(heads, used.double(), 1.0, projected=projected.double(), steps=(Waypoint("norm", "rms", used),))


@pytest.mark.parametrize("over", ["head", "heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_and_the_rounding_are_told_apart(dtype: torch.dtype, over: str) -> None:
    x = torch.randn(2, 4, 24, 8)
    norm = Norm("rms", 1 + 0.25 * torch.randn(4, 8), eps=1e-6, over=over)
    used = apply_norm(norm, x).to(dtype).float()
    found = rounded_norm(x, used, "rms", torch.float32)
    assert found is not None
    step, rounding = found
    assert (step.kind, step.over, rounding) == ("rms", over, Rounded(str(dtype).removeprefix("torch.")))
    assert not torch.equal(apply_norm(step, x).to(dtype).float(), used)  # its gain is fitted to rounded values
    known = with_known_norm(Way(steps=found), seen_of(x, used), Way(steps=(norm,)))
    assert isinstance(known.steps[0], Norm)
    assert torch.equal(apply_norm(known.steps[0], x).to(dtype).float(), used)


def test_another_norm_is_not_taken_for_it() -> None:
    x = torch.randn(2, 4, 24, 8)
    norm = Norm("rms", 1 + 0.25 * torch.randn(4, 8), eps=1e-6)
    used = apply_norm(norm, x).bfloat16().float()
    found = rounded_norm(x, used, "rms", torch.float32)
    assert found is not None
    way, other = Way(steps=found), replace(norm, gain=norm.gain * 1.1)
    assert with_known_norm(way, seen_of(x, used), Way(steps=(other,))) is way


def test_a_norm_that_was_not_rounded_has_no_rounding() -> None:
    x = torch.randn(2, 4, 24, 8)
    assert rounded_norm(x, apply_norm(Norm("rms", torch.ones(1, 8)), x).float(), "rms", torch.float32) is None
    assert rounded_norm(x, x.tanh().bfloat16().float(), "rms", torch.float32) is None
