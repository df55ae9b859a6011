"""Draws a comparison as text for a terminal, a pipe or a log: one line for each pair of sites, then the causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from sqrtdk._language import Language
from sqrtdk._sites import ROOT_NAME
from sqrtdk.compare.fixes import fixes_of
from sqrtdk.compare.records import UNKNOWN_CAUSE, DiffReport, PairDiff, SideInfo, Unpaired, kind_word, stage_word
from sqrtdk.compare.words import share_text, short, shown_causes, site_list, site_text
from sqrtdk.messages import said
from sqrtdk.messages import word as of_catalogue
from sqrtdk.report.console import console_text, paragraph, wrapped
from sqrtdk.report.diff.fold import (
    DIFFERS,
    FOLLOWS,
    OUTCOMES_IN_ORDER,
    SAME,
    UNJUDGED,
    PairFold,
    cause_name,
    change,
    fold_pairs,
    largest_left,
    outcome,
    outcome_word,
    result_word,
    verdict,
)
from sqrtdk.report.plain import plain

OUTCOME_STYLES = {SAME: "green", DIFFERS: "bold red", FOLLOWS: "cyan", UNJUDGED: "yellow"}
_TONE_STYLES = {"good": "bold green", "bad": "bold red", "doubtful": "bold yellow"}
_PAIR_COLUMNS = ("first", "cause", "explained", "residue", "allowed")
_NARROW_CONSOLE = 80  # on a narrower console, columns are one blank apart instead of two
_NARROWEST_CAUSE = 12
_MOST_DIFF_NOTES = 8
_MOST_FIXES = 8


def to_text(report: DiffReport, *, width: int = 80, color: bool = False, language: Language = "en") -> str:
    """Draw the report as text of at most `width` columns.

    Equal pairs are folded into one line. Its figures come from the pair with the largest residue relative to the
    allowed difference.

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

    def draw(console: Console) -> None:
        for letter, side in (("A", report.a), ("B", report.b)):
            paragraph(console, _side(letter, side, language), 0, most=console.width)
        _premises(console, report, language)
        console.print()
        _pairs(console, fold_pairs(report.pairs), language)
        for text in report.paragraphs:
            paragraph(console, Text(plain(said(text, language))), 0)
        if report.paragraphs:
            console.print()
        _fixes(console, report, language)
        _alone(console, report, language)
        paragraph(console, _summary(report, language), 0, most=console.width)

    return console_text(draw, width, color)


def diff_summary_line(report: DiffReport, language: Language = "en") -> str:
    """Return the last line of the report: the number of pairs by outcome, and the exit code."""
    return _summary(report, language).plain


def _side(letter: str, side: SideInfo, language: Language) -> Text:
    line = Text.assemble((letter, "bold magenta"), "  ", (plain(side.name), "bold"))
    facts = (said(kind_word(side.kind), language), side.module_class, side.attn, side.dtype, side.device)
    parts = [plain(fact) for fact in facts if fact]
    parts.append(word_of_diff("attentions", language, count=f"{side.calls:,}"))
    return line.append(f"  {word_of_diff('comma', language).join(parts)}", style="dim")


def _premises(console: Console, report: DiffReport, language: Language) -> None:
    """Print what was decided on the user's behalf: random weights, random token ids, a shortened input."""
    notes = list(dict.fromkeys(report.environment.get("notes") or ()))
    for note in notes[:_MOST_DIFF_NOTES]:
        paragraph(console, Text(f"! {plain(said(note, language))}", style="yellow"), 0)
    if len(notes) > _MOST_DIFF_NOTES:
        paragraph(console, Text(word_of_diff("more", language, count=len(notes) - _MOST_DIFF_NOTES)), 2)


def _pairs(console: Console, folds: Sequence[PairFold], language: Language) -> None:
    if not folds:
        return
    names = [Text(plain(fold.site), style="bold") for fold in folds]
    cells = [_figures(fold, language) for fold in folds]
    head, *titles = (Text(word_of_diff(title, language)) for title in ("site", *_PAIR_COLUMNS))
    widths = [max(cell.cell_len for cell in column) for column in zip(titles, *cells, strict=True)]
    site = max(head.cell_len, *(name.cell_len for name in names))
    if site + sum(widths) + 2 * len(widths) <= console.width:
        console.print(_row((head, *titles), [site, *widths], 3), style="dim")
        for name, row in zip(names, cells, strict=True):
            console.print(_row((name, *row), [site, *widths], 3))
    else:
        # too wide for one line: the site gets a line above, and the cause (column 1) wraps in what is left
        gap = 2 if console.width >= _NARROW_CONSOLE else 1
        room = console.width - sum(widths) + widths[1] - gap * len(widths)
        widths[1] = min(widths[1], max(_NARROWEST_CAUSE, room))
        console.print(Text(" " * gap) + _row(titles, widths, 2, gap), style="dim", overflow="fold")
        for name, row in zip(names, cells, strict=True):
            paragraph(console, name, 0)
            _broken(console, row, widths, gap)
    console.print()


def _broken(console: Console, row: Sequence[Text], widths: Sequence[int], gap: int) -> None:
    """Print a row whose cause wraps over as many lines as it needs."""
    blank = [Text()] * len(widths)
    for index, line in enumerate(wrapped(row[1], widths[1])):
        cells = [*(row if index == 0 else blank)]
        cells[1] = line
        console.print(Text(" " * gap) + _row(cells, widths, 2, gap), overflow="fold")


