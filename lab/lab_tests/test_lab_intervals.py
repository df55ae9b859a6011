"""Intervals: they hold the truth as often as they say, and shrink with the samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sqrtdk_lab.figures import CONFIDENCE, Figure, Figures, format_figure
from sqrtdk_lab.intervals import (
    bootstrap,
    exact,
    geometric_mean,
    joint_mean,
    largest_draw,
    mean,
    proportion,
    ratio_of_means,
)

TRIALS = 600
# A share of 600 whose true value is 0.99 lies above 0.975 but once in a thousand; the bootstrap is a little too narrow.
LEAST = {"t": 0.975, "bootstrap": 0.965, "Clopper-Pearson": 0.975}


def _covered(figures: list[Figure], truth: float) -> float:
    assert {figure.method for figure in figures} <= set(LEAST)
    return sum(figure.low <= truth <= figure.high for figure in figures) / len(figures)


def test_t_intervals_of_a_few_normal_samples_hold_the_mean() -> None:
    rng = np.random.default_rng(1)
    covered = _covered([mean("x", rng.normal(3.0, 2.0, 5)) for _ in range(TRIALS)], 3.0)
    assert LEAST["t"] < covered < 1.0


def test_bootstrap_intervals_hold_the_median() -> None:
    rng = np.random.default_rng(2)
    figures = [bootstrap("x", rng.normal(3.0, 2.0, 101), np.median, seed=i) for i in range(TRIALS // 4)]
    assert LEAST["bootstrap"] <= _covered(figures, 3.0) <= 1.0


def test_bootstrap_of_pairs_keeps_the_pairs() -> None:
    x = np.random.default_rng(3).normal(1.0, 1.0, 300)

    figure = bootstrap("ratio", (2.0 * x, x), ratio_of_means, seed=0)
    assert figure.low == pytest.approx(2.0)
    assert figure.high == pytest.approx(2.0)
    assert figure.samples == 300


def test_intervals_of_a_geometric_mean_hold_it_and_stay_positive() -> None:
    rng = np.random.default_rng(6)
    figures = [geometric_mean("x", 3.0 * np.exp(rng.normal(0.0, 2.0, 4))) for _ in range(TRIALS)]
    assert LEAST["t"] < _covered(figures, 3.0) < 1.0
    assert all(0.0 < figure.low <= figure.value <= figure.high for figure in figures)
    assert geometric_mean("x", torch.tensor([1.0, 4.0, 16.0])).value == pytest.approx(4.0)
    with pytest.raises(AssertionError, match="positive"):
        geometric_mean("x", [1.0, 0.0])


def test_six_joint_intervals_hold_all_their_means_at_once() -> None:
    rng = np.random.default_rng(7)
    held = {1: 0, 6: 0}
    for _ in range(TRIALS):
        cells = rng.normal(size=(6, 5))
        for together in held:
            figures = [joint_mean("x", cell, together) for cell in cells]
            held[together] += all(figure.low <= 0.0 <= figure.high for figure in figures)
    assert held[6] / TRIALS > LEAST["t"]
    assert held[1] < held[6]


def test_the_largest_draw_has_no_interval_beyond_it() -> None:
    figure = largest_draw("x", torch.tensor([1.0, 3.0, 2.0]), d_k=64)
    assert figure == Figure("x", 3.0, 3.0, 3.0, "observed", 3, {"d_k": 64})
    assert str(figure) == "3"


def test_exact_intervals_of_a_share_hold_it() -> None:
    rng = np.random.default_rng(4)
    figures = [proportion("x", rng.binomial(50, 0.1), 50) for _ in range(TRIALS)]
    assert _covered(figures, 0.1) > LEAST["Clopper-Pearson"]
    none = proportion("x", 0, 100)
    assert none.low == 0.0
    assert none.high == pytest.approx(1 - ((1 - CONFIDENCE) / 2) ** (1 / 100))  # the closed form at no success


def test_intervals_shrink_with_the_root_of_the_samples() -> None:
    rng = np.random.default_rng(5)
    few, many = (mean("x", rng.normal(size=n)) for n in (1_000, 100_000))
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(10.0, rel=0.1)


def test_a_seed_gives_the_same_interval() -> None:
    values = torch.arange(50.0)
    assert bootstrap("x", values, np.mean, seed=7) == bootstrap("x", values, np.mean, seed=7)
    assert bootstrap("x", values, np.mean, seed=7) != bootstrap("x", values, np.mean, seed=8)


def test_samples_are_one_dimensional_and_two_at_least() -> None:
    with pytest.raises(AssertionError, match="one-dimensional"):
        mean("x", torch.zeros(2, 2))
    with pytest.raises(AssertionError, match="two samples"):
        mean("x", [1.0])


def test_figures_are_found_by_place() -> None:
    figures = Figures([exact("peak", i, d_k=d, scale=s) for i, (d, s) in enumerate([(16, "none"), (64, "none")])])
    assert figures("peak", d_k=64).value == 1.0
    assert [figure.value for figure in figures.all("peak", scale="none")] == [0.0, 1.0]
    with pytest.raises(AssertionError, match="2 figures"):
        figures("peak")
    with pytest.raises(AssertionError, match="twice"):
        Figures([exact("peak", 1.0), exact("peak", 2.0)])


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (1234.56, "1235"), (1e-7, "1e-07"), (float("inf"), "inf")])
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert format_figure(value) == text
