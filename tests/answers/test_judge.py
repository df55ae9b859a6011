"""The verdict: proven, consistent with, not decided, no fault, and what makes each."""

from __future__ import annotations

import pytest
import torch

from sqrtdk.answers.judge import CONSISTENT, NO_FAULT, PROVEN, UNDECIDED, Tried, ahead, judge

ROWS = 320


def tried(residue: float, floor: float = 0.01, seed: int = 0, shape: torch.Tensor | None = None) -> Tried:
    """A run whose squares have a mean of residue^2, and its own log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(ROWS, generator=generator, dtype=torch.float64) + 0.5 if shape is None else shape
    return Tried(drawn / drawn.mean() * residue**2, torch.randn(ROWS, 4, generator=generator).double(), floor, True)


def test_an_edit_within_rounding_and_far_ahead_is_proven() -> None:
    verdict = judge([tried(1.0), tried(0.009, seed=1), tried(0.8, seed=2)])
    assert (verdict.kind, verdict.best, verdict.ties) == (PROVEN, 1, ())
    assert verdict.explained == pytest.approx(1 - 0.009**2)


@pytest.mark.parametrize(
    ("unedited", "nearest", "why"),
    [
        (1.0, 0.016, "more is left than 1.5 floors"),
        (0.025, 0.009, "the unedited model is not well above rounding"),
    ],
)
def test_less_is_not_decided(unedited: float, nearest: float, why: str) -> None:
    verdict = judge([tried(unedited), tried(nearest, seed=1), tried(0.9, seed=2)])
    assert verdict.kind == UNDECIDED, why


def test_what_leaves_a_hundredth_may_leave_two_floors_since_a_floor_is_one_draw() -> None:
    assert judge([tried(2.0), tried(0.018, seed=1), tried(1.8, seed=2)]).kind == PROVEN
    assert judge([tried(1.5), tried(0.018, seed=1), tried(1.4, seed=2)]).kind == UNDECIDED


def test_an_edit_that_explains_little_is_not_proven_however_large_its_floor() -> None:
    assert judge([tried(0.1, floor=0.06), tried(0.08, floor=0.06, seed=1)]).kind == UNDECIDED


def test_where_the_floor_is_good_nine_tenths_are_asked_for() -> None:
    half = judge([tried(1.0, floor=0.5), tried(0.6, floor=0.5, seed=1)])
    assert (half.kind, 0.4 < half.explained < 0.9) == (UNDECIDED, True)


def test_a_tie_of_another_part_is_not_decided_and_of_the_same_part_is_a_range() -> None:
    same_rows = torch.rand(ROWS, dtype=torch.float64) + 0.5
    noise = torch.tensor([0.9, 1.1] * (ROWS // 2), dtype=torch.float64)
    runs = [tried(1.0), tried(0.009, seed=1, shape=same_rows), tried(0.00901, seed=2, shape=same_rows * noise)]
    assert judge(runs, ["", "window", "scale"]).kind == UNDECIDED
    assert judge(runs, ["", "window", "scale"]).ties == (2,)
    ranged = judge(runs, ["", "window", "window"])
    assert (ranged.kind, ranged.alike, ranged.ties) == (PROVEN, (2,), ())


def test_an_edit_that_answers_alike_is_another_name_and_no_tie() -> None:
    one = tried(0.009, seed=1)
    verdict = judge([tried(1.0), one, Tried(one.squares.clone(), one.own + 1e-7, 0.01, True)], ["", "a", "b"])
    assert (verdict.kind, verdict.best, verdict.twins, verdict.ties) == (PROVEN, 1, (2,), ())


def test_a_fitted_number_that_leaves_more_than_rounding_is_consistent() -> None:
    runs = [tried(1.0), tried(0.03, seed=1), tried(0.8, seed=2)]
    assert judge(runs).kind == UNDECIDED
    assert judge(runs, fitted=[1]).kind == CONSISTENT
    assert judge([runs[0], tried(0.06, seed=1), runs[2]], fitted=[1]).kind == UNDECIDED


def test_a_model_within_rounding_has_no_fault() -> None:
    verdict = judge([tried(0.012), tried(0.0119, seed=1), tried(0.5, seed=2)])
    assert (verdict.kind, verdict.best) == (NO_FAULT, 0)


def test_an_unexplained_difference_is_not_decided() -> None:
    assert judge([tried(0.3), tried(0.31, seed=1), tried(0.8, seed=2)]).kind == UNDECIDED


def test_only_candidates_are_named_and_all_others_are_rivals() -> None:
    partly = tried(0.009, seed=1)
    rows = torch.arange(ROWS) < 100
    partly = Tried(torch.where(rows, partly.squares, torch.nan), partly.own, 0.01)
    verdict = judge([tried(1.0), partly, tried(0.5, seed=2)], candidates=[0, 2])
    assert (verdict.kind, verdict.best, verdict.ties) == (UNDECIDED, 2, (1,))


def test_ahead_compares_the_rows_that_both_have() -> None:
    near, far = torch.full((ROWS,), 0.1).double(), torch.full((ROWS,), 0.2).double()
    far[100:] = torch.nan
    assert (ahead(near, far), ahead(far, near)) == (1.0, 0.0)
    assert ahead(near, torch.full_like(far, torch.nan)) == 0.0
