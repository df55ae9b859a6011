"""A factor or a norm and a rounding to a lesser dtype at once, told from the values before and after both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sqrtdk.compare.infer.vectors import with_known_step
from sqrtdk.compare.inside.build import rounded_step
from sqrtdk.compare.inside.call_numbers import ObservedVector, rounded_factor
from sqrtdk.compare.inside.compute import apply_norm
from sqrtdk.compare.inside.program import NormStep, RoundingStep, VectorPath
from sqrtdk.tracing.tensors import Waypoint

FACTORS = {
    "one": torch.tensor(0.288675),
    "negative": torch.tensor(-0.7),
    "heads": torch.tensor([0.05, 1.3, -2.0])[:, None, None],
    "rows": torch.arange(1.0, 13.0).log()[:, None],
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_before_the_rounding(dtype: torch.dtype, name: str) -> None:
    x, factor = torch.randn(2, 3, 12, 24), FACTORS[name]
    after = (x * factor).to(dtype).float()
    found = rounded_factor(x, after)
    assert found is not None
    assert (found.dtype, found.before) == (str(dtype).removeprefix("torch."), True)
    # whatever lies between the edges gives the same numbers, but for those that float32 put on an edge
    again = (x.double() * found.factor).to(dtype).float()
    assert (again != after).float().mean() < 1e-3
    assert isinstance(found.factor, float) == (factor.numel() == 1)


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_after_the_rounding(dtype: torch.dtype, name: str) -> None:
    x, factor = torch.randn(2, 3, 12, 24), FACTORS[name]
    found = rounded_factor(x, x.to(dtype).float() * factor)
    assert found is not None
    assert (found.dtype, found.before) == (str(dtype).removeprefix("torch."), False)
    by = torch.as_tensor(found.factor)
    assert bool(((by - factor).abs() <= 4 * torch.finfo(torch.float32).eps * factor.abs()).all())


def test_rounded_as_they_are() -> None:
    x = torch.randn(1, 2, 8, 8)
    found = rounded_factor(x, x.bfloat16().float())
    assert found == ("bfloat16", 1.0, True)


UNLIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted": lambda x: (x + 0.1).bfloat16().float(),
    "scaled alone": lambda x: x * 0.3,
    "bent": lambda x: x.tanh().half().float(),
    "other shapes": lambda x: x[..., :4].half().float(),
    "NaN": lambda x: torch.full_like(x, torch.nan),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_no_factor_and_rounding(name: str) -> None:
    x = torch.randn(1, 2, 8, 8)
    assert rounded_factor(x, UNLIKE[name](x)) is None


def seen_of(projected: torch.Tensor, used: torch.Tensor) -> ObservedVector:
    heads = torch.arange(projected.shape[1])
    return ObservedVector(
        heads, used.double(), 1.0, projected=projected.double(), steps=(Waypoint("norm", "rms", used),)
    )


@pytest.mark.parametrize("over", ["head", "heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_and_the_rounding_are_told_apart(dtype: torch.dtype, over: str) -> None:
    x = torch.randn(2, 4, 24, 8)
    norm = NormStep("rms", 1 + 0.25 * torch.randn(4, 8), eps=1e-6, over=over)
    used = apply_norm(norm, x).to(dtype).float()
    found = rounded_step(x, used, "norm", "rms", torch.float32)
    assert found is not None
    step, rounding = found
    assert (step.kind, step.over, rounding) == ("rms", over, RoundingStep(str(dtype).removeprefix("torch.")))
    assert not torch.equal(apply_norm(step, x).to(dtype).float(), used)  # its gain is fitted to rounded values
    known = with_known_step(VectorPath(steps=found), seen_of(x, used), (norm,))
    assert isinstance(known.steps[0], NormStep)
    assert torch.equal(apply_norm(known.steps[0], x).to(dtype).float(), used)


def test_another_norm_is_not_taken_for_it() -> None:
    x = torch.randn(2, 4, 24, 8)
    norm = NormStep("rms", 1 + 0.25 * torch.randn(4, 8), eps=1e-6)
    used = apply_norm(norm, x).bfloat16().float()
    found = rounded_step(x, used, "norm", "rms", torch.float32)
    assert found is not None
    way, other = VectorPath(steps=found), replace(norm, gain=norm.gain * 1.1, eps=0.5)
    assert with_known_step(way, seen_of(x, used), (other,)) is way


def test_a_norm_that_was_not_rounded_has_no_rounding() -> None:
    x = torch.randn(2, 4, 24, 8)
    assert (
        rounded_step(x, apply_norm(NormStep("rms", torch.ones(1, 8)), x).float(), "norm", "rms", torch.float32) is None
    )
    assert rounded_step(x, x.tanh().bfloat16().float(), "norm", "rms", torch.float32) is None
