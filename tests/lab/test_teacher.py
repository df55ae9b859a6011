"""A bilinear layer that learns a teacher's weights, and random rows with keys of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sqrtdk.lab._own_keys import own_keys
from sqrtdk.lab._teacher import TEACHER_STD, Fit, fit

SIZES: dict[str, Any] = {"d_k": 8, "learners": 3, "rows": 32, "keys": 8}


def learned(**changes: Any) -> Fit:
    rng = torch.Generator().manual_seed(0)
    return fit(rng, **{**SIZES, "weight_std": 8**-0.5, "scale": 8**-0.5, "rates": (0.03,), "steps": 150, **changes})


def test_it_learns_the_teacher_and_the_range_of_its_logits() -> None:
    found = learned()
    assert found.end.shape == (3,)
    assert (found.start > 0.3).all()
    assert (found.end < 0.02).all()
    assert found.end_std.mean().item() == pytest.approx(TEACHER_STD, rel=0.3)
    assert len(found.curve) == 150


def test_a_learning_rate_of_zero_learns_nothing_and_is_not_chosen() -> None:
    still = learned(rates=(0.0,), steps=30)
    assert torch.equal(still.start_std, still.end_std)
    assert learned(rates=(0.0, 0.03), steps=60).rate == 0.03


def test_the_same_function_written_in_two_ways_starts_with_the_same_error() -> None:
    scaled, absorbed = learned(steps=1), learned(steps=1, weight_std=1 / 8, scale=1.0)
    torch.testing.assert_close(scaled.start, absorbed.start)
    torch.testing.assert_close(scaled.start_std, absorbed.start_std)


def test_rows_have_keys_of_their_own_with_the_given_moments() -> None:
    query, key = own_keys(torch.Generator().manual_seed(0), 400, 5, 32, std=2.0, mean=1.0)
    assert query.dtype == key.dtype == torch.float64
    assert key.mean().item() == pytest.approx(1.0, abs=0.05)
    assert key.std().item() == pytest.approx(2.0, abs=0.05)
    assert not torch.equal(key[0], key[1])
