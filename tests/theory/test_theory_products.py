"""Moments and distribution of dot products against closed forms of scipy, quadrature and simulation."""

from __future__ import annotations

import math
from itertools import pairwise

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from sqrtdk import scales
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.theory import Moments, dot_product_moments, logit_distribution

MEANS = st.floats(-4, 4)
VARIANCES = st.floats(0.05, 9)
DIM = st.integers(1, 4096)


def _cumulants(dim: int, mq: float, vq: float, mk: float, vk: float) -> list[float]:
    """First four, from the Taylor series of the cumulant function, independently of the code's formulas."""
    a, b, c = vq * vk, mq * mk, (mq * mq * vk + mk * mk * vq) / 2
    with mpmath.workdps(40):
        series = mpmath.taylor(lambda t: -mpmath.log(1 - a * t * t) / 2 + (b * t + c * t * t) / (1 - a * t * t), 0, 4)
        return [float(dim * coefficient * math.factorial(k)) for k, coefficient in enumerate(series)][1:]


@settings(max_examples=30, deadline=None)
@given(DIM, MEANS, VARIANCES, MEANS, VARIANCES)
def test_moments_are_the_cumulants(dim: int, mq: float, vq: float, mk: float, vk: float) -> None:
    found = dot_product_moments(dim, query_mean=mq, query_variance=vq, key_mean=mk, key_variance=vk)
    k1, k2, k3, k4 = _cumulants(dim, mq, vq, mk, vk)
    assert found.mean == pytest.approx(k1, rel=1e-9, abs=1e-12)
    assert found.variance == pytest.approx(k2, rel=1e-9)
    assert found.skewness == pytest.approx(k3 / k2**1.5, rel=1e-9, abs=1e-9)
    assert found.excess_kurtosis == pytest.approx(k4 / k2**2, rel=1e-9)


def test_moments_of_simulated_products() -> None:
    rows, arguments = 400_000, {"query_mean": 0.5, "query_variance": 2.0, "key_mean": -1.5, "key_variance": 0.5}
    q = 0.5 + math.sqrt(2.0) * torch.randn(rows, 3, dtype=torch.float64)
    k = -1.5 + math.sqrt(0.5) * torch.randn(rows, 3, dtype=torch.float64)
    x = (q * k).sum(1)
    expected = dot_product_moments(3, **arguments)
    d = (x - x.mean()) / x.std()
    found = (x.mean(), x.var(), (d**3).mean(), (d**4).mean() - 3)
    for value, want, spread in zip(
        found,
        (expected.mean, expected.variance, expected.skewness, expected.excess_kurtosis),
        (x.std(), ((x - x.mean()) ** 2).std(), (d**3).std(), (d**4).std()),
        strict=True,
    ):
        assert abs(float(value) - want) < 5 * float(spread) / math.sqrt(rows)


def test_mean_and_variance_hold_for_other_distributions() -> None:
    # q uniform on {0, 2}, k on {1, 4}, each with equal chance: all 4^2 pairs of two components, exactly
    each = [q * k for q in (0.0, 2.0) for k in (1.0, 4.0)]
    sums = np.array([a + b for a in each for b in each])
    found = dot_product_moments(2, query_mean=1.0, query_variance=1.0, key_mean=2.5, key_variance=2.25)
    assert (found.mean, found.variance) == (pytest.approx(sums.mean()), pytest.approx(sums.var()))


def test_degenerate_moments() -> None:
    assert dot_product_moments(3, query_mean=2.0, query_variance=0.0, key_variance=0.0) == Moments(0.0, 0.0, 0.0, 0.0)
    assert dot_product_moments(64).std == 8.0


def _product_normal_above(x: float) -> float:
    """Of one product of standard normals, whose density is K_0(|x|) / pi."""
    if x < 1.0:
        return 0.5 - special.iti0k0(x)[1] / math.pi
    return integrate.quad(lambda y: special.k0(y) / math.pi, x, math.inf, epsabs=1e-18, epsrel=1e-12, limit=500)[0]


@pytest.mark.parametrize("x", [1e-9, 1e-3, 0.2, 1.0, 4.0, 12.0])
def test_one_component_is_the_product_normal(x: float) -> None:
    one = logit_distribution(1, 1.0)
    assert math.exp(one.log_above(x)) == pytest.approx(_product_normal_above(x), rel=1e-8)
    assert one.probability_within(-x, x) == pytest.approx(1 - 2 * _product_normal_above(x), abs=1e-10)


