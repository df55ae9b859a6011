"""A bilinear layer that learns a teacher's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sqrtdk_lab._teacher import LEARNED, TEACHER_STD, Fit, Start, fit

SIZES: dict[str, Any] = {"d_k": 8, "learners": 3, "rows": 32, "keys": 8}


USUAL = Start(weight_std=8**-0.5, scale=8**-0.5)


def learned(*starts: Start, **changes: Any) -> list[Fit]:
    named = {str(i): start for i, start in enumerate(starts)}
    rng = torch.Generator().manual_seed(0)
    return list(fit(rng, **{**SIZES, "starts": named, "rates": (0.05,), "steps": 150, **changes}).values())


def test_it_learns_the_teacher_and_the_range_of_its_logits() -> None:
    (found,) = learned(USUAL)
    assert found.end.shape == (3,)
    assert (found.start > 0.3).all()
    assert (found.end < 0.02).all()
    assert found.end_std.mean().item() == pytest.approx(TEACHER_STD, rel=0.3)
    assert len(found.curve) == 150


def test_a_learning_rate_of_zero_learns_nothing_and_is_not_chosen() -> None:
    (still,) = learned(USUAL, rates=(0.0,), steps=30)
    assert torch.equal(still.start_std, still.end_std)
    assert (still.steps == 30).all()  # it never learned
    assert learned(USUAL, rates=(0.0, 0.05), steps=60)[0].rate == 0.05


def test_the_same_function_written_in_two_ways_starts_with_the_same_error() -> None:
    scaled, absorbed = learned(USUAL, Start(weight_std=1 / 8, scale=1.0), steps=1)
    torch.testing.assert_close(scaled.start, absorbed.start)
    torch.testing.assert_close(scaled.start_std, absorbed.start_std)


def test_starts_that_are_equal_learn_the_same_and_a_start_does_not_depend_on_its_company() -> None:
    alone, one, other = *learned(USUAL, steps=40), *learned(USUAL, USUAL, steps=40)
    assert torch.equal(one.end, other.end)
    torch.testing.assert_close(one.end, alone.end, rtol=1e-3, atol=0.0)


def test_steps_end_where_the_mean_error_falls_below_the_bar() -> None:
    (found,) = learned(USUAL, learners=1)
    step = int(found.steps)
    assert found.curve[step - 20 : step].mean() < LEARNED <= found.curve[step - 21 : step - 1].mean()


@pytest.mark.full
def test_noise_leaves_an_error_that_twice_the_scale_does_not_change_but_no_scale_does() -> None:
    starts = (USUAL, Start(8**-0.5, 8**-0.5 / 2), Start(8**0.5, 1.0))
    usual, half, sharp = learned(*starts, rates=(0.025, 0.05, 0.1), steps=300, noise=0.5)
    assert (usual.end > 1e-3).all()  # without noise it is far below
    assert 0.8 < (half.end / usual.end).log().mean().exp() < 1.2
    assert (sharp.end > 3.0 * usual.end).all()
