"""From figures to a verdict. Every bar is compared with the interval, never with the value alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqrtdk.messages import Text
from sqrtdk_lab.claim import ClaimPart, Expect, Question
from sqrtdk_lab.figures import Figure, Figures

Answer = Literal["holds", "fails", "partly", "depends", "undecided"]
PartState = Literal["met", "missed", "undecided", "not_measurable"]


@dataclass(frozen=True, slots=True)
class Check:
    """One bar on one figure.

    Attributes:
        figure: the figure.
        low: smallest value.
        high: largest value.
        met: True if the whole interval meets the bar, False if none of it does, None if it straddles the bar.
    """

    figure: Figure
    low: float
    high: float
    met: bool | None


@dataclass(frozen=True, slots=True)
class PartAnswer:
    """The answer to one part.

    Attributes:
        text: the part in words.
        checks: its bars on the figures.
        met: False if a bar is missed, None if a bar is undecided or there is none, else True.
        reason: why the part is not measurable; None if it is.
    """

    text: Text
    checks: tuple[Check, ...]
    met: bool | None
    reason: Text | None = None

    @property
    def state(self) -> PartState:
        """The answer in one word."""
        if self.reason is not None:
            return "not_measurable"
        return "undecided" if self.met is None else "met" if self.met else "missed"

    @property
    def question(self) -> Question:
        """The question of this part, wherever it is asked."""
        return frozenset((check.figure.name, check.low, check.high) for check in self.checks)


@dataclass(frozen=True, slots=True)
class ClaimVerdict:
    """The answer to a claim.

    Attributes:
        answer: see `answer_from_parts`.
        findings: the parts.
    """

    answer: Answer
    findings: tuple[PartAnswer, ...]


def judge_claim(figures: Figures, parts: Sequence[ClaimPart]) -> ClaimVerdict:
    """Compare every bar with its figures.

    Args:
        figures: the measured figures.
        parts: the conditions for truth; each bar must find a figure.

    Example:
        >>> one = Figure("peak", 0.5, 0.4, 0.6, "t", 9)
        >>> text = Text("weights are sharp", "权重集中")
        >>> parts = [ClaimPart(text, (Expect("peak", low=low),)) for low in (0.3, 0.7, 0.5)]
        >>> [judge_claim(Figures([one]), [part]).answer for part in parts]
        ['holds', 'fails', 'undecided']
    """
    checked = ((part, _checks(figures, part)) for part in parts)
    findings = tuple(PartAnswer(part.text, checks, _all(checks), part.reason) for part, checks in checked)
    return ClaimVerdict(answer_from_parts(findings), findings)


def answer_from_parts(findings: Sequence[PartAnswer]) -> Answer:
    """Return the answer that follows from the parts.

    `holds` if every part does, `fails` if none does. If some hold and some do not, it is `depends` if the same part is
    met under one condition and missed under another: the same bars on the same figures at different places. It is
    `partly` if only different parts differ. `undecided` if deciding the undecided parts one way or the other would
    change the answer, or if there are no parts. Parts that are not measurable don't count.

    Args:
        findings: the parts.

    Example:
        >>> peak, mean = ((Check(Figure(name, 0, 0, 0, "exact", 1), 0, 1, None),) for name in ("peak", "mean"))
        >>> text = Text("part", "部分")
        >>> answer_from_parts([PartAnswer(text, peak, True), PartAnswer(text, mean, False)])
        'partly'
        >>> answer_from_parts([PartAnswer(text, peak, True), PartAnswer(text, peak, False)])
        'depends'
    """
    findings = [finding for finding in findings if finding.reason is None]
    questions = [finding.question for finding in findings]
    ends = [(True, False) if finding.met is None else (finding.met,) for finding in findings]
    answers = {_decided(questions, met) for met in itertools.product(*ends)} if findings else set()
    return answers.pop() if len(answers) == 1 else "undecided"


def _decided(questions: Sequence[Question], met: Sequence[bool]) -> Answer:
    if len(set(met)) == 1:
        return "holds" if met[0] else "fails"
    return "partly" if len(set(zip(questions, met, strict=True))) == len(set(questions)) else "depends"


def deciding_checks(verdict: ClaimVerdict) -> tuple[Check, ...]:
    """Return the checks that a verdict hangs on: those that would turn first if the figures moved.

    A part that is met hangs on the check nearest to its bar. A part that is missed hangs on the check that misses by
    most, because its other checks don't matter. Of several parts with the same answer, the one whose check is nearest
    to its bar counts. `holds`, `fails` and `undecided` hang on one check. `partly` and `depends` hang on two, one met
    and one missed; those of `depends` ask the same question.

    Args:
        verdict: the verdict on a claim.

    Returns:
        The check that is met, then the one that is missed; of an undecided claim a check that is undecided. Empty if
        no part has a check.

    Example:
        >>> sure, near = (Figure("peak", 0.5, low, 0.6, "t", 9) for low in (0.5, 0.4))
        >>> checks = tuple(Check(figure, 0.3, math.inf, True) for figure in (sure, near))
        >>> part = PartAnswer(Text("weights are sharp", "权重集中"), checks, True)
        >>> [check.figure.low for check in deciding_checks(ClaimVerdict("holds", (part,)))]
        [0.4]
    """
    findings = [finding for finding in verdict.findings if finding.checks]
    if verdict.answer == "depends":
        states: dict[Question, set[bool | None]] = {}
        for finding in findings:
            states.setdefault(finding.question, set()).add(finding.met)
        findings = [finding for finding in findings if {True, False} <= states[finding.question]]
    decided: tuple[bool | None, ...] = (None,) if verdict.answer == "undecided" else (True, False)
    weakest = []
    for met in decided:
        hanging = [_hangs_on(finding, met) for finding in findings if finding.met is met]
        weakest += [min(hanging, key=_distance)] if hanging else []
    return tuple(weakest)


def _hangs_on(finding: PartAnswer, met: bool | None) -> Check:
    # A record that somebody edited may have a part that is missed and no check that is.
    checks = [check for check in finding.checks if check.met is met] or list(finding.checks)
    return max(checks, key=_distance) if met is False else min(checks, key=_distance)


def _distance(check: Check) -> tuple[bool, float]:
    """Return how far a figure is from the bars, to be compared: in widths of its interval.

    An exact figure can't move, so it counts as farther than any other; two of them compare by their relative distance.
    """
    figure = check.figure
    width = figure.high - figure.low
    gaps = []
    for bar in (check.low, check.high):
        if math.isfinite(bar):
            gap = max(figure.low - bar, bar - figure.high, 0.0)
            gaps.append(gap / width if width > 0 else gap / (max(abs(bar), abs(figure.value)) or 1.0))
    if check.low == check.high and check.met:  # an equality that is met could not be met better
        return True, math.inf
    # Of two bars the nearer one counts, whether the figure lies between them or outside.
    return not width > 0, min(gaps, default=math.inf)


def _checks(figures: Figures, part: ClaimPart) -> tuple[Check, ...]:
    checks = []
    for expect in part.expects:
        found = figures.all(expect.figure, **expect.at)
        assert found, f"no figure {expect.figure} at {dict(expect.at)}"
        checks += [Check(figure, expect.low, expect.high, _met(figure, expect)) for figure in found]
    return tuple(checks)


def _met(figure: Figure, expect: Expect) -> bool | None:
    if expect.low <= figure.low and figure.high <= expect.high:
        return True
    if figure.high < expect.low or figure.low > expect.high:
        return False
    return None


def _all(checks: Sequence[Check]) -> bool | None:
    answers = {check.met for check in checks}
    return False if False in answers else None if None in answers or not answers else True