@pytest.mark.parametrize("dim", [2, 3, 8, 64, 1024, 4096])
def test_means_of_zero_are_a_variance_gamma(dim: int) -> None:
    """Q . k = (|u|^2 - |v|^2) / 2 with u = (q + k) / sqrt 2, v = (q - k) / sqrt 2: half a difference of chi squares."""
    chi, scaled = stats.chi2(dim), logit_distribution(dim)
    root = np.linspace(math.sqrt(chi.ppf(1e-16)), math.sqrt(chi.isf(1e-16)), 20_001)  # smooth at 0, unlike its square
    density = 2 * root * chi.pdf(root**2)
    for z in (0.0, 0.3, 1.0, 2.5, 5.0):
        above = integrate.simpson(density * chi.sf(root**2 + 2 * z * math.sqrt(dim)), x=root)
        assert math.exp(scaled.log_above(z)) == pytest.approx(above, abs=1e-8)
        assert 1 - math.exp(scaled.log_below(z)) == pytest.approx(above, abs=1e-8)


@pytest.mark.parametrize(("mq", "mk"), [(1.0, 0.0), (1.0, 1.0), (3.0, -2.0), (-0.5, -8.0)])
def test_one_component_with_means_against_quadrature(mq: float, mk: float) -> None:
    one = logit_distribution(1, 1.0, query_mean=mq, key_mean=mk)

    def above(x: float) -> float:
        def given_q(q: float) -> float:
            return stats.norm.pdf(q - mq) * stats.norm.cdf(math.copysign(1.0, q) * (mk - x / q))

        edges = sorted({-40.0, 40.0, 0.0, -1e-3, 1e-3, *(mq + np.array([-8.0, -3.0, 0.0, 3.0, 8.0]))})
        pieces = pairwise(edges)
        return sum(integrate.quad(given_q, *piece, epsabs=1e-13, limit=400)[0] for piece in pieces)

    for deviations in (-3.0, -0.5, 0.0, 0.5, 3.0):
        x = one.mean + deviations * one.std
        assert math.exp(one.log_above(x)) == pytest.approx(above(x), abs=1e-9)


@pytest.mark.parametrize("dim", [16, 512, 4096])
@pytest.mark.parametrize(("mq", "mk"), [(0.3, 0.5), (3.0, -3.0)])
def test_many_components_with_means_against_the_plain_formula(dim: int, mq: float, mk: float) -> None:
    """Gil-Pelaez along the real axis converges by itself where the characteristic function falls fast."""
    logits = logit_distribution(dim, 1.0, query_mean=mq, key_mean=mk)
    step = 2 * math.pi / (60 * logits.std)
    w = (np.arange(200_000) + 0.5) * step
    t = 1j * w
    function = dim * (-np.log1p(w * w) / 2 + (mq * mk * t + (mq * mq + mk * mk) / 2 * t * t) / (1 + w * w))
    for deviations in np.linspace(-6, 6, 7):
        x = logits.mean + deviations * logits.std
        below = 0.5 - step / math.pi * np.sum(np.imag(np.exp(function - t * x)) / w)
        assert math.exp(logits.log_below(x)) == pytest.approx(below, abs=1e-9)


def test_simulated_quantiles() -> None:
    rows, dim = 200_000, 8
    x = (torch.randn(rows, dim) * (1 + torch.randn(rows, dim))).sum(1) / math.sqrt(dim)
    logits = logit_distribution(dim, key_mean=1.0)
    for p in (0.01, 0.3, 0.5, 0.9, 0.999):
        share = float((x <= logits.quantile(p)).double().mean())
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / rows)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 7, 64, 4096]), st.floats(1e-12, 1 - 1e-12), MEANS, MEANS, st.sampled_from([1.0, -0.3]))
def test_quantile_inverts(dim: int, p: float, mq: float, mk: float, scale: float) -> None:
    logits = logit_distribution(dim, scale, query_mean=mq, key_mean=mk)
    z = logits.quantile(p)
    assert math.exp(logits.log_below(z)) == pytest.approx(p, rel=1e-8, abs=1e-14)
    assert math.exp(logits.log_below(z)) + math.exp(logits.log_above(z)) == pytest.approx(1.0, rel=1e-12)


def test_many_components_are_normal() -> None:
    logits = logit_distribution(10**9)
    for z in (-3.0, 0.0, 1.0, 4.0):
        assert math.exp(logits.log_below(z)) == pytest.approx(stats.norm.cdf(z), abs=1e-8)


