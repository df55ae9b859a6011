"""A saved comparison: whether the sides are the same, what differs at each pair, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from sqrtdk._sites import ROOT
from sqrtdk.app import fields
from sqrtdk.app.catalogue import Words
from sqrtdk.app.pieces import Cell, command, headline, lead, left, recorded, shown, table
from sqrtdk.app.rebuilt import diff_report
from sqrtdk.compare.records import Cause, DiffReport
from sqrtdk.compare.words import UNKNOWN, share, short
from sqrtdk.compare.words import told as merged
from sqrtdk.lab.text import say
from sqrtdk.report.diff_causes import CAUSES
from sqrtdk.report.diff_chinese import paragraphs
from sqrtdk.report.diff_fold import (
    DIFFERS,
    FOLLOWS,
    UNJUDGED,
    PairFold,
    cause_name,
    change,
    fold_pairs,
    largest_left,
    outcome,
)
from sqrtdk.report.diff_words import OUTCOME_WORDS, RESULTS, STAGE_WORDS, TERMINAL

_RESULTS = {True: ("same", "good"), False: ("different", "bad"), None: ("unjudged", "doubtful")}
_COLUMNS = ("site", "stage", "causes", "explained", "residue", "allowed")


def diff_html(document: Mapping[str, Any], words: Words) -> Markup:
    """Draw the document of `sqrtdk diff --output`."""
    report = diff_report(document)
    word, tone = _RESULTS[_same(document["same"])]
    unpaired = (("A", report.unpaired_a), ("B", report.unpaired_b))
    if word == "same" and (report.unpaired_a or report.unpaired_b or not report.pairs):
        word, tone = "unjudged", "doubtful"
    result: Cell = words(f"result.{word}")
    if word == "same" and report.outputs_missing:
        result, tone = words.of(RESULTS["same attentions"]), "doubtful"
    folds = fold_pairs(report.pairs)
    rows = [_pair(one, words) for one in folds[: fields.MOST_ROWS]]
    return Markup("").join(
        [
            headline(result, tone, f"A {report.a.name} / B {report.b.name}"),
            *map(lead, _told(report, words)),
            command(document, words),
            table(words("diff.pairs"), [words(f"column.{name}") for name in _COLUMNS], rows),
            left(len(folds), words),
            *(lead(words("diff.unpaired", side=side, count=len(entries))) for side, entries in unpaired if entries),
        ]
    )


def _same(value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise TypeError("same is true, false or null")
    return value


def _told(report: DiffReport, words: Words) -> tuple[str, ...]:
    """What there is to say: as it was written in English, and in Chinese said again of the records."""
    return paragraphs(report) if words.language == "zh" else report.paragraphs


def _pair(folded: PairFold, words: Words) -> tuple[Cell, ...]:
    """Pairs that are one but for a number in their sites, with the figures of the worst of them."""
    first, worst, how = folded.first, folded.worst, outcome(folded.first)
    stage = first.first_stage
    return (
        folded.site,
        "-" if stage is None else words.of(STAGE_WORDS[stage]) if stage in STAGE_WORDS else stage,
        _why(folded, words),
        share(worst.explained) if how == DIFFERS else "-",
        short(largest_left(worst)),
        short(worst.allowed),
    )


def _why(folded: PairFold, words: Words) -> Cell:
    first, how = folded.first, outcome(folded.first)
    if how == FOLLOWS:
        return say(TERMINAL["follows_from"], words.language, site=first.follows_from or ROOT)
    if how == UNJUDGED and first.reason:
        return recorded(first.reason, words)
    if how != DIFFERS:
        return words.of(OUTCOME_WORDS[how])
    between = Markup("{}").format(words.of(TERMINAL["semicolon"]))
    causes = between.join(_cause(cause, words) for cause in merged(first.causes))
    return causes or cause_name(UNKNOWN, words.language)


def _cause(cause: Cause, words: Words) -> Markup:
    meaning = words.of(CAUSES[cause.name]) if cause.name in CAUSES else ""
    return Markup('<span title="{}">{}</span>').format(meaning, shown(change(cause, words.language)))
