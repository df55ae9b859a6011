"""The random energy model against the table: its documented errors, its limits, its derivation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import gamma

from sqrtdk.errors import InvalidValueError
from sqrtdk.theory import (
    asymptotic_entropy_nats,
    asymptotic_jacobian_norm,
    asymptotic_log_effective_keys,
    asymptotic_peak,
    critical_sigma,
    expected_effective_keys,
    expected_entropy_nats,
    expected_jacobian_norm,
    expected_peak,
)
from sqrtdk.theory.asymptotic import LARGEST_ERROR

PAIRS = {
    "entropy_nats": (asymptotic_entropy_nats, expected_entropy_nats),
    "log_effective_keys": (asymptotic_log_effective_keys, lambda n, s: math.log(expected_effective_keys(n, s))),
    "peak": (asymptotic_peak, expected_peak),
    "jacobian_norm": (asymptotic_jacobian_norm, expected_jacobian_norm),
}
DOCUMENTED = [(name, n, error) for name, errors in LARGEST_ERROR.items() for n, error in errors.items()]


@pytest.mark.parametrize(("name", "n", "documented"), DOCUMENTED)
def test_the_largest_error_is_the_documented_one(name: str, n: int, documented: float) -> None:
    form, table = PAIRS[name]
    sigmas = [*np.linspace(0, 3 * critical_sigma(n), 1500), *np.linspace(3 * critical_sigma(n), 64, 200)]
    largest = max(abs(form(n, s) - table(n, s)) for s in sigmas)
    assert 0.95 * documented <= largest <= documented


@pytest.mark.parametrize("name", ["entropy_nats", "log_effective_keys"])
def test_the_error_falls_against_log_n(name: str) -> None:
    relative = [error / math.log(n) for n, error in LARGEST_ERROR[name].items()]
    assert relative == sorted(relative, reverse=True)


def test_small_sigma_is_exact_in_the_limit() -> None:
    n = 2**20
    for sigma in (0.5, 1.0):
        assert asymptotic_entropy_nats(n, sigma) == pytest.approx(expected_entropy_nats(n, sigma), abs=1e-4)
        assert asymptotic_log_effective_keys(n, sigma) == pytest.approx(
            math.log(expected_effective_keys(n, sigma)), abs=1e-3
        )
        assert asymptotic_jacobian_norm(n, sigma) == pytest.approx(expected_jacobian_norm(n, sigma), rel=1e-3)


@pytest.mark.parametrize(("n", "share"), [(16, 0.13), (2**20, 0.035)])
def test_the_frozen_norm_is_within_its_documented_share(n: int, share: float) -> None:
    ratios = [
        asymptotic_jacobian_norm(n, f * critical_sigma(n)) / expected_jacobian_norm(n, f * critical_sigma(n))
        for f in np.linspace(2.0, 10.0, 30)
    ]
    assert 0.5 * share < max(abs(ratio - 1.0) for ratio in ratios) <= share


@pytest.mark.parametrize("n", [2, 100, 2**24])
@pytest.mark.parametrize("fraction", [0.1, 0.4, 0.55, 0.7, 0.95, 1.2])
def test_the_forms_are_the_largest_exponents(n: int, fraction: float) -> None:
    """About e^{L - x^2/2} logits lie near sigma x; beyond sigma_c that is the chance of one. The largest term rules."""
    log_n, critical = math.log(n), critical_sigma(n)
    sigma = fraction * critical
    x = np.linspace(0.0, 3.0 * critical, 300_001)
    number, there = log_n - x**2 / 2, x <= critical
    log_s, log_q = (float(np.max((number + k * sigma * x)[there])) for k in (1, 2))
    at = float(x[there][np.argmax((number + sigma * x)[there])])
    assert asymptotic_entropy_nats(n, sigma) == pytest.approx(log_s - sigma * at, abs=1e-3 * log_n)
    assert asymptotic_log_effective_keys(n, sigma) == pytest.approx(2 * log_s - log_q, abs=1e-3 * log_n)
    assert math.log(asymptotic_peak(n, sigma)) == pytest.approx(sigma * critical - log_s, abs=1e-3 * log_n)
    if fraction < 1.0:
        squared = float(np.max(number + 2 * np.minimum(0.0, sigma * x - log_s)))
        assert 2 * math.log(asymptotic_jacobian_norm(n, sigma)) == pytest.approx(squared, abs=1e-3 * log_n)


@pytest.mark.parametrize("n", [2, 100, 2**24])
def test_the_pieces_meet(n: int) -> None:
    critical = critical_sigma(n)
    for form, places in (
        (asymptotic_entropy_nats, (1.0,)),
        (asymptotic_log_effective_keys, (0.5, 1.0)),
        (asymptotic_peak, (1.0,)),
        (asymptotic_jacobian_norm, (1 / math.sqrt(3),)),
    ):
        for place in places:
            below, above = (form(n, place * critical * (1 + step)) for step in (-1e-9, 1e-9))
            assert below == pytest.approx(above, abs=1e-6)
        assert form(n, 0.0) == pytest.approx(
            {asymptotic_peak: 1 / n, asymptotic_jacobian_norm: n**-0.5}.get(form, math.log(n))
        )


def test_one_key() -> None:
    assert asymptotic_entropy_nats(1, 2.0) == asymptotic_log_effective_keys(1, 2.0) == 0.0
    assert asymptotic_peak(1, 2.0) == 1.0
    assert asymptotic_jacobian_norm(1, 2.0) == asymptotic_jacobian_norm(1, 0.0) == 0.0


@pytest.mark.parametrize("m", [0.2, 0.5, 0.8])
def test_the_norm_of_a_poisson_dirichlet_sequence(m: float) -> None:
    """The weights of the frozen phase: normalised points of a Poisson process whose density is m x^{-m-1}."""
    rows, points = 4000, 1000
    arrivals = torch.empty(rows, points, dtype=torch.float64).exponential_().cumsum(1)
    p = arrivals ** (-1 / m)
    # what is left out, by its mean; the smallest weight kept is small for m < 1 and so is the scatter
    rest = m / (1 - m) * arrivals[:, -1:] ** (1 - 1 / m)
    p /= p.sum(1, keepdim=True) + rest
    p2, p3 = (p**2).sum(1), (p**3).sum(1)
    squared = p2 - 2 * p3 + p2**2
    assert abs(float(p2.mean()) - gamma(2 - m) / gamma(1 - m)) < 5 * float(p2.std()) / rows**0.5
    # n = e^8, sigma_c = 4
    found = asymptotic_jacobian_norm(math.exp(8.0), 4.0 / m) ** 2
    assert abs(float(squared.mean()) - found) < 5 * float(squared.std()) / rows**0.5


def test_refusals() -> None:
    for form, _ in PAIRS.values():
        with pytest.raises(InvalidValueError, match="got -1"):
            form(4, -1.0)
