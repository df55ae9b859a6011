"""From figures to a verdict. Every bar is compared with the interval, never with the value alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqrtdk.lab.claim import ClaimPart, Expect, Question
from sqrtdk.lab.figures import Figure, Figures
from sqrtdk.messages import Text

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
