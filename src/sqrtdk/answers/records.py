"""Results of a comparison with a side that answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqrtdk._shown import Saved, Shown
from sqrtdk.answers.judge import CONSISTENT, NO_FAULT, PROVEN, WITHIN
from sqrtdk.compare.records import SideInfo


@dataclass(frozen=True, slots=True)
class AnsweredCause:
    """A change of A with which it answers as B does.

    Attributes:
        name: One of the names in docs/en/diff.md.
        a: What A has.
        b: What B has.
        text: "rotary base: 10000 in A, 500000 in B"; a `sqrtdk.messages.Message`.
        fitted: Whether `b` was fitted to B's answers.
        low: Least tried number that B's answers do not tell from `b`; None where there is no other.
        high: Largest one.
        others: Texts of changes of other kinds that give the same answers.
        fix: What to change in B; a `sqrtdk.messages.Message`, "" unless the cause is proven.
    """

    name: str
    a: str | float | None
    b: str | float | None
    text: str
    fitted: bool = False
    low: float | None = None
    high: float | None = None
    others: tuple[str, ...] = ()
    fix: str = ""


@dataclass(frozen=True, slots=True)
class EditResidue:
    """One change of A that was tried, or several at once.

    Attributes:
        names: Names of the causes; () is A unchanged.
        texts: What is changed.
        residue: How far A's answers are then from B's, in nats: the root of the mean over rows of
            sum_i exp(b_i) (b_i - a_i)^2, over the log-probabilities b_i that B lists.
        floor: What rounding alone makes of A's answers with this change, in nats; None if it was not measured.
        whole: Whether all prompts ran; the others were given up after the first one.
    """

    names: tuple[str, ...]
    texts: tuple[str, ...]
    residue: float
    floor: float | None
    whole: bool


@dataclass(frozen=True, slots=True)
class DifferenceCourse:
    """How the difference goes along the sequence, bin by bin of positions.

    Attributes:
        ends: Last position of each bin, counted from 0.
        before: Residue of A unchanged in each bin, in nats; NaN where B gave no row.
        after: Residue with the named causes; the same where none is named.
        begins: First position of the first bin that differs by more than rounding; None if none does.
        grows: Whether it grows with the position.
    """

    ends: tuple[int, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    begins: int | None
    grows: bool


@dataclass(frozen=True, slots=True)
class AnswersReport(Saved, Shown):
    """The result of `sqrtdk.answers.diff_answers`.

    Attributes:
        a: The model.
        b: The side that answers.
        verdict: "proven", "consistent with", "not decided" or "no fault".
        causes: What is proven, or what B's answers are consistent with; else empty.
        ties: Texts of changes that B's answers do not tell from the nearest one.
        difference: Residue of A unchanged, in nats.
        residue: Residue that is left with the causes.
        floor: What rounding makes of the answers with the causes.
        explained: Share of the squared difference that goes away with the causes.
        least: Differences below so many nats are rounding.
        hidden: Texts of changes that these prompts could not have shown.
        rounding: How A was rounded, as B seems to be: "float32", "int8, groups of 32".
        roundings: Every kind of rounding that B's answers fit alike, `rounding` first.
        shift: Tokens by which B's rows tell of a later token than they say.
        bos: Tokens of the beginning of a sequence that B adds.
        places: The difference by position.
        edits: Every change that was tried, the nearest first.
        prompts: Number of prompts.
        tokens: Tokens of all prompts.
        requests: Requests that B answered.
        rows: Rows that B gave.
        forwards: Prompts that A ran.
        paragraphs: The result in sentences, most important first.
        seed: Seed of random weights and ids.
        command: The user's command line.
        environment: Description of this machine.
        fail_on: See `exit_code`.
    """

    a: SideInfo
    b: SideInfo
    verdict: str
    causes: tuple[AnsweredCause, ...]
    ties: tuple[str, ...]
    difference: float
    residue: float
    floor: float
    explained: float
    least: float
    hidden: tuple[str, ...]
    rounding: str
    roundings: tuple[str, ...]
    shift: int
    bos: int
    places: DifferenceCourse
    edits: tuple[EditResidue, ...]
    prompts: int
    tokens: int
    requests: int
    rows: int
    forwards: int
    paragraphs: tuple[str, ...] = ()
    seed: int = 0
    command: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    fail_on: str = "different"

    def __repr__(self) -> str:
        named = ", ".join(cause.name for cause in self.causes) or "none"
        return f"AnswersReport({self.a.name!r}, {self.b.name!r}, {self.verdict}; causes: {named})"

    @property
    def same(self) -> bool | None:
        """Whether B answers as A does, up to rounding; None if that could not be decided."""
        if self.verdict == NO_FAULT:
            return True
        differs = self.verdict in (PROVEN, CONSISTENT) or self.difference > WITHIN * self.floor
        return False if differs else None

    @property
    def ok(self) -> bool:
        """Whether B answers as A does; False if that could not be decided."""
        return self.same is True

    @property
    def exit_code(self) -> int:
        """Return the exit status of the command: 1 if the sides differ, else 0.

        With fail_on "unmeasured" it is also 1 if that could not be decided; with "never" it is 0.
        """
        if self.fail_on == "never":
            return 0
        return int(self.same is False or (self.fail_on == "unmeasured" and self.same is None))
