"""Pairs of a comparison as a reader sees them: equal ones folded, each with one word for how it came out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqrtdk._language import Language
from sqrtdk._sites import fold, label, shape, site_name
from sqrtdk.compare.records import Cause, DiffReport, PairDiff, StageDiff
from sqrtdk.compare.words import UNKNOWN, excess, largest, told
from sqrtdk.report.diff_causes import caused
from sqrtdk.report.figures import number
from sqrtdk.report.said import TITLES, said

SAME, DIFFERS, FOLLOWS, UNJUDGED, CANCELS = "same", "differs", "follows", "not compared", "cancels"
OUTCOMES = (DIFFERS, FOLLOWS, UNJUDGED, SAME)  # of a pair
MARKS = (DIFFERS, FOLLOWS, CANCELS, UNJUDGED, SAME)  # of a stage


@dataclass(frozen=True, slots=True)
class PairFold:
    """Pairs that are shown as one, with the first as their speaker."""

    site_a: str
    site_b: str
    pairs: tuple[PairDiff, ...]

    @property
    def first(self) -> PairDiff:
        """The first in A's order; its words hold for all, its numbers for itself."""
        return self.pairs[0]

    @property
    def worst(self) -> PairDiff:
        """The pair whose figures are shown: the largest residue for what is allowed, or the largest difference."""
        if outcome(self.first) == DIFFERS:
            return max(self.pairs, key=excess)
        return largest(self.pairs, largest_left)

    @property
    def site(self) -> str:
        """Both sites, once where they are the same."""
        return self.site_a if self.site_a == self.site_b else f"{self.site_a} = {self.site_b}"


def fold_pairs(pairs: Iterable[PairDiff]) -> tuple[PairFold, ...]:
    """Fold the pairs that differ in one integer of their site and agree in all that one line shows."""

    def shown(pair: PairDiff) -> object:
        causes = tuple(map(change, told(pair.causes)))
        how = (pair.same, pair.first_stage, pair.follows_from, causes, pair.reason)
        beside = (pair.cancelling, pair.rows_left_out, pair.rows)
        return (*how, *beside, pair.index_a, pair.index_b, shape(pair.site_b), pair.formula_a, pair.formula_b)

    folds = []
    for site, group in fold(pairs, lambda pair: pair.site_a, shown):
        site_b = label([pair.site_b for pair in group])
        first = group[0]
        folds.append(PairFold(site_name(site, first.index_a), site_name(site_b, first.index_b), tuple(group)))
    return tuple(folds)


def outcome(pair: PairDiff) -> str:
    """One of `OUTCOMES`."""
    if pair.same is not False:
        return UNJUDGED if pair.same is None else SAME
    return DIFFERS if pair.follows_from is None else FOLLOWS


def mark(pair: PairDiff, stage: StageDiff) -> str:
    """How a stage came out, one of `MARKS`: it follows where the difference began before it, by another cause."""
    if stage.same is not False:
        return UNJUDGED if stage.same is None else SAME
    if stage.cancels:
        return CANCELS
    if pair.follows_from is not None:
        return FOLLOWS
    began = {pair.first_stage, *(cause.stage for cause in pair.causes)} - {None, ""}
    return DIFFERS if not began or stage.stage in began else FOLLOWS


def change(cause: Cause, language: Language = "en") -> str:
    """What a cause is in a few characters.

    Example:
        >>> change(Cause("softcap", 50.0, None, 1.0, "leaves out the softcap (50)", "softcap"))
        'softcap 50 -> none'
        >>> change(Cause("unknown", None, None, 0.0, "", "output"))
        'unknown'
        >>> change(Cause("weights", "q, k", "q, k", 1.0, "has other weights for q and k", "query"))
        'weights q, k'
        >>> change(Cause("softcap", 50.0, None, 1.0, "leaves out the softcap (50)", "softcap"), "zh")
        '软上限（softcap）50 -> 无'
    """
    name = cause_name(cause.name, language)
    if not has_values(cause):
        return name
    gap = "" if name.endswith("）") else " "
    if is_one(cause):
        return f"{name}{gap}{value(cause.a, language)}"
    return f"{name}{gap}{value(cause.a, language)} -> {value(cause.b, language)}"


def cause_name(name: str, language: Language) -> str:
    """A cause as people read it, with the name that JSON and the documentation have."""
    title = said(name, language, TITLES)
    return name if title == name else f"{title}（{name}）"


def has_values(cause: Cause) -> bool:
    """Whether what the sides do fits into words or a number; of an input it does not."""
    return cause.name not in (UNKNOWN, "input") and not (cause.a is None is cause.b)


def is_one(cause: Cause) -> bool:
    """Whether both sides have one name, as parameters do: it is said once."""
    return cause.name == "weights" and cause.a == cause.b


def value(of: str | float | None, language: Language = "en") -> str:
    """What one side does, as words or as a number."""
    if of is None:
        of = "none"
    return caused(of, language) if isinstance(of, str) else number(of)


def verdict(report: DiffReport) -> tuple[str, str]:
    """The word for the whole, and its tone: "good", "bad", "doubtful"."""
    if report.same is None:
        return "not judged", "doubtful"
    if report.same and report.outputs_missing:
        return "same attentions", "doubtful"
    return ("same", "good") if report.same else ("different", "bad")


def largest_left(pair: PairDiff) -> float | None:
    """The difference that is left: of pairs that no cause was applied to, all of it."""
    return pair.difference if pair.residue is None else pair.residue