def test_far_tails_stay_finite() -> None:
    for dim in (1, 64, 4096):
        plain = logit_distribution(dim, 1.0)
        assert plain.log_above(1e6) == pytest.approx(-1e6, rel=0.1)
        assert plain.log_above(1e38) == pytest.approx(-1e38, rel=1e-9)
        assert plain.log_above(1e300) == pytest.approx(-1e300, rel=1e-9)
        assert plain.log_above(math.inf) == -math.inf
        assert plain.log_below(math.inf) == plain.log_above(-math.inf) == 0.0


RULES = {
    "sqrt_dk": scales.sqrt_dk(),
    "none": scales.none(),
    "dk": scales.dk(),
    "two_sqrt_dk": scales.two_sqrt_dk(),
    "fixed": scales.fixed(0.3),
    "temperature": scales.temperature(2.0),
    "learned": scales.learned(4),
    "log_n": scales.log_n(),
    "yarn": scales.yarn(4.0),
    "disentangled": scales.disentangled(3),
    "layer_index": scales.layer_index(2),
}


def test_every_rule_is_tried() -> None:
    assert set(RULES) == set(scales.SCALES)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_scales_the_moments(name: str) -> None:
    rule, dim = RULES[name], 48
    beta = (
        torch.as_tensor(rule.beta(scales.sizes(dim, 4, 1, 100, dtype=torch.float64)), dtype=torch.float64).max().item()
    )
    logits = logit_distribution(dim, rule, keys=100, heads=4, query_mean=1.0, key_mean=0.5)
    product = dot_product_moments(dim, query_mean=1.0, key_mean=0.5)
    assert logits.scale == beta
    assert logits.mean == pytest.approx(beta * product.mean)
    assert logits.std == pytest.approx(abs(beta) * product.std)
    assert (logits.skewness, logits.excess_kurtosis) == (product.skewness, product.excess_kurtosis)
    assert logits.quantile(0.9) == pytest.approx(
        beta * logit_distribution(dim, 1.0, query_mean=1.0, key_mean=0.5).quantile(0.9)
    )


def test_a_negative_scale_turns_the_distribution_round() -> None:
    plain = logit_distribution(4, 0.5, query_mean=1.0, key_mean=2.0)
    turned = logit_distribution(4, -0.5, query_mean=1.0, key_mean=2.0)
    assert (turned.mean, turned.skewness) == (-plain.mean, -plain.skewness)
    assert turned.log_above(-3.0) == plain.log_below(3.0)


def test_no_spread_at_all() -> None:
    one_key = logit_distribution(64, scales.log_n(), keys=1, query_mean=3.0, key_mean=2.0)
    assert (one_key.scale, one_key.std, one_key.quantile(0.1)) == (0.0, 0.0, 0.0)
    assert (one_key.probability_within(-1, 1), one_key.probability_within(1, 2)) == (1.0, 0.0)
    constant = logit_distribution(2, 1.0, query_mean=1.0, query_variance=0.0, key_mean=3.0, key_variance=4.0)
    assert (constant.mean, constant.std) == (6.0, math.sqrt(8.0))  # a normal: the query is fixed
    for z in (-3.0, 6.0, 9.0):
        assert math.exp(constant.log_below(z)) == pytest.approx(stats.norm.cdf(z, 6, math.sqrt(8)), rel=1e-12)
    assert constant.quantile(0.2) == pytest.approx(stats.norm.ppf(0.2, 6, math.sqrt(8)))


def test_ends() -> None:
    logits = logit_distribution(16)
    assert (logits.quantile(0.0), logits.quantile(1.0)) == (-math.inf, math.inf)
    assert logits.probability_within(-math.inf, math.inf) == 1.0
    assert logits.probability_within(1.0, 1.0) == 0.0


def test_refusals() -> None:
    with pytest.raises(InvalidValueError, match="dim is at least 1; got 0"):
        dot_product_moments(0)
    with pytest.raises(InvalidTypeError, match="dim is a whole number"):
        dot_product_moments(2.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="query_variance is at least 0; got -1"):
        dot_product_moments(2, query_variance=-1.0)
    with pytest.raises(InvalidValueError, match="finite number; got nan"):
        logit_distribution(2, math.nan)
    with pytest.raises(InvalidValueError, match=r"low is at most high; got 2\.0 and 1\.0"):
        logit_distribution(2).probability_within(2.0, 1.0)
    with pytest.raises(InvalidValueError, match=r"0 to 1; got 1\.5"):
        logit_distribution(2).quantile(1.5)
    unlike = scales.learned(2)
    with torch.no_grad():
        unlike.log_factor[1] = 1.0
    with pytest.raises(InvalidValueError, match="2 factors from"):
        logit_distribution(4, unlike, heads=2)
