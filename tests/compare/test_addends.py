"""What both sides add to the logits, told apart into a bias and a fill of hidden keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sqrtdk.compare.inside.addends import common_keys, split_alike
from sqrtdk.compare.inside.program import Formula

ROWS = 7
SLOPES = torch.tensor([0.5, 0.125])[:, None, None]
CAUSAL = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()[None, None]
APART = (torch.arange(ROWS)[:, None] - torch.arange(ROWS)).float()


def table(seed: int) -> Tensor:
    """A number for each distance, of two heads, (2, L, L)."""
    drawn = torch.randn(2, 2 * ROWS, generator=torch.Generator().manual_seed(seed))
    return drawn[:, (APART + ROWS).long()]


def logits(formula: Formula) -> Tensor:
    """What a formula adds, (1, 2, L, L)."""
    added = torch.zeros(1, 2, ROWS, ROWS, dtype=torch.float64)
    if formula.bias is not None:
        added = added + formula.bias * formula.bias_by
    if formula.visible is not None:
        added = torch.where(formula.visible, added, added + formula.fill * formula.fill_by)
    return added


def near(one: Tensor, other: Tensor) -> bool:
    """Off by sums of float32 at most, of which two are made."""
    return bool(((one - other).abs() <= 2 * torch.finfo(torch.float32).eps * other.abs().max()).all())


@pytest.mark.parametrize("hidden", [CAUSAL, CAUSAL.roll(1, -1) | CAUSAL], ids=["the same keys", "one key less"])
@pytest.mark.parametrize(
    "bias",
    [None, -SLOPES * APART.abs(), -SLOPES * APART, SLOPES * torch.arange(ROWS)],
    ids=["none", "on both sides of the diagonal", "through the diagonal", "by the key"],
)
def test_a_sum_is_told_apart_where_the_other_side_hides_keys(bias: Tensor | None, hidden: Tensor) -> None:
    added = torch.where(hidden, 0.0, -5.0) + (0.0 if bias is None else bias)
    own = Formula(bias=added, bias_by=2.0)
    _, told = split_alike(Formula(visible=CAUSAL), own)
    assert told.visible is not None
    assert torch.equal(told.visible.expand_as(hidden), hidden)
    assert told.fill == pytest.approx(-5.0)
    assert (told.fill_by, told.fill_added) == (2.0, True)
    assert (told.bias is None) == (bias is None)
    assert near(logits(told), logits(own))


def test_the_other_sides_bias_is_known_again_times_a_number() -> None:
    own = Formula(bias=0.3 * table(0) + torch.where(CAUSAL, 0.0, -7.0))
    a, told = split_alike(Formula(bias=table(0), visible=CAUSAL), own)
    assert told.bias is not None
    assert a.bias is not None
    assert told.fill == pytest.approx(-7.0)
    assert near(told.bias - 7.0, 0.3 * a.bias - 7.0)
    assert near(logits(told), logits(own))


@pytest.mark.parametrize("own", [table(1), table(1) + torch.where(CAUSAL, 0.0, -5.0)], ids=["no fill", "a fill"])
def test_what_could_be_any_bias_stays_one(own: Tensor) -> None:
    _, told = split_alike(Formula(visible=CAUSAL), Formula(bias=own, bias_name="relative"))
    assert told.visible is None
    assert told.bias is own
    assert told.bias_name == "relative"


def test_two_numbers_on_both_sides_are_two_masks() -> None:
    other = torch.where(CAUSAL.tril(1) & CAUSAL.roll(1, -1), 0.0, -2.0)
    a, b = split_alike(Formula(bias=torch.where(CAUSAL, 0.0, -25.0)), Formula(bias=other))
    assert (a.bias, a.fill, b.bias, b.fill) == (None, -25.0, None, -2.0)


def test_a_bias_that_was_lost_in_minus_infinity_is_the_other_sides() -> None:
    lost, known = torch.where(CAUSAL, table(0), 0.0), 0.25 * table(0)
    a, b = split_alike(Formula(bias=lost, visible=CAUSAL), Formula(bias=known, visible=CAUSAL | CAUSAL.roll(1, -1)))
    assert a.bias is not None
    assert b.bias is known
    assert near(a.bias, table(0)[None].double())


@pytest.mark.parametrize(
    "line",
    [APART.abs(), APART, -torch.arange(ROWS).float().expand(ROWS, -1), (APART + 3)[:-3].abs()],
    ids=["on both sides of the diagonal", "through the diagonal", "by the key", "of the lower right diagonal"],
)
def test_straight_lines_are_alibi(line: Tensor) -> None:
    a, b = split_alike(Formula(bias=-SLOPES * line, bias_name="relative"), Formula(bias=table(0), bias_name="relative"))
    assert (a.bias_name, b.bias_name) == ("alibi", "relative")


def test_keys_count_that_both_give_weight() -> None:
    upper = CAUSAL.mT
    assert common_keys(Formula(), Formula(visible=CAUSAL, fill=-5.0)) is None
    both = common_keys(Formula(visible=CAUSAL), Formula(visible=upper, fill=-1e4))
    assert both is not None
    assert torch.equal(both, CAUSAL & upper)
