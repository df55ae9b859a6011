"""Shares of a difference lie between 0 and 1, and no cause that makes it larger is kept, whatever the residues are."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from sqrtdk.compare.inside.explain import helpful, share_gone
from sqrtdk.compare.inside.segments import SegmentGap
from sqrtdk.compare.inside.suspect import Suspicion

SIZES = st.one_of(st.floats(min_value=0.0), st.just(math.nan))
MOST = 4


def gap(size: float) -> SegmentGap:
    return SegmentGap(size, size, 1e-6, False)


def suspicion(number: int) -> Suspicion:
    return Suspicion(f"cause {number}", "scale", None, None, lambda own: own, lambda: "")


@given(SIZES, SIZES)
def test_a_share_is_between_0_and_1(before: float, after: float) -> None:
    assert 0.0 <= share_gone(gap(before), gap(after)) <= 1.0


@given(st.data(), st.sampled_from([0.0, 0.5]))
def test_no_cause_that_makes_the_residue_larger_is_kept(data: st.DataObject, least: float) -> None:
    every = tuple(suspicion(number) for number in range(data.draw(st.integers(0, MOST))))
    chosen = [some for count in range(len(every) + 1) for some in itertools.combinations(every, count)]
    drawn = st.lists(SIZES, min_size=len(chosen), max_size=len(chosen))
    residues = dict(zip([tuple(id(one) for one in some) for some in chosen], data.draw(drawn), strict=True))

    def left(some: tuple[Suspicion, ...]) -> SegmentGap:
        return gap(residues[tuple(id(one) for one in some)])

    kept = helpful(every, left, least)
    after = left(kept).size
    for one in kept:
        without = left(tuple(other for other in kept if other is not one)).size
        assert not after >= without
        assert 0.0 < share_gone(gap(without), gap(after)) <= 1.0
    if kept:
        assert not after >= left(()).size
