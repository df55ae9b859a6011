"""Factors of the rows: what is a length, and what is a scale."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sqrtdk.compare.causes import length_factor, scale
from sqrtdk.compare.program import Formula, Program, Way
from sqrtdk.compare.suspect import Sides

WIDTH, LENGTH = 12, 24
ROOT = WIDTH**-0.5
CAUSAL = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
PADDED = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
PADDED[1, ..., 17:] = False
VISIBLE = {"causal": CAUSAL, "padded": PADDED}


def logs(visible: Tensor, base: float, by: float = ROOT) -> Tensor:
    return by * visible.sum(-1, keepdim=True).double().log() / math.log(base)


def named(a: Tensor | float, b: Tensor | float, visible: Tensor) -> list[str]:
    way = Way()
    one, other = (Program(way, way, way, Formula(factor, visible=visible)) for factor in (a, b))
    sides = Sides(one, other, WIDTH, 4 * WIDTH, 4, self_attention=True)
    return [found.name for cause in (length_factor, scale) for found in cause.suspect(sides)]


@pytest.mark.parametrize("rows", VISIBLE)
def test_logs_of_the_keys_that_rows_see_are_a_length(rows: str) -> None:
    visible = VISIBLE[rows]
    assert named(logs(visible, 8), ROOT, visible) == ["length_factor"]
    assert named(ROOT, logs(visible, 8), visible) == ["length_factor"]
    assert named(logs(visible, 8), logs(visible, 16), visible) == ["length_factor"]
    assert named(logs(visible, 8), logs(visible, 8), visible) == []


@pytest.mark.parametrize("rows", VISIBLE)
@pytest.mark.parametrize("wrong", [1.0, 1 / WIDTH, WIDTH**0.5])
def test_another_scale_beside_the_same_length(wrong: float, rows: str) -> None:
    visible = VISIBLE[rows]
    assert named(logs(visible, 10), logs(visible, 10, wrong), visible) == ["scale"]


def test_factors_of_sequences_that_are_no_logs() -> None:
    """Of one number each sequence, which is not that of its keys."""
    factors = torch.tensor([0.5, 0.3]).double()[:, None, None, None].expand(2, 1, LENGTH, 1)
    assert named(factors, ROOT, PADDED) == ["scale"]
    assert named(factors, ROOT, CAUSAL) == ["scale"]


def test_factors_of_rows_that_are_no_logs() -> None:
    assert named(torch.rand(1, 1, LENGTH, 1).double() + 0.5, ROOT, CAUSAL) == ["length_factor"]
