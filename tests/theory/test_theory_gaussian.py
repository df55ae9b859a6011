"""The laws that the finite-n table obeys; its numbers are judged in test_theory_table.py."""

from __future__ import annotations

import json
import math
from importlib.resources import files

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sqrtdk.errors import InvalidValueError
from sqrtdk.theory import (
    asymptotic_entropy_nats,
    critical_sigma,
    expected_effective_keys,
    expected_entropy_nats,
    expected_jacobian_norm,
    expected_peak,
    sigma_from_entropy,
)


def test_two_keys_against_quadrature() -> None:
    x, step = torch.linspace(-12, 12, 200001, dtype=torch.float64), 24 / 200000
    weight = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * step
    for sigma in (0.25, 1.0, 4.0, 16.0, 64.0):
        p = torch.sigmoid(math.sqrt(2) * sigma * x)
        q = torch.sigmoid(-math.sqrt(2) * sigma * x)
        entropy = (weight * (torch.special.entr(p) + torch.special.entr(q))).sum().item()
        squared = 4 * (weight * (p * q) ** 2).sum().item()  # of the norm of [[pq, -pq], [-pq, pq]]
        assert expected_entropy_nats(2, sigma) == pytest.approx(entropy, rel=6e-7, abs=0.0)
        assert expected_peak(2, sigma) == pytest.approx((weight * torch.maximum(p, q)).sum().item(), rel=6e-7)
        assert expected_effective_keys(2, sigma) == pytest.approx((weight / (p * p + q * q)).sum().item(), rel=6e-7)
        assert expected_jacobian_norm(2, sigma) == pytest.approx(math.sqrt(squared), rel=6e-7, abs=0.0)


def test_large_n_follows_the_random_energy_model() -> None:
    n = 2**24
    for fraction in (0.1, 0.3, 0.5):
        sigma = fraction * critical_sigma(n)
        assert expected_entropy_nats(n, sigma) == pytest.approx(asymptotic_entropy_nats(n, sigma), rel=0.01)
    at_critical = expected_entropy_nats(512, critical_sigma(512)) - asymptotic_entropy_nats(512, critical_sigma(512))
    assert at_critical > 1.0


def test_limits() -> None:
    for n in (2, 7, 1000, 2**24):
        assert expected_entropy_nats(n, 0.0) == pytest.approx(math.log(n))
        assert expected_peak(n, 0.0) == pytest.approx(1 / n, rel=1e-5)
        assert expected_effective_keys(n, 0.0) == pytest.approx(n)
        assert expected_jacobian_norm(n, 0.0) == pytest.approx(math.sqrt(n - 1) / n, rel=1e-12)
        assert expected_jacobian_norm(n, 6400.0) == pytest.approx(expected_jacobian_norm(n, 64.0) / 10, rel=1e-12)
        assert expected_entropy_nats(n, 1e9) == pytest.approx(0.0, abs=1e-6)
        assert expected_peak(n, 1e9) == pytest.approx(1.0)
    assert expected_entropy_nats(1, 5.0) == 0.0
    assert expected_effective_keys(1, 5.0) == 1.0
    assert expected_jacobian_norm(1, 5.0) == 0.0


COUNT = st.floats(2, 2**24)
SIGMA = st.floats(0, 100)


@settings(max_examples=200, deadline=None)
@given(COUNT, SIGMA, SIGMA)
def test_more_spread_means_less_entropy(n: float, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert expected_entropy_nats(n, low) >= expected_entropy_nats(n, high) - 1e-9
    assert expected_peak(n, low) <= expected_peak(n, high) + 1e-9
    assert expected_effective_keys(n, low) >= expected_effective_keys(n, high) * (1 - 1e-9)


@settings(max_examples=200, deadline=None)
@given(COUNT, COUNT, SIGMA)
def test_more_keys_mean_more_entropy(a: float, b: float, sigma: float) -> None:
    low, high = sorted((a, b))
    assert expected_entropy_nats(low, sigma) <= expected_entropy_nats(high, sigma) + 1e-9


@settings(max_examples=200, deadline=None)
@given(COUNT, SIGMA)
@example(3.0, 0.0)  # the table's digits of 1/3 are below it
def test_bounds(n: float, sigma: float) -> None:
    entropy = expected_entropy_nats(n, sigma)
    assert 0 <= entropy <= math.log(n) + 1e-9
    assert 1 / n - 1e-9 <= expected_peak(n, sigma) <= 1
    # Renyi entropies fall with their order, and 1/sum p^2 is the exponential of the second
    assert 1 <= expected_effective_keys(n, sigma) <= n + 1e-6
    # |J|_F <= tr J = 1 - sum p^2, and the mean of its square is at most that of the trace
    assert 0 <= expected_jacobian_norm(n, sigma) <= math.sqrt(1 - 1 / n) + 1e-9


@settings(max_examples=100, deadline=None)
@given(COUNT, st.floats(0.05, 80))
def test_sigma_from_entropy_inverts(n: float, sigma: float) -> None:
    assert sigma_from_entropy(expected_entropy_nats(n, sigma), n) == pytest.approx(sigma, rel=1e-6)


def test_sigma_from_entropy_of_rows_of_several_lengths() -> None:
    counts = [1.0, 2.0, 10.0, 300.0]
    mean = sum(expected_entropy_nats(counts, 1.7)) / 4
    assert sigma_from_entropy(mean, counts) == pytest.approx(1.7)


def test_sigma_from_entropy_at_the_ends() -> None:
    assert sigma_from_entropy(math.log(64), 64) == 0.0
    assert sigma_from_entropy(10.0, 64) == 0.0
    assert sigma_from_entropy(0.0, 64) == math.inf
    assert math.isnan(sigma_from_entropy(0.0, 1))


def test_lists_go_element_by_element() -> None:
    assert expected_peak([4, 9], [1.0, 2.0]) == [expected_peak(4, 1.0), expected_peak(9, 2.0)]
    assert expected_peak(4, [1.0, 2.0]) == [expected_peak(4, 1.0), expected_peak(4, 2.0)]
    assert expected_peak([], 1.0) == []


@pytest.mark.parametrize(("n", "sigma"), [(0, 1.0), (2**25, 1.0), (math.nan, 1.0), (4, -1.0), (4, math.nan)])
def test_refusals(n: float, sigma: float) -> None:
    with pytest.raises(InvalidValueError, match="got"):
        expected_entropy_nats(n, sigma)


def test_refuses_lists_of_different_lengths() -> None:
    with pytest.raises(InvalidValueError, match="got 2 and 3"):
        expected_peak([1, 2], [1.0, 2.0, 3.0])
    with pytest.raises(InvalidValueError, match="empty"):
        sigma_from_entropy(1.0, [])


def test_the_file_is_small_and_complete() -> None:
    text = files("sqrtdk.theory").joinpath("gaussian_table.json").read_text(encoding="utf-8")
    assert len(text) < 60_000
    table = json.loads(text)
    for name in ("entropy", "peak", "effective", "jacobian"):
        assert len(table[name]) == len(table["n"])
        assert {len(row) for row in table[name]} == {len(table["sigma"])}
    assert {2**k for k in range(1, 21)} <= set(table["n"])
    assert (table["sigma"][0], table["sigma"][-1]) == (0.0, 64.0)