def _row(cells: Sequence[Text], widths: Sequence[int], left: int, gap: int = 2) -> Text:
    """Return cells in columns, `gap` blanks apart. The first `left` cells are aligned left, the others right."""
    line = Text()
    for position, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        pad = Text(" " * max(0, width - cell.cell_len))
        line = line + Text(" " * gap if position else "") + (cell + pad if position < left else pad + cell)
    return line


def _figures(fold: PairFold, language: Language) -> tuple[Text, ...]:
    first, worst, how = fold.first, fold.worst, outcome(fold.first)
    where = said(stage_word(first.first_stage or "-"), language)
    stage = Text(plain(where), style=OUTCOME_STYLES[how] if how in (DIFFERS, FOLLOWS) else "")
    cause = Text(_cause(first, how, language), style=OUTCOME_STYLES[how])
    explained = share_text(worst.explained) if how == DIFFERS else "-"
    return stage, cause, Text(explained), Text(short(largest_left(worst))), Text(short(worst.allowed))


def _cause(pair: PairDiff, how: str, language: Language) -> str:
    if how == FOLLOWS:
        return plain(word_of_diff("follows_from", language, site=pair.follows_from or ROOT_NAME))
    if how == DIFFERS:
        causes = (change(cause, language) for cause in shown_causes(pair.causes))
        return plain(word_of_diff("semicolon", language).join(causes) or cause_name(UNKNOWN_CAUSE, language))
    return said(outcome_word(how), language)


def _fixes(console: Console, report: DiffReport, language: Language) -> None:
    """Print what to change in B, once for each cause of a difference that follows from no other."""
    own = (pair for pair in report.pairs if outcome(pair) == DIFFERS)
    found = fixes_of(cause for pair in own for cause in shown_causes(pair.causes))
    if not found:
        return
    paragraph(console, Text(word_of_diff("to_change", language), style="bold"), 0)
    for fix, cause in [*found.items()][:_MOST_FIXES]:
        name, at = plain(cause_name(cause.name, language)), f"  {plain(cause.at_b)}" if cause.at_b else ""
        paragraph(console, Text.assemble((name, "bold red"), (at, "dim"), "  ", plain(said(fix, language))), 2)
    if len(found) > _MOST_FIXES:
        paragraph(console, Text(word_of_diff("more", language, count=len(found) - _MOST_FIXES)), 2)
    console.print()


def _alone(console: Console, report: DiffReport, language: Language) -> None:
    """Print the calls without a partner and the pairs that could not be compared, with counts and names."""
    shown = False
    for letter, calls in (("A", report.unpaired_a), ("B", report.unpaired_b)):
        for text, sites in _by_text(calls, language).items():
            title = word_of_diff("only_in", language, side=letter, count=len(sites))
            paragraph(console, Text.assemble((title, "bold"), plain(f"{said(site_list(sites), language)}{text}")), 0)
            shown = True
    lost: dict[str, list[str]] = {}
    for pair in report.pairs:
        if pair.same is None:
            reason = said(pair.reason, language) if pair.reason else word_of_diff("no_reason", language)
            lost.setdefault(reason, []).append(site_text(pair.site_a, pair.index_a))
    for reason, sites in lost.items():
        title = word_of_diff("uncompared", language, count=len(sites))
        text = f"{said(site_list(sites), language)}{word_of_diff('colon', language)}{reason}"
        paragraph(console, Text.assemble((title, "bold yellow"), plain(text)), 0)
        shown = True
    if shown:
        console.print()


def _by_text(calls: Sequence[Unpaired], language: Language) -> dict[str, list[str]]:
    by_text: dict[str, list[str]] = {}
    for call in calls:
        reason = said(call.reason, language) if call.reason else None
        what = word_of_diff("comma", language).join(filter(None, (reason, call.formula)))
        text = f"{word_of_diff('colon', language)}{what}" if what else ""
        by_text.setdefault(text, []).append(site_text(call.site, call.index))
    return by_text


def _summary(report: DiffReport, language: Language) -> Text:
    outcomes = Counter(outcome(pair) for pair in report.pairs)
    # "1 differs, 3 follow from it"
    follow = "follow_from_it" if outcomes[DIFFERS] == 1 else "follow_from_these"
    keys = {DIFFERS: "differ", FOLLOWS: follow, UNJUDGED: "not_compared", SAME: "same"}
    counts = [(keys[name], total) for name in OUTCOMES_IN_ORDER if (total := outcomes[name])]
    if alone := len(report.unpaired_a) + len(report.unpaired_b):
        counts.append(("alone", alone))
    if any(one.same is False for one in report.outputs):
        counts.append(("outputs", 0))
    parts = [word_of_diff(name, language, count=f"{total:,}") for name, total in counts]
    text = Text(word_of_diff("pairs", language, count=f"{len(report.pairs):,}"))
    if parts:
        text.append(word_of_diff("colon", language) + word_of_diff("comma", language).join(parts))
    result, tone = verdict(report)
    text.append(word_of_diff("stop", language)).append(said(result_word(result), language), style=_TONE_STYLES[tone])
    return text.append(word_of_diff("exit", language, code=report.exit_code, fail_on=report.fail_on))


def word_of_diff(key: str, language: Language, **values: str | int) -> str:
    """Return a fixed word of the terminal's report."""
    return of_catalogue(f"diff.terminal.{key}", language, **values)
