"""Verdicts: each bar is put to the whole interval, and the parts make the answer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from sqrtdk.messages import Text
from sqrtdk_lab.claim import ClaimPart, Expect
from sqrtdk_lab.figures import Figure, Figures
from sqrtdk_lab.judge import deciding_checks, judge_claim

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
    verdict = judge_claim(Figures([INTERVAL]), [ClaimPart(TEXT, (Expect("x", low, high),))])
    assert verdict.findings[0].met is met
    assert verdict.answer == {True: "holds", False: "fails", None: "undecided"}[met]


BARS = {True: Expect("x", low=3.0), False: Expect("x", low=7.0), None: Expect("x", low=5.0)}


@pytest.mark.parametrize("answers", list(itertools.product((True, False, None), repeat=3)))
def test_a_part_needs_all_its_bars(answers: tuple[bool | None, ...]) -> None:
    finding = judge_claim(Figures([INTERVAL]), [ClaimPart(TEXT, tuple(BARS[answer] for answer in answers))]).findings[0]
    assert finding.met is (False if False in answers else None if None in answers else True)


VALUES = {True: 5.0, False: 1.0, None: 3.0}
MOST_PARTS = 4
SAID = [
    tuple(zip(questions, met, strict=True))
    for count in range(1, MOST_PARTS + 1)
    for questions in itertools.product("xyz", repeat=count)
    for met in itertools.product((True, False, None), repeat=count)
    if list(dict.fromkeys(questions)) == list("xyz")[: len(set(questions))]  # names of questions do not matter
]


def _answer(said: Sequence[tuple[str, bool | None]]) -> str:
    """The verdict of parts, each a bar put to the figure of its question at a place of its own."""
    values = [(name, VALUES[met]) for name, met in said]
    figures = [Figure(name, v, v - 1, v + 1, "t", 9, {"part": i}) for i, (name, v) in enumerate(values)]
    parts = [ClaimPart(TEXT, (Expect(name, low=3.0, at={"part": i}),)) for i, (name, _) in enumerate(said)]
    verdict = judge_claim(Figures(figures), parts)
    assert [finding.met for finding in verdict.findings] == [met for _, met in said]
    assert [finding.question for finding in verdict.findings] == [part.question for part in parts]
    return verdict.answer


def test_parts_make_the_verdict() -> None:
    for said in (one for one in SAID if all(met is not None for _, met in one)):
        met = {answer for _, answer in said}
        both = any({(name, True), (name, False)} <= set(said) for name, _ in said)
        wanted = "depends" if both else "partly" if len(met) == 2 else "holds" if True in met else "fails"
        assert _answer(said) == wanted, said


def test_undecided_is_what_the_undecided_parts_could_still_change() -> None:
    for said in SAID:
        ends = [[(name, end) for end in ((True, False) if met is None else (met,))] for name, met in said]
        could_be = {_answer(one) for one in itertools.product(*ends)}
        assert _answer(said) == (could_be.pop() if len(could_be) == 1 else "undecided"), said


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("x+ x-", "depends"),
        ("x+ y-", "partly"),
        ("x+ y- y-", "partly"),
        ("x+ x- y-", "depends"),
        ("x+ x- y?", "depends"),
        ("x+ y- z?", "partly"),
        ("x+ y- y?", "undecided"),
        ("x+ x?", "undecided"),
    ],
)
def test_one_part_that_differs_is_a_condition_and_parts_that_differ_are_none(said: str, answer: str) -> None:
    signs = {"+": True, "-": False, "?": None}
    assert _answer([(one[0], signs[one[1]]) for one in said.split()]) == answer


def test_other_bars_or_other_figures_are_another_question() -> None:
    bar = Expect("x", low=3.0, at={"d_k": 16})
    same = ClaimPart(TEXT, (bar, Expect("x", low=3.0, at={"d_k": 64})))
    assert ClaimPart(TEXT, (bar,)).question == same.question
    others = (Expect("y", low=3.0), Expect("x", low=2.0), Expect("x", low=3.0, high=9.0))
    assert len({part.question for part in (same, *(ClaimPart(TEXT, (one,)) for one in others))}) == 1 + len(others)


def test_what_is_undecided_stays_seen_beside_parts_that_hold_and_fail() -> None:
    verdict = judge_claim(Figures([INTERVAL]), [ClaimPart(TEXT, (BARS[answer],)) for answer in (True, False, None)])
    assert verdict.answer == "partly"
    assert [finding.met for finding in verdict.findings] == [True, False, None]


def test_a_bar_asks_every_place_or_the_one_it_names() -> None:
    figures = Figures([Figure("x", v, v, v, "exact", 1, {"d_k": d}) for d, v in ((16, 1.0), (64, 9.0))])
    assert judge_claim(figures, [ClaimPart(TEXT, (Expect("x", high=5.0),))]).answer == "fails"
    assert judge_claim(figures, [ClaimPart(TEXT, (Expect("x", high=5.0, at={"d_k": 16}),))]).answer == "holds"


def test_a_bar_without_a_figure_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no figure y"):
        judge_claim(Figures([INTERVAL]), [ClaimPart(TEXT, (Expect("y"),))])


@pytest.mark.parametrize("parts", [[], [ClaimPart(TEXT, ())], [ClaimPart(TEXT, (BARS[True],)), ClaimPart(TEXT, ())]])
def test_of_nothing_nothing_follows(parts: list[ClaimPart]) -> None:
    verdict = judge_claim(Figures([INTERVAL]), parts)
    assert verdict.answer == "undecided"
    assert True not in [finding.met for finding in verdict.findings if not finding.checks]


def test_a_part_that_is_not_measurable_takes_no_part_in_the_verdict() -> None:
    peak = Figure("peak", 0.5, 0.4, 0.6, "t", 9)
    reason = Text("nobody says what counts", "没有说明以什么为准")
    parts = [ClaimPart(TEXT, (Expect("peak", low=0.3),)), ClaimPart(TEXT, reason=reason)]
    verdict = judge_claim(Figures([peak]), parts)
    assert verdict.answer == "holds"
    assert [(part.state, part.reason) for part in verdict.findings] == [("met", None), ("not_measurable", reason)]
    assert judge_claim(Figures([peak]), parts[1:]).answer == "undecided"


def _deciding(*parts: tuple[str, tuple[float, ...]]) -> list[tuple[str, float]]:
    """The figures that decide, as (name, value). Each part asks whether its figures, of width 2, are above 0."""
    figures = [Figure(name, v, v - 1, v + 1, "t", 9, {"v": v}) for name, values in parts for v in values]
    asked = [
        ClaimPart(TEXT, tuple(Expect(name, low=0.0, at={"v": v}) for v in values)) for name, values in parts if values
    ]
    return [(check.figure.name, check.figure.value) for check in deciding_checks(judge_claim(Figures(figures), asked))]


def test_a_verdict_hangs_on_what_would_turn_first() -> None:
    assert _deciding(("x", (5.0, 3.0, 9.0)), ("y", (4.0,))) == [("x", 3.0)]
    # of a part that is missed the farthest miss decides: the others could turn and change nothing
    assert _deciding(("x", (-5.0, -9.0, 2.0)), ("y", (-7.0,))) == [("y", -7.0)]
    assert _deciding(("x", (5.0, 2.0)), ("y", (-3.0,)), ("z", (-4.0,))) == [("x", 2.0), ("y", -3.0)]


def test_a_condition_hangs_on_two_answers_to_one_question() -> None:
    assert _deciding(("x", (5.0,)), ("x", (-6.0,)), ("x", (-4.0,)), ("y", (-2.0,))) == [("x", 5.0), ("x", -4.0)]


def test_an_undecided_verdict_hangs_on_what_is_undecided() -> None:
    assert _deciding(("x", (5.0, 0.5)), ("y", (3.0,))) == [("x", 0.5)]


def test_an_exact_figure_decides_only_where_no_other_could_turn() -> None:
    exact, sampled = Figure("x", 3.0, 3.0, 3.0, "exact", 1), Figure("y", 90.0, 80.0, 99.0, "t", 9)
    parts = [ClaimPart(TEXT, (Expect("x", low=2.9),)), ClaimPart(TEXT, (Expect("y", low=2.0),))]
    assert [check.figure for check in deciding_checks(judge_claim(Figures([exact, sampled]), parts))] == [sampled]
    assert [check.figure for check in deciding_checks(judge_claim(Figures([exact]), parts[:1]))] == [exact]


def test_of_nothing_nothing_decides() -> None:
    assert deciding_checks(judge_claim(Figures([INTERVAL]), [])) == ()
