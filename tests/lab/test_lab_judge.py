"""Verdicts: each bar is put to the whole interval, and the parts make the answer."""

from __future__ import annotations

import itertools

import pytest

from sqrtdk.lab.claim import Expect, Part
from sqrtdk.lab.figures import Figure, Figures
from sqrtdk.lab.judge import judge
from sqrtdk.lab.text import Text

TEXT = Text("part", "部分")
INTERVAL = Figure("x", 5.0, 4.0, 6.0, "t", 9)


@pytest.mark.parametrize(
    ("low", "high", "met"),
    [
        (3.0, 7.0, True),
        (4.0, 6.0, True),
        (6.5, 9.0, False),
        (1.0, 3.5, False),
        (5.0, 9.0, None),
        (1.0, 5.0, None),
        (4.5, 5.5, None),
    ],
)
def test_a_bar_decides_only_where_the_whole_interval_is_on_one_side(low: float, high: float, met: bool | None) -> None:
    verdict = judge(Figures([INTERVAL]), [Part(TEXT, (Expect("x", low, high),))])
    assert verdict.findings[0].met is met
    assert verdict.answer == {True: "holds", False: "fails", None: "undecided"}[met]


BARS = {True: Expect("x", low=3.0), False: Expect("x", low=7.0), None: Expect("x", low=5.0)}


@pytest.mark.parametrize("answers", list(itertools.product((True, False, None), repeat=3)))
def test_a_part_needs_all_its_bars(answers: tuple[bool | None, ...]) -> None:
    finding = judge(Figures([INTERVAL]), [Part(TEXT, tuple(BARS[answer] for answer in answers))]).findings[0]
    assert finding.met is (False if False in answers else None if None in answers else True)


@pytest.mark.parametrize("answers", list(itertools.product((True, False, None), repeat=3)))
def test_parts_make_the_verdict(answers: tuple[bool | None, ...]) -> None:
    answer = judge(Figures([INTERVAL]), [Part(TEXT, (BARS[answer],)) for answer in answers]).answer
    if True in answers and False in answers:
        assert answer == "depends"
    elif None in answers:
        assert answer == "undecided"
    else:
        assert answer == ("holds" if True in answers else "fails")


def test_what_is_undecided_stays_seen_beside_parts_that_hold_and_fail() -> None:
    verdict = judge(Figures([INTERVAL]), [Part(TEXT, (BARS[answer],)) for answer in (True, False, None)])
    assert verdict.answer == "depends"
    assert [finding.met for finding in verdict.findings] == [True, False, None]


def test_a_bar_asks_every_place_or_the_one_it_names() -> None:
    figures = Figures([Figure("x", v, v, v, "exact", 1, {"d_k": d}) for d, v in ((16, 1.0), (64, 9.0))])
    assert judge(figures, [Part(TEXT, (Expect("x", high=5.0),))]).answer == "fails"
    assert judge(figures, [Part(TEXT, (Expect("x", high=5.0, at={"d_k": 16}),))]).answer == "holds"


def test_a_bar_without_a_figure_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no figure y"):
        judge(Figures([INTERVAL]), [Part(TEXT, (Expect("y"),))])


@pytest.mark.parametrize("parts", [[], [Part(TEXT, ())], [Part(TEXT, (BARS[True],)), Part(TEXT, ())]])
def test_of_nothing_nothing_follows(parts: list[Part]) -> None:
    verdict = judge(Figures([INTERVAL]), parts)
    assert verdict.answer == "undecided"
    assert True not in [finding.met for finding in verdict.findings if not finding.checks]
