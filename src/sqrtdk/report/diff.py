"""A comparison as text for a terminal, a pipe, or a log: one line a pair of sites, then what there is to say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from sqrtdk.compare.records import DiffReport, PairDiff, SideInfo, Unpaired
from sqrtdk.compare.words import listed as folded
from sqrtdk.compare.words import place, share, short, told
from sqrtdk.report.console import drawn, paragraph
from sqrtdk.report.diff_fold import (
    DIFFERS,
    FOLLOWS,
    OUTCOMES,
    SAME,
    UNJUDGED,
    PairFold,
    change,
    fold_pairs,
    largest_left,
    outcome,
    verdict,
)
from sqrtdk.report.figures import count
from sqrtdk.report.plain import plain

STYLES = {SAME: "green", DIFFERS: "bold red", FOLLOWS: "cyan", UNJUDGED: "yellow"}
_TONES = {"good": "bold green", "bad": "bold red", "doubtful": "bold yellow"}
_COLUMNS = ("first difference", "cause", "explained", "residue", "allowed")
_NARROW = 80  # below, columns are one blank apart
_NARROWEST_CAUSE = 12
_MOST_NOTES = 8


def to_text(report: DiffReport, *, width: int = 80, color: bool = False) -> str:
    """Draw the report as text of at most `width` columns.

    Equal pairs are folded; their figures are those of the pair with the largest residue, relative to what is
    allowed.

    Args:
        report: what `sqrtdk.diff` returned.
        width: columns, 40 at least.
        color: whether to write ANSI colours.

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
            console.print(_side(letter, side), overflow="fold")
        _premises(console, report)
        console.print()
        _pairs(console, fold_pairs(report.pairs))
        for text in report.paragraphs:
            paragraph(console, Text(plain(text)), 0)
        if report.paragraphs:
            console.print()
        _alone(console, report)
        console.print(_summary(report))

    return drawn(draw, width, color)


def summary_line(report: DiffReport) -> str:
    """Return the last line of the report: how many pairs, how they came out, exit code."""
    return _summary(report).plain


def _side(letter: str, side: SideInfo) -> Text:
    line = Text.assemble((letter, "bold magenta"), "  ", (plain(side.name), "bold"))
    parts = (side.kind, side.module_class, side.attn, side.dtype, side.device)
    told = ", ".join(plain(part) for part in parts if part)
    return line.append(f"  {told}, {count(side.calls, 'attention')}", style="dim")


def _premises(console: Console, report: DiffReport) -> None:
    """What was decided on the user's behalf: random weights, ids, a cut length."""
    notes = list(dict.fromkeys(str(note) for note in report.environment.get("notes") or ()))
    for note in notes[:_MOST_NOTES]:
        paragraph(console, Text(f"! {plain(note)}", style="yellow"), 0)
    if len(notes) > _MOST_NOTES:
        paragraph(console, Text(f"... and {len(notes) - _MOST_NOTES} more: see --json or --html"), 2)


def _pairs(console: Console, folds: Sequence[PairFold]) -> None:
    if not folds:
        return
    names = [Text(plain(fold.site), style="bold") for fold in folds]
    cells = [_figures(fold) for fold in folds]
    titles = tuple(Text(title) for title in _COLUMNS)
    widths = [max(cell.cell_len for cell in column) for column in zip(titles, *cells, strict=True)]
    site = max(4, *(name.cell_len for name in names))
    if site + sum(widths) + 2 * len(widths) <= console.width:
        console.print(_row((Text("site"), *titles), [site, *widths], 3), style="dim")
        for name, row in zip(names, cells, strict=True):
            console.print(_row((name, *row), [site, *widths], 3))
    else:
        gap = 2 if console.width >= _NARROW else 1
        room = console.width - sum(widths) + widths[1] - gap * len(widths)
        widths[1] = min(widths[1], max(_NARROWEST_CAUSE, room))
        console.print(Text(" " * gap) + _row(titles, widths, 2, gap), style="dim", overflow="fold")
        for name, row in zip(names, cells, strict=True):
            paragraph(console, name, 0)
            _broken(console, row, widths, gap)
    console.print()


