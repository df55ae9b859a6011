"""Causes in half precision that move no number beyond its rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sqrtdk.compare.inside import explain
from sqrtdk.compare.inside.segments import SegmentGap
from sqrtdk.compare.records import DiffReport
from sqrtdk.compare.rounding.precision import RISK
from tests.compare.ports.built import build
from tests.compare.ports.config import BASES
from tests.compare.ports.pairs import compare

HALF = (torch.bfloat16, torch.float16)


def planted(base: str, dtype: torch.dtype, **fields: Any) -> DiffReport:
    return compare(base, build(base, dtype=dtype, **fields), dtype=dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("base", ["eager", "gqa", "rope_fused"])
def test_a_scale_that_is_off_by_a_fiftieth_is_named(base: str, dtype: torch.dtype) -> None:
    report = planted(base, dtype, scale=1.02 * BASES[base].factor)
    for pair in report.pairs:
        assert (pair.same, {cause.name for cause in pair.causes} - {"input"}) == (False, {"scale"})
        assert pair.residue is not None
        assert pair.allowed is not None
        assert pair.residue <= pair.allowed
        assert pair.explained is not None
        assert pair.explained >= 1 - math.sqrt(explain.MOST_SQUARES_LEFT)


def test_it_is_found_by_all_numbers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """No single one is beyond what is allowed."""
    monkeypatch.setattr(explain, "MOST_SQUARES_LEFT", 0.0)
    assert planted("eager", torch.bfloat16, scale=1.02 * BASES["eager"].factor).same is True


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_scale_that_a_side_holds_in_half_is_no_cause(dtype: torch.dtype) -> None:
    held = float(torch.tensor(BASES["eager"].factor, dtype=dtype))
    assert held != BASES["eager"].factor
    assert planted("eager", dtype, scale=held).same is True


def test_few_vectors_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences of 24 tokens with 4 heads are 192 vectors."""
    fields = {"scale": 1.02 * BASES["eager"].factor}
    for least, same in ((192, False), (193, True)):
        monkeypatch.setattr(explain, "VECTORS", least)
        assert planted("eager", torch.bfloat16, **fields).same is same


def test_how_many_vectors_chance_does_not_line_up() -> None:
    """At most 2^(-(n + 1) / 2) of directions are so near to one; for the numbers that are asked, less than the risk."""
    assert 2 ** (-(explain.VECTORS + 1) / 2) <= RISK < 2 ** (-explain.VECTORS / 2)
    for count in (3, 9):
        noise = torch.randn(200_000, count, dtype=torch.float64)
        best = (
            (noise[:, 0] > 0) * noise[:, 0].square() / noise.square().sum(-1)
        )  # what a change along one axis can take
        share = float((best >= 1 - explain.MOST_SQUARES_LEFT).double().mean())
        limit = 2 ** (-(count + 1) / 2)
        assert limit / 4 < share <= limit


def test_what_is_exact_has_no_cause() -> None:
    nothing, something = (SegmentGap(size, size, 1.0, True) for size in (0.0, 1.0))
    assert not explain.shows(nothing, nothing)
    assert explain.shows(something, nothing)
    assert not explain.shows(something, something)
