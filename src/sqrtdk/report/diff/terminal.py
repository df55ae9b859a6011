"""Draws a comparison as text for a terminal, a pipe or a log: one line for each pair of sites, then the causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from sqrtdk._language import Language
from sqrtdk._sites import ROOT_NAME
from sqrtdk.compare.records import UNKNOWN_CAUSE, DiffReport, SideInfo, Unpaired, kind_word, stage_word
from sqrtdk.compare.words import share_text, short, shown_causes, site_list, site_text
from sqrtdk.messages import Message, joined
from sqrtdk.report.console import TONE_STYLES, TableColumn
from sqrtdk.report.diff.fold import (
    DIFFERS,
    FOLLOWS,
    OUTCOMES_IN_ORDER,
    SAME,
    UNJUDGED,
    PairFold,
    cause_name,
    change_of_all,
    changes_in_b,
    fold_pairs,
    largest_left,
    modules_of,
    outcome,
    outcome_word,
    result_word,
    verdict,
)
from sqrtdk.report.environment import premises, print_premises
from sqrtdk.report.plain import plain
from sqrtdk.report.printer import Printer, printed
from sqrtdk.report.speaker import Speaker

OUTCOME_STYLES = {SAME: "green", DIFFERS: "bold red", FOLLOWS: "cyan", UNJUDGED: "yellow"}
_NUMBERS = ("explained", "residue", "allowed")  # columns of the table
_MOST_FIXES = 8


def to_text(report: DiffReport, *, width: int = 80, color: bool = False, language: Language = "en") -> str:
    """Draw the report as text of at most `width` columns.

    Equal pairs are folded into one line. Its figures come from the pair with the largest remaining
    difference relative to the allowed difference.

    Args:
        report: what `sqrtdk.diff` returned.
        width: in columns, at least 40.
        color: whether to write ANSI colours.
        language: "en" or "zh"; names and formulas stay English.

    Returns:
        The text, ending with a newline.

    Example:
        >>> side = SideInfo("demo", "model", "Decoder", dtype="float32")
        >>> print(to_text(DiffReport(side, side, (), (), (), ("Nothing was compared.",))))
        A  demo  model, Decoder, float32, 0 attentions
        B  demo  model, Decoder, float32, 0 attentions
        <BLANKLINE>
        Nothing was compared.
        <BLANKLINE>
        0 pairs of attentions. Same. Exit code 0 (fail-on: different).
        <BLANKLINE>
    """

    def draw(printer: Printer) -> None:
        for letter, side in (("A", report.a), ("B", report.b)):
            printer.paragraph(_side(printer, letter, side), most=printer.console.width)
        print_premises(printer, premises(report.environment))
        printer.blank()
        for sentence in report.paragraphs:
            printer.paragraph(sentence)
        if report.paragraphs:
            printer.blank()
        _fixes(printer, report)
        _pairs(printer, fold_pairs(report.pairs, numbers=False))
        _outside(printer, report)
        _alone(printer, report)
        printer.paragraph(_summary(printer, report), most=printer.console.width)

    return printed(draw, width, color, language)


def diff_summary_line(report: DiffReport, language: Language = "en") -> str:
    """Return the last line of the report: the number of pairs by outcome, and the exit code.

    Args:
        report: What `sqrtdk.diff` returned.
        language: "en" or "zh".
    """
    return _summary(Speaker(language), report).plain


def _side(printer: Printer, letter: str, side: SideInfo) -> Text:
    facts = filter(None, (kind_word(side.kind), side.framework, side.module_class, side.attn, side.dtype, side.device))
    calls = Message("words.attentions", count=f"{side.calls:,}")
    line = Text.assemble((letter, "bold magenta"), "  ", (plain(side.name), "bold"))
    return line.append(f"  {plain(printer.join([*facts, calls]))}", style="dim")


def _pairs(printer: Printer, folds: Sequence[PairFold]) -> None:
    if not folds:
        return
    columns = [
        TableColumn(Message(f"diff.terminal.{name}"), right=name in _NUMBERS, prose=name == "cause")
        for name in ("site", "first", "cause", *_NUMBERS)
    ]
    printer.table(columns, [_row(printer, fold) for fold in folds])
    printer.blank()


def _outside(printer: Printer, report: DiffReport) -> None:
    """Print which modules outside the attentions differ, which the table does not show."""
    if not report.module_causes:
        return
    each = [
        modules if one.name == UNKNOWN_CAUSE else Message("diff.terminal.of_cause", modules=modules, cause=one.name)
        for one in report.module_causes
        for modules in (modules_of(one) or one.site_b or ROOT_NAME,)
    ]
    printer.paragraph(Message("diff.terminal.outside", modules=joined([*dict.fromkeys(each)], "comma")))
    printer.blank()


def _row(printer: Printer, fold: PairFold) -> tuple[Text, ...]:
    first, worst, how = fold.first, fold.worst, outcome(fold.first)
    return (
        printer.line(fold.site, "bold"),
        printer.line(stage_word(first.first_stage or "-"), OUTCOME_STYLES[how] if how in (DIFFERS, FOLLOWS) else ""),
        # the stage is red: a red sentence on each line would be a wall
        printer.line(_cause(printer, fold, how), "" if how == DIFFERS else OUTCOME_STYLES[how]),
        Text(share_text(worst.explained) if how == DIFFERS else "-"),
        Text(short(largest_left(worst))),
        Text(short(worst.allowed)),
    )


def _cause(speaker: Speaker, fold: PairFold, how: str) -> str:
    if how == FOLLOWS:
        return Message("diff.terminal.follows_from", site=fold.first.follows_from or ROOT_NAME)
    if how == DIFFERS:
        each = zip(*(shown_causes(pair.causes) for pair in fold.pairs), strict=True)
        causes = [speaker.said(change_of_all(alike)) for alike in each]
        return speaker.join(causes, "semicolon") or speaker.said(cause_name(UNKNOWN_CAUSE))
    return outcome_word(how)


def _fixes(printer: Printer, report: DiffReport) -> None:
    """Print what to change in B, once for each cause, with its layers."""
    changes = changes_in_b(report)
    if not changes:
        return
    printer.paragraph(Message("diff.terminal.to_change"), style="bold")
    for one in changes[:_MOST_FIXES]:
        name = plain(printer.said(cause_name(one.cause)))
        where = "".join(f"  {plain(printer.said(place))}" for place in (one.sites, one.at) if place)
        printer.paragraph(Text.assemble((name, "bold red"), (where, "dim"), "  ", plain(printer.said(one.fix))), 2)
    printer.more(len(changes) - _MOST_FIXES)
    printer.blank()


def _alone(printer: Printer, report: DiffReport) -> None:
    """Print the calls without a partner and the pairs that could not be compared, with counts and names."""
    lines: list[Text] = []
    for letter, calls in (("A", report.unpaired_a), ("B", report.unpaired_b)):
        for what, sites in _by_text(printer, calls).items():
            title = printer.word("diff.terminal.only_in", side=letter, count=len(sites))
            lines.append(Text.assemble((title, "bold"), _listed(printer, sites, what)))
    lost: dict[str, list[str]] = {}
    for pair in report.pairs:
        if pair.same is None:
            reason = printer.said(pair.reason or Message("words.no_reason"))
            lost.setdefault(reason, []).append(site_text(pair.site_a, pair.index_a))
    for reason, sites in lost.items():
        title = printer.word("diff.terminal.uncompared", count=len(sites))
        lines.append(Text.assemble((title, "bold yellow"), _listed(printer, sites, reason)))
    for line in lines:
        printer.paragraph(line)
    if lines:
        printer.blank()


def _listed(printer: Printer, sites: Sequence[str], what: str) -> str:
    return plain(printer.join([site_list(sites), *([what] if what else [])], "colon"))


def _by_text(speaker: Speaker, calls: Sequence[Unpaired]) -> dict[str, list[str]]:
    by_text: dict[str, list[str]] = {}
    for call in calls:
        what = speaker.join(filter(None, (call.reason, call.formula)))
        by_text.setdefault(what, []).append(site_text(call.site, call.index))
    return by_text


def _summary(speaker: Speaker, report: DiffReport) -> Text:
    """Return the last line of the report: pairs by outcome, the result, and the exit code."""
    outcomes = Counter(outcome(pair) for pair in report.pairs)
    # "1 differs, 3 follow from it"
    follow = "follow_from_it" if outcomes[DIFFERS] == 1 else "follow_from_these"
    keys = {DIFFERS: "differ", FOLLOWS: follow, UNJUDGED: "not_compared", SAME: "same"}
    counts = [(keys[name], total) for name in OUTCOMES_IN_ORDER if (total := outcomes[name])]
    if alone := len(report.unpaired_a) + len(report.unpaired_b):
        counts.append(("alone", alone))
    if any(one.same is False for one in report.outputs):
        counts.append(("outputs", 0))
    text = Text(speaker.word("diff.terminal.pairs", count=f"{len(report.pairs):,}"))
    if counts:
        parts = [speaker.word(f"diff.terminal.{key}", count=f"{total:,}") for key, total in counts]
        text.append(speaker.mark("colon") + speaker.join(parts))
    result, tone = verdict(report)
    text.append(speaker.mark("stop")).append(speaker.said(result_word(result)), style=TONE_STYLES[tone])
    return text.append(speaker.word("terminal.exit", code=report.exit_code, fail_on=report.fail_on))
