"""Ranges of dtypes against torch's own neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sqrtdk.errors import InvalidTypeError
from sqrtdk.theory import largest_finite, overflow_margin, spacing

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_finite(dtype: torch.dtype) -> None:
    assert largest_finite(dtype) == torch.finfo(dtype).max
    assert largest_finite(str(dtype)) == largest_finite(str(dtype).removeprefix("torch.")) == torch.finfo(dtype).max


def test_overflow_margin() -> None:
    assert overflow_margin(-65504.0, "float16") == 1.0
    assert overflow_margin(0.0, "float16") == math.inf
    assert overflow_margin(math.inf, "float16") == 0.0
    assert overflow_margin(-math.inf, "float16") == 0.0
    assert math.isnan(overflow_margin(math.nan, "float16"))


@given(st.floats(2**-10, 6e4), st.sampled_from(DTYPES))
def test_spacing_is_the_step_to_the_next_number(value: float, dtype: torch.dtype) -> None:
    stored = torch.tensor(value, dtype=torch.float64).to(dtype)
    if dtype in (torch.float16, torch.bfloat16):
        following = (stored.view(torch.int16) + 1).view(dtype)
    else:
        following = torch.nextafter(stored, torch.tensor(math.inf, dtype=dtype))
    assert spacing(stored.item(), dtype) == following.double().item() - stored.double().item()
    assert spacing(-stored.item(), dtype) == spacing(stored.item(), dtype)


def test_spacing_outside_the_range() -> None:
    assert spacing(1e5, "float16") == math.inf
    assert math.isnan(spacing(math.nan, "float16"))
    assert spacing(0.0, "float16") == torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps


def test_refuses_what_does_not_float() -> None:
    with pytest.raises(InvalidTypeError, match="int8"):
        largest_finite(torch.int8)
    with pytest.raises(InvalidTypeError, match="posit"):
        spacing(1.0, "posit16")
