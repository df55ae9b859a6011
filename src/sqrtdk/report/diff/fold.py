"""Folds equal pairs of a comparison into one, and gives each pair and stage one word for its outcome."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from sqrtdk._sites import common_label, fold, site_name, site_shape
from sqrtdk.compare.fixes import fix_of
from sqrtdk.compare.inside.suspect import NO_VALUE
from sqrtdk.compare.records import UNKNOWN_CAUSE, Cause, DiffReport, ModuleCause, PairDiff, StageDiff, cause_word
from sqrtdk.compare.words import excess, largest_pair, numbers_masked, shown_causes, site_list, site_text
from sqrtdk.messages import Message, Text, said, text_of_value
from sqrtdk.report.figures import format_number

SAME, DIFFERS, FOLLOWS, UNJUDGED, CANCELS = "same", "differs", "follows", "not compared", "cancels"
_INTEGERS_OF_PATH = re.compile(r"\d+")
OUTCOMES_IN_ORDER = (DIFFERS, FOLLOWS, UNJUDGED, SAME)  # of a pair
STAGE_MARKS = (DIFFERS, FOLLOWS, CANCELS, UNJUDGED, SAME)  # of a stage


@dataclass(frozen=True, slots=True)
class PairFold:
    """Pairs of attentions that differ in the same way, as those of equal layers; a report shows them as one line.

    Attributes:
        site_a: Path of their modules in model A, with a range for the number that differs.
        site_b: The same in model B.
        pairs: The pairs, in the order of model A.
    """

    site_a: str
    site_b: str
    pairs: tuple[PairDiff, ...]

    @property
    def first(self) -> PairDiff:
        """The first pair in the order of model A. Its texts are true of all pairs of the fold; its numbers are not."""
        return self.pairs[0]

    @property
    def worst(self) -> PairDiff:
        """The pair whose figures are shown.

        For pairs in which a difference begins, it is the one with the largest remaining difference relative to the
        difference that rounding allows. For others, it is the one with the largest difference.
        """
        # how well a difference is explained is the question there; elsewhere how large it is
        if outcome(self.first) == DIFFERS:
            return max(self.pairs, key=excess)
        return largest_pair(self.pairs, largest_left)

    @property
    def site(self) -> str:
        """Both sites as "a = b", or one site if they are the same."""
        return self.site_a if self.site_a == self.site_b else f"{self.site_a} = {self.site_b}"


@dataclass(frozen=True, slots=True)
class ChangeInB:
    """What to change in B for one cause.

    Attributes:
        fix: What to change.
        cause: Name of the cause.
        at: Its line in B, or None.
        sites: Where in B, folded: "layers.0-3.attn"; "" for one module outside the attentions, which the fix names.
    """

    fix: str
    cause: str
    at: str | None
    sites: str


def changes_in_b(report: DiffReport) -> tuple[ChangeInB, ...]:
    """Return what to change in B, once for each cause: those in the attentions first, then those outside them.

    Fixes that differ in numbers alone, as of layers with scales of their own, are one, which says so.
    """
    first: dict[tuple[str, str | None, str], tuple[Cause, str]] = {}
    where: dict[tuple[str, str | None, str], list[str]] = {}
    fixes: dict[tuple[str, str | None, str], set[str]] = {}
    for pair in report.pairs:
        if outcome(pair) != DIFFERS:  # what follows from another difference goes away with that one
            continue
        for cause in shown_causes(pair.causes):
            if (fix := fix_of(cause)) is not None:
                line = None if (cause.at_b or "").startswith("<") else cause.at_b  # a graph has a node in each layer
                key = cause.name, line, numbers_masked(fix)
                first.setdefault(key, (cause, fix))
                where.setdefault(key, []).append(site_text(pair.site_b, pair.index_b))
                fixes.setdefault(key, set()).add(str(fix))
    changes = [
        ChangeInB(
            Message("paragraphs.caused.of_first", text=fix) if len(fixes[key]) > 1 else fix,
            cause.name, cause.at_b, site_list(dict.fromkeys(where[key])),
        )
        for key, (cause, fix) in first.items()
    ]  # fmt: skip
    outside = (ChangeInB(one.fix, one.name, one.at_b, modules_of(one)) for one in report.module_causes if one.fix)
    return (*changes, *outside)


def modules_of(cause: ModuleCause) -> str:
    """Return the modules of B with one cause, folded; those of A where B's are not known; "" for one module.

    Example:
        >>> one = ModuleCause("norm_eps", "h.0.ln", "layers.0.norm", 1e-5, 1e-3, True, "", ("h.1.ln", "h.2.ln"))
        >>> modules_of(one)
        'layers.0-2.norm'
    """
    if not cause.others:
        return ""
    if cause.site_a == cause.site_b:
        return site_list((cause.site_b, *cause.others))
    apart = [_INTEGERS_OF_PATH.split(path) for path in (cause.site_a, cause.site_b)]
    numbers = [_INTEGERS_OF_PATH.findall(path) for path in (cause.site_a, cause.site_b)]
    likewise = [_INTEGERS_OF_PATH.split(other) == apart[0] for other in cause.others]
    if numbers[0] != numbers[1] or not all(likewise):
        return Message("diff.terminal.where_a_has", modules=site_list((cause.site_a, *cause.others)))
    found = map(_INTEGERS_OF_PATH.findall, cause.others)
    theirs = ("".join(map("".join, zip_longest(apart[1], each, fillvalue=""))) for each in found)
    return site_list((cause.site_b, *theirs))


def fold_pairs(pairs: Iterable[PairDiff], numbers: bool = True) -> tuple[PairFold, ...]:
    """Fold pairs that agree in all that a line shows and whose sites differ in one integer, the number of the layer.

    Args:
        pairs: In the order of A.
        numbers: Whether pairs of one fold have the same numbers; if not, a line shows ranges, and no formulas.

    Returns:
        Folds in the order of their first pair. A pair like no other is a fold of its own.
    """

    def shown(pair: PairDiff) -> object:
        if not numbers:
            causes: tuple[object, ...] = tuple(numbers_masked(change(one).en) for one in shown_causes(pair.causes))
            how = (pair.same, pair.first_stage, pair.follows_from, causes, pair.reason)
            return (*how, pair.index_a, pair.index_b, site_shape(pair.site_b))
        # as shown, so that layers fold whose values differ only behind the digits that are printed
        causes = tuple(map(change, shown_causes(pair.causes)))
        how = (pair.same, pair.first_stage, pair.follows_from, causes, pair.reason)
        beside = (pair.cancelling, pair.rows_left_out, pair.rows)
        return (*how, *beside, pair.index_a, pair.index_b, site_shape(pair.site_b), pair.formula_a, pair.formula_b)

    folds = []
    for site, group in fold(pairs, lambda pair: pair.site_a, shown):
        site_b = common_label([pair.site_b for pair in group])
        first = group[0]
        folds.append(PairFold(site_name(site, first.index_a), site_name(site_b, first.index_b), tuple(group)))
    return tuple(folds)


def outcome(pair: PairDiff) -> str:
    """Return the outcome of a pair, one of `OUTCOMES_IN_ORDER`.

    A pair that differs is DIFFERS if the difference begins there, and FOLLOWS if it only follows from an earlier pair.
    """
    if pair.same is not False:
        return UNJUDGED if pair.same is None else SAME
    return DIFFERS if pair.follows_from is None else FOLLOWS


def mark(pair: PairDiff, stage: StageDiff) -> str:
    """Return the outcome of one stage of a pair, one of `STAGE_MARKS`.

    DIFFERS means that a difference begins at this stage, FOLLOWS that it comes from an earlier stage or pair, and
    CANCELS that later stages undo it.
    """
    if stage.same is not False:
        return UNJUDGED if stage.same is None else SAME
    if stage.cancels:
        return CANCELS
    if pair.follows_from is not None:
        return FOLLOWS
    # stages at which a difference begins: the first one, and the stages of the proven causes
    began = {pair.first_stage, *(cause.stage for cause in pair.causes)} - {None, ""}
    return DIFFERS if not began or stage.stage in began else FOLLOWS


def change(cause: Cause) -> Text:
    """Return a cause in a few characters.

    Example:
        >>> change(Cause("softcap", 50.0, None, 1.0, "leaves out the softcap (50)", "softcap"))
        Text(en='softcap 50 -> none', zh='软上限（softcap）50 -> 无')
        >>> change(Cause("unknown", None, None, 0.0, "", "output")).en
        'unknown'
        >>> change(Cause("weights", "q, k", "q, k", 1.0, "has other weights for q and k", "query")).en
        'weights q, k'
    """
    name = cause_name(cause.name)
    if not has_short_values(cause):
        return name
    a, b = value_in_words(cause.a), value_in_words(cause.b)
    values = a if is_one(cause) else Text(f"{a.en} -> {b.en}", f"{a.zh} -> {b.zh}")
    # a full-width bracket brings its own space
    gaps = ["" if words.endswith("）") else " " for words in (name.en, name.zh)]
    return Text(f"{name.en}{gaps[0]}{values.en}", f"{name.zh}{gaps[1]}{values.zh}")


def change_of_all(causes: Sequence[Cause]) -> Text:
    """Return causes of one kind in a few characters, with the range of each side's values.

    Example:
        >>> change_of_all([Cause("scale", 0.25, b, 1.0, "", "scale") for b in (0.5, 0.125)]).en
        'scale 0.25 -> 0.125 to 0.5'
    """
    if len(set(map(change, causes))) == 1 or not all(isinstance(one.a, float) for one in causes):
        return change(causes[0])
    sides = []
    for values in ([one.a for one in causes], [one.b for one in causes]):
        known = [value for value in values if isinstance(value, float)]
        words = [value_in_words(value) for value in dict.fromkeys((min(known), max(known)))] if known else []
        each = [" to ".join(word.en for word in words), " 至 ".join(word.zh for word in words)]
        sides.append(Text(*each) if len(known) == len(values) else value_in_words(values[0]))
    name, (a, b) = cause_name(causes[0].name), sides
    return Text(f"{name.en} {a.en} -> {b.en}", f"{name.zh}{a.zh} -> {b.zh}")


def cause_name(name: str) -> Text:
    """Return the name of a cause as a reader sees it.

    In Chinese it is the cause's title, followed by the identifier that JSON and the documentation have.
    """
    return Text(name, f"{said(cause_word(name), 'zh')}（{name}）" if has_words(name) else name)


def has_words(name: str) -> bool:
    """Return whether the catalogue has a title and a meaning for a cause; it has none for causes that users add."""
    return isinstance(cause_word(name), Message)


def has_short_values(cause: Cause) -> bool:
    """Return whether a line can show what each side does as a short value, such as "0.125 -> 0.25".

    An unknown cause and a changed input have no such values.
    """
    return cause.name not in (UNKNOWN_CAUSE, "input") and not (cause.a is None is cause.b)


def is_one(cause: Cause) -> bool:
    """Return whether both sides have the same value, as "q, k" of the cause "weights".

    Such a value is shown once, without an arrow.
    """
    return cause.name == "weights" and cause.a == cause.b


def value_in_words(of: str | float | None) -> Text:
    """Return the value of one side in both languages, as words or as a number; None reads "none".

    Example:
        >>> value_in_words(0.125).en, value_in_words(None).en
        ('0.125', 'none')
    """
    if of is None:
        of = Message(NO_VALUE)
    words = text_of_value(of if isinstance(of, str) else format_number(of))
    # the Chinese for "cos and sin" begins with a blank, which is right inside a sentence only
    return Text(words.en.strip(), words.zh.strip())


def outcome_word(name: str) -> Message:
    """Return the word that a reader sees for an outcome, in both languages.

    Args:
        name: An outcome of a pair (see `outcome`) or of a stage (see `mark`).
    """
    return Message(f"diff.outcome.{name.replace(' ', '_')}")


def result_word(name: str) -> Message:
    """Return the words that a reader sees for the result of a comparison, in both languages.

    Args:
        name: A result of `verdict`, such as "same attentions".
    """
    return Message(f"diff.result.{name.replace(' ', '_')}")


def verdict(report: DiffReport) -> tuple[str, str]:
    """Return the result of a comparison and its tone.

    Returns:
        The result is "same", "different", "same attentions" (the outputs could not be compared) or "not judged". The
        tone, which chooses a colour, is "good", "bad" or "doubtful".
    """
    if report.same is None:
        return "not judged", "doubtful"
    if report.same and report.outputs_missing:
        return "same attentions", "doubtful"
    return ("same", "good") if report.same else ("different", "bad")


def largest_left(pair: PairDiff) -> float | None:
    """Return the largest difference that remains after the proven causes are applied to A, in units of the outputs.

    If no cause was applied, that is the whole difference. Returns None if nothing was compared.
    """
    return pair.difference if pair.residue is None else pair.residue
