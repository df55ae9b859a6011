"""Ranges of dtypes against torch's own neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.theory import largest_finite, logit_distribution, overflow_margin, range_forecast, spacing

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_finite(dtype: torch.dtype) -> None:
    assert largest_finite(dtype) == torch.finfo(dtype).max
    assert largest_finite(str(dtype)) == largest_finite(str(dtype).removeprefix("torch.")) == torch.finfo(dtype).max


def test_overflow_margin() -> None:
    assert overflow_margin(-65504.0, "float16") == 1.0
    assert overflow_margin(0.0, "float16") == math.inf
    assert overflow_margin(math.inf, "float16") == 0.0
    assert overflow_margin(-math.inf, "float16") == 0.0


@given(st.floats(2**-10, 6e4), st.sampled_from(DTYPES))
def test_spacing_is_the_step_to_the_next_number(value: float, dtype: torch.dtype) -> None:
    stored = torch.tensor(value % (0.9 * torch.finfo(dtype).max), dtype=torch.float64).to(dtype)
    if stored == 0:
        return
    if dtype in (torch.float16, torch.bfloat16, *EIGHT):
        following = (stored.view(torch.int8 if dtype in EIGHT else torch.int16) + 1).view(dtype)
    else:
        following = torch.nextafter(stored, torch.tensor(math.inf, dtype=dtype))
    assert spacing(stored.item(), dtype) == following.double().item() - stored.double().item()
    assert spacing(-stored.item(), dtype) == spacing(stored.item(), dtype)


def test_spacing_outside_the_range() -> None:
    assert spacing(1e5, "float16") == math.inf
    assert spacing(0.0, "float16") == torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps


def test_refuses_what_does_not_float() -> None:
    with pytest.raises(InvalidTypeError, match="int8"):
        largest_finite(torch.int8)
    with pytest.raises(InvalidTypeError, match="got 5"):
        largest_finite(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="posit"):
        spacing(1.0, "posit16")


def test_one_pair_has_the_mean_magnitude() -> None:
    # E|q k| = (E|q|)^2 = 2 / pi for one component; for many, that of a normal
    assert range_forecast(1, 1, "float32").expected_max == pytest.approx(2 / math.pi, rel=1e-7)
    assert range_forecast(10**6, 1, "float32").expected_max == pytest.approx(1000 * math.sqrt(2 / math.pi), rel=1e-6)


@pytest.mark.parametrize(("dim", "pairs", "mean"), [(1, 10, 0.0), (16, 1000, 0.0), (16, 300, 0.7), (64, 3, -1.0)])
def test_expected_max_of_simulated_pairs(dim: int, pairs: int, mean: float) -> None:
    rows, chunk = 400, max(1, 2**20 // (dim * pairs))
    found = torch.cat(
        [
            ((mean + torch.randn(chunk, pairs, dim)) * 3 * torch.randn(chunk, pairs, dim)).sum(-1).abs().amax(-1)
            for _ in range(0, rows, chunk)
        ]
    )
    expected = range_forecast(dim, pairs, "float32", query_mean=mean, key_variance=9.0).expected_max
    assert abs(found.mean().item() - expected) < 4.5 * found.std().item() / len(found) ** 0.5


def test_pairs_that_share_queries_and_keys_come_close() -> None:
    found = torch.stack([(torch.randn(256, 64) @ torch.randn(64, 256)).abs().max() for _ in range(300)])
    assert found.mean().item() == pytest.approx(range_forecast(64, 256 * 256, "float16").expected_max, rel=0.02)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float16, 5300.0), (torch.float8_e5m2, 5300.0), (torch.bfloat16, 2.7e37)]
)
def test_overflow_of_simulated_pairs(dtype: torch.dtype, scale: float) -> None:
    rows, pairs, dim = 4000, 8, 32
    products = scale * (torch.randn(rows, pairs, dim, dtype=torch.float64) * torch.randn(rows, pairs, dim)).sum(-1)
    share = products.float().to(dtype).float().isinf().any(-1).double().mean().item()
    forecast = range_forecast(dim, pairs, dtype, scale_before=scale)
    p = forecast.overflow_probability
    assert 0.02 < p < 0.98
    assert abs(share - p) < 4.5 * math.sqrt(p * (1 - p) / rows)


def test_the_forecast_counts_what_rounds_to_the_largest_number_as_within() -> None:
    limit = 65504.0 + 16.0
    z = logit_distribution(16, 4000.0)
    tail = math.exp(z.log_above(limit)) + math.exp(z.log_below(-limit))
    assert range_forecast(16, 1, "float16", scale_before=4000.0).overflow_probability == pytest.approx(tail, rel=1e-12)
    ten = range_forecast(16, 10, "float16", scale_before=4000.0).overflow_probability
    assert ten == pytest.approx(1 - (1 - tail) ** 10, rel=1e-9)


def test_the_fields_fit_together() -> None:
    forecast = range_forecast(64, 2**20, torch.float8_e4m3fn, scale_before=-1.0)
    assert (forecast.dtype, forecast.std, forecast.largest_finite) == ("float8_e4m3fn", 8.0, 448.0)
    assert forecast.margin == 448.0 / forecast.expected_max
    assert forecast.spacing_at_max == spacing(forecast.expected_max, "float8_e4m3fn")
    assert 0.0 < forecast.overflow_probability < 1e-100  # a normal's tail would be 0


def test_a_tail_far_out_is_no_normal() -> None:
    """Beyond 20 standard deviations a normal has 5e-89; the tail of a product is exponential."""
    forecast = range_forecast(32, 1, "float16", scale_before=65520.0 / (20 * math.sqrt(32)))
    assert 1e-35 < forecast.overflow_probability < 1e-25


def test_nothing_varies() -> None:
    forecast = range_forecast(4, 10, "float16", query_mean=2.0, query_variance=0.0, key_mean=-3.0, key_variance=0.0)
    assert (forecast.std, forecast.expected_max, forecast.overflow_probability) == (0.0, 24.0, 0.0)
    assert range_forecast(4, 10**9, "float16", scale_before=0.0).margin == math.inf


def test_forecast_refusals() -> None:
    with pytest.raises(InvalidTypeError, match="posit"):
        range_forecast(4, 1, "posit8")
    with pytest.raises(InvalidValueError, match="pairs is at least 1; got 0"):
        range_forecast(4, 0, "float16")
