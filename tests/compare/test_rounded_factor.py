"""A factor and a rounding to a lesser dtype, told from the values before and after both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sqrtdk.compare.rounded_factor import rounded_factor

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


def _shifted(x: Tensor) -> Tensor:
    return (x + 0.1).bfloat16().float()


def _scaled(x: Tensor) -> Tensor:
    return x * 0.3


def _bent(x: Tensor) -> Tensor:
    return x.tanh().half().float()


@pytest.mark.parametrize("change", [_shifted, _scaled, _bent])
def test_what_is_no_factor_and_rounding(change) -> None:
    x = torch.randn(1, 2, 8, 8)
    assert rounded_factor(x, change(x)) is None


def test_values_that_cannot_be_compared() -> None:
    x = torch.randn(1, 2, 8, 8)
    assert rounded_factor(x, x[..., :4].half().float()) is None
    assert rounded_factor(x, torch.full_like(x, torch.nan)) is None
