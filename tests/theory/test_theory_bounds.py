"""Bounds: never violated, and attained where they say so."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.theory import entropy_lower_bound_nats, logit_bound, logit_radius, max_logit_bounds

ROWS = st.lists(st.floats(-8, 8), min_size=2, max_size=12)
PART = st.integers(-(10**6), 10**6).map(lambda part: part / 1e5)  # no number whose square underflows


def entropy(z: Tensor) -> float:
    p = z.double().softmax(-1)
    return float(torch.special.entr(p).sum())


@settings(max_examples=300, deadline=None)
@given(ROWS)
def test_no_row_has_less_entropy(row: list[float]) -> None:
    z = torch.tensor(row, dtype=torch.float64)
    radius = float((z - z.mean()).norm())
    assert entropy(z) >= entropy_lower_bound_nats(len(row), radius) - 1e-12


@pytest.mark.parametrize("n", [2, 3, 17, 1000])
@pytest.mark.parametrize("radius", [0.0, 0.3, 2.0, 9.0, 30.0])
def test_attained_by_one_key_above_the_others(n: int, radius: float) -> None:
    z = torch.zeros(n, dtype=torch.float64)
    z[0] = radius * math.sqrt(n / (n - 1))
    assert float((z - z.mean()).norm()) == pytest.approx(radius, rel=1e-12)
    assert entropy(z) == pytest.approx(entropy_lower_bound_nats(n, radius), rel=1e-9, abs=1e-13)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 10**6), st.floats(0, 1e12), st.floats(0, 1e12))
def test_falls_with_the_radius_and_never_overflows(n: int, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert 0.0 <= entropy_lower_bound_nats(n, high) <= entropy_lower_bound_nats(n, low) * (1 + 1e-12)
    assert entropy_lower_bound_nats(n, low) <= math.log(n) * (1 + 1e-12)


def test_descent_does_not_get_below_it() -> None:
    """Of all rows of the same radius, started anywhere, none reaches less."""
    n, radius = 6, 2.5
    for seed in range(8):
        z = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        for _ in range(400):
            centred = z - z.mean()
            logits = radius * centred / centred.norm()
            loss = torch.special.entr(logits.softmax(-1)).sum()
            (gradient,) = torch.autograd.grad(loss, z)
            z = (z - 0.3 * gradient).detach().requires_grad_()
        assert loss.item() >= entropy_lower_bound_nats(n, radius) - 1e-12
        if seed == 0:
            assert loss.item() == pytest.approx(entropy_lower_bound_nats(n, radius), rel=0.01)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 12), st.integers(1, 6), st.integers(0, 2**30), st.floats(-2, 2))
def test_from_spectral_norms(length: int, width: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, w = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((length, width), (width, width))
    )
    radius = logit_radius(float(torch.linalg.norm(w, 2)), float(torch.linalg.norm(x, 2)), scale=scale)
    logits = scale * x @ w @ x.mT
    for row in logits:
        assert float((row - row.mean()).norm()) <= radius * (1 + 1e-12)
        assert entropy(row) >= entropy_lower_bound_nats(length, radius) - 1e-12


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_the_largest_logit_lies_between(row: list[float]) -> None:
    z = torch.tensor(row, dtype=torch.float64)
    low, high = max_logit_bounds(float(z.logsumexp(0)), len(row))
    assert low - 1e-12 <= max(row) <= high + 1e-12


def test_the_largest_logit_attains_both() -> None:
    assert max_logit_bounds(math.log(7) + 3, 7)[0] == pytest.approx(3.0)
    z = torch.tensor([50.0, 0.0], dtype=torch.float64)
    assert max_logit_bounds(float(z.logsumexp(0)), 2)[1] == pytest.approx(50.0)
    assert max_logit_bounds(-math.inf, 3) == (-math.inf, -math.inf)


@settings(max_examples=100, deadline=None)
@given(st.floats(-3, 3, allow_subnormal=False), st.lists(st.tuples(PART, PART), min_size=1, max_size=6))
def test_no_logit_is_beyond_the_product_of_lengths(scale: float, pairs: list[tuple[float, float]]) -> None:
    q, k = torch.tensor(pairs, dtype=torch.float64).T
    bound = logit_bound(scale, float(q.norm()), float(k.norm()))
    assert abs(scale * float(q @ k)) <= bound * (1 + 1e-12) + sys.float_info.min  # below it digits are lost
    assume(float(q.norm()) > 1e-100)
    assert abs(scale * float(q @ (2 * q))) == pytest.approx(logit_bound(scale, float(q.norm()), 2 * float(q.norm())))


def test_refusals() -> None:
    with pytest.raises(InvalidValueError, match="n is at least 1; got 0"):
        entropy_lower_bound_nats(0, 1.0)
    with pytest.raises(InvalidTypeError, match="n is a whole number"):
        entropy_lower_bound_nats(2.5, 1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="radius is at least 0; got -1"):
        entropy_lower_bound_nats(4, -1.0)
    with pytest.raises(InvalidValueError, match="weight_norm is at least 0; got -1"):
        logit_radius(-1.0, 1.0)
    with pytest.raises(InvalidValueError, match="lse is a finite number; got nan"):
        max_logit_bounds(math.nan, 3)
    with pytest.raises(InvalidValueError, match="at least 0; got -1"):
        logit_bound(1.0, -1.0, 1.0)
    with pytest.raises(InvalidValueError, match="0 times infinity"):
        logit_bound(0.0, math.inf, 1.0)
    assert entropy_lower_bound_nats(1, 5.0) == 0.0