def _broken(console: Console, row: Sequence[Text], widths: Sequence[int], gap: int) -> None:
    """A row whose cause takes as many lines as it needs."""
    lines = row[1].wrap(console, widths[1], overflow="fold") or [Text()]
    blank = [Text()] * len(widths)
    for index, line in enumerate(lines):
        line.rstrip()
        cells = [*(row if index == 0 else blank)]
        cells[1] = line
        console.print(Text(" " * gap) + _row(cells, widths, 2, gap), overflow="fold")


def _row(cells: Sequence[Text], widths: Sequence[int], left: int, gap: int = 2) -> Text:
    """Set cells in columns, `gap` blanks apart; the first `left` of them to the left, numbers to the right."""
    line = Text()
    for position, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        pad = Text(" " * max(0, width - cell.cell_len))
        line = line + Text(" " * gap if position else "") + (cell + pad if position < left else pad + cell)
    return line


def _figures(fold: PairFold) -> tuple[Text, ...]:
    first, worst, how = fold.first, fold.worst, outcome(fold.first)
    stage = Text(plain(first.first_stage or "-"), style=STYLES[how] if how in (DIFFERS, FOLLOWS) else "")
    cause = Text(_cause(first, how), style=STYLES[how])
    explained = share(worst.explained) if how == DIFFERS else "-"
    return stage, cause, Text(explained), Text(short(largest_left(worst))), Text(short(worst.allowed))


def _cause(pair: PairDiff, how: str) -> str:
    if how == FOLLOWS:
        return plain(f"follows from {pair.follows_from or '(root)'}")
    if how == DIFFERS:
        return plain("; ".join(map(change, told(pair.causes))) or "unknown")
    return how


def _alone(console: Console, report: DiffReport) -> None:
    """Calls without a partner, and what could not be judged, each counted and named."""
    shown = False
    for letter, calls in (("A", report.unpaired_a), ("B", report.unpaired_b)):
        for text, sites in _by_text(calls).items():
            title = f"Only in {letter}, {len(sites)}: "
            paragraph(console, Text.assemble((title, "bold"), plain(f"{folded(sites)}{text}")), 0)
            shown = True
    lost: dict[str, list[str]] = {}
    for pair in report.pairs:
        if pair.same is None:
            lost.setdefault(pair.reason or "no reason given", []).append(place(pair.site_a, pair.index_a))
    for reason, sites in lost.items():
        title = f"Not compared, {len(sites)}: "
        paragraph(console, Text.assemble((title, "bold yellow"), plain(f"{folded(sites)}: {reason}")), 0)
        shown = True
    if shown:
        console.print()


def _by_text(calls: Sequence[Unpaired]) -> dict[str, list[str]]:
    by_text: dict[str, list[str]] = {}
    for call in calls:
        told = ", ".join(filter(None, (call.reason, call.formula)))
        by_text.setdefault(f": {told}" if told else "", []).append(place(call.site, call.index))
    return by_text


def _summary(report: DiffReport) -> Text:
    outcomes = Counter(outcome(pair) for pair in report.pairs)
    first = "it" if outcomes[DIFFERS] == 1 else "these"
    verbs = {DIFFERS: ("differs", "differ"), FOLLOWS: (f"follows from {first}", f"follow from {first}")}
    parts = [f"{total:,} {verbs.get(name, (name, name))[total > 1]}" for name in OUTCOMES if (total := outcomes[name])]
    alone = len(report.unpaired_a) + len(report.unpaired_b)
    if alone:
        parts.append(f"{alone:,} without a partner")
    text = Text(count(len(report.pairs), "pair") + " of attentions" + (f": {', '.join(parts)}" if parts else "") + ". ")
    word, tone = verdict(report)
    text.append(word.capitalize(), style=_TONES[tone])
    return text.append(f". Exit code {report.exit_code} (fail-on: {report.fail_on}).")
