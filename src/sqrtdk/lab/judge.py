"""From figures to a verdict. Every bar is put to the interval, never to the value alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqrtdk.lab.claim import Expect, Part
from sqrtdk.lab.figures import Figure, Figures
from sqrtdk.lab.text import Text

Answer = Literal["holds", "fails", "depends", "undecided"]


@dataclass(frozen=True, slots=True)
class Check:
    """One bar put to one figure.

    Attributes:
        figure: that was asked.
        low: least value.
        high: largest value.
        met: True where the whole interval meets the bar, False where none of it does, None where it straddles one.
    """

    figure: Figure
    low: float
    high: float
    met: bool | None


@dataclass(frozen=True, slots=True)
class PartAnswer:
    """The answer to one part: False where a bar is missed, None where one is undecided or there is none, else True."""

    text: Text
    checks: tuple[Check, ...]
    met: bool | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a claim.

    Attributes:
        answer: `holds` where every part does, `fails` where none does, `depends` where some do and some do not,
            `undecided` where an interval is too wide to tell, or nothing was asked.
        findings: the parts.
    """

    answer: Answer
    findings: tuple[PartAnswer, ...]


def judge(figures: Figures, parts: Sequence[Part]) -> Verdict:
    """Put every bar to its figures.

    Args:
        figures: what was measured.
        parts: what counts as true; each bar must find a figure.

    Example:
        >>> one = Figure("peak", 0.5, 0.4, 0.6, "t", 9)
        >>> part = Text("weights are sharp", "权重集中")
        >>> [judge(Figures([one]), [Part(part, (Expect("peak", low=low),))]).answer for low in (0.3, 0.7, 0.5)]
        ['holds', 'fails', 'undecided']
    """
    findings = tuple(PartAnswer(part.text, checks := _checks(figures, part), _all(checks)) for part in parts)
    answers = {finding.met for finding in findings}
    if {True, False} <= answers:
        return Verdict("depends", findings)
    if None in answers or not answers:  # of nothing, nothing follows
        return Verdict("undecided", findings)
    return Verdict("holds" if answers == {True} else "fails", findings)


def _checks(figures: Figures, part: Part) -> tuple[Check, ...]:
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
