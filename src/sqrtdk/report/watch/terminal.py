"""Draws a run in the terminal: a sparkline for each attention, the newest values, and the alarms."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from sqrtdk._language import Language
from sqrtdk.messages import Message, named
from sqrtdk.report.console import TableColumn
from sqrtdk.report.figures import format_number, format_percent
from sqrtdk.report.plain import plain
from sqrtdk.report.printer import Printer, printed
from sqrtdk.report.watch.compare import NOTABLE_DIFFERENCE, RunComparison
from sqrtdk.report.watch.fix import alarm_fix, root_alarms
from sqrtdk.report.watch.headline import Headline, compared_headline, run_headline
from sqrtdk.report.watch.sparkline import drawn_range, ends_text, sparkline, worst_of
from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN, badness, value_text
from sqrtdk.report.watch.summary import Summary, alarms_with, rank, samples_with, update_sentence

SEVERITY_STYLES = {"note": "cyan", "warn": "yellow", "fail": "red", "critical": "bold magenta"}
MOST_ALARMS_PRINTED = 12
MOST_UNMEASURED_PRINTED = 12
_HOME, _TO_END_OF_LINE, _TO_END = "\x1b[H", "\x1b[K", "\x1b[J"
_WIDE_TABLE = 90  # least width at which a table has further columns beside trend and newest value
_FOLDED = ("site", "farthest")
_RUN_NAMES = ("A", "B")
_RIGHT = ("first", "newest", "head", "median", "step", "apart", *_RUN_NAMES)


def to_text(
    summary: Summary, columns: Sequence[str], *, width: int = 100, color: bool = False, language: Language = "en"
) -> str:
    """Draw a run.

    Args:
        summary: the run.
        columns: keys of `STATISTIC_BY_COLUMN`; each gets a table.
        width: of the terminal, in columns.
        color: whether to write ANSI colours.
        language: "en" or "zh"; names of sites and statistics stay English.
    """
    return printed(lambda printer: _whole(printer, summary, columns), width, color, language)


def live_text(
    summary: Summary,
    columns: Sequence[str],
    lines: int,
    *,
    width: int = 100,
    color: bool = False,
    language: Language = "en",
) -> str:
    """Redraw a run in place over the terminal's content, with as many of the worst attentions as fit.

    Args:
        summary: as `to_text`.
        columns: as `to_text`.
        lines: height of the terminal in lines.
        width: as `to_text`.
        color: as `to_text`.
        language: as `to_text`.
    """
    most = len(summary.sites)
    text = to_text(summary, columns, width=width, color=color, language=language).split("\n")
    while len(text) > lines and most > 1:  # halve the excess each time: wrapped lines make the height hard to predict
        most -= max(1, (len(text) - lines) // (2 * max(1, len(columns))))
        few = _Few(max(1, most), max(1, lines // 8))
        draw = functools.partial(_whole, summary=summary, columns=columns, few=few)
        text = printed(draw, width, color, language).split("\n")
    shown = "".join(f"{line}{_TO_END_OF_LINE}\n" for line in text[: lines - 1])
    return f"{_HOME}{shown}{_TO_END}"


@dataclass(frozen=True, slots=True)
class _Few:
    """How many attentions (for each statistic) and alarms fit. Sources and missing measurements are not shown then."""

    sites: int
    alarms: int


def _whole(printer: Printer, summary: Summary, columns: Sequence[str], few: _Few | None = None) -> None:
    """Print a run; `few` limits attentions and alarms to what fits on a screen."""
    _headline(printer, run_headline(summary))
    _head(printer, summary)
    bars = max(12, min(60, printer.console.width - 64))  # a sparkline takes what the other columns leave
    if len(summary.losses):
        line, low, high = _loss(summary, bars)
        first, newest = (format_number(float(summary.losses[at])) for at in (0, -1))
        label = (printer.word("watch.terminal.loss"), "bold")
        printer.console.print(Text.assemble(label, (line, "cyan"), f"  {first} -> {newest}"))
        printer.console.print(Text(f"      {ends_text(low, high)}", style="dim"))
    for column in columns:
        printer.blank()
        _statistic(printer, summary, column, bars, few.sites if few else None)
    printer.blank()
    _alarms(printer, summary, few)
    if few is None:
        _missing(printer, summary)
    elif summary.missing:
        printer.print(_count("watch.terminal.missing", len(summary.missing)))


def comparison_text(
    a: Summary, b: Summary, compared: RunComparison, *, width: int = 100, color: bool = False, language: Language = "en"
) -> str:
    """Return the differences of two runs as text for the terminal.

    Args:
        a: Run A.
        b: Run B.
        compared: Result of `compare_runs(a, b)`.
        width: Columns at which lines wrap.
        color: Whether to add ANSI colours.
        language: "en" or "zh".
    """

    def draw(printer: Printer) -> None:
        _headline(printer, compared_headline(a, b, compared))
        for letter, run in (("A", a), ("B", b)):
            _head(printer, run, f"{letter}  ")
        printer.blank()
        _differences(printer, compared)
        for letter, labels in (("A", compared.only_a), ("B", compared.only_b)):
            if labels:
                names = printer.join(labels[:5], "list")
                names += printer.word("watch.terminal.and_more", count=len(labels) - 5) if len(labels) > 5 else ""
                printer.paragraph(Message("watch.terminal.only_in", side=letter, names=names))
        for letter, run in (("A", a), ("B", b)):
            printer.blank()
            printer.print(letter, "bold")
            _alarms(printer, run)
            _missing(printer, run)

    return printed(draw, width, color, language)


def _differences(printer: Printer, compared: RunComparison) -> None:
    """Print a table of the statistics that differ between two runs, and name those that don't."""
    if not compared.measured:
        printer.print(Message("watch.terminal.no_shared"), "yellow")
        return
    a, b = (printer.join(map(str, steps), "list") for steps in (compared.steps_a, compared.steps_b))
    at = Message("watch.terminal.at" if a == b else "watch.terminal.at_both", a=a, b=b)
    why = "" if compared.overlap else printer.word("watch.terminal.no_overlap")
    if compared.by == "order":
        why += printer.word("watch.terminal.in_order")
    title = (printer.word("watch.terminal.differs"), "bold")
    printer.paragraph(Text.assemble(title, printer.word("watch.terminal.medians", at=at, why=why)))
    bar = f"{NOTABLE_DIFFERENCE:.0%}"
    rows: list[Sequence[Text | str]] = []
    alike = [one.column for one in compared.differences if one.measured and not one.count]
    unmeasured = [
        one.column for one in compared.differences if not one.measured and STATISTIC_BY_COLUMN[one.column].always
    ]
    for one in compared.differences:
        pair = one.farthest
        if pair is None or one.typical is None or one.column in alike:
            continue
        count = Message("watch.terminal.count_of", count=one.count, all=one.measured)
        apart = format_percent(one.typical) if math.isfinite(one.typical) else "inf"
        sites = printer.line(count, "yellow" if one.count else "")
        values = (value_text(one.column, value) for value in (pair.a, pair.b))
        rows.append((Text(one.column, "cyan"), Text(apart, "bold"), sites, pair.label, *values))
    if rows:
        printer.table(_columns("statistic", "apart", "over", "farthest", "A", "B", bar=bar), rows)
        printer.paragraph(Message("watch.terminal.apart_means"), style="dim")
    nowhere = Message("watch.terminal.nowhere", bar=bar)
    for what, names in ((nowhere, alike), (Message("watch.terminal.unmeasured_both"), unmeasured)):
        if names:
            printer.paragraph(printer.join([what, printer.join(names, "list")], "colon"))


def _headline(printer: Printer, head: Headline) -> None:
    """Print the headline and what to do, above everything else."""
    printer.paragraph(printer.said(head.text) + printer.mark("stop").rstrip(), style="bold")
    if head.fix:
        printer.paragraph(_to_do(printer, head.fix))
    printer.blank()


def _to_do(printer: Printer, fix: str) -> Text:
    return Text.assemble((printer.word("runs.fix.label"), "bold"), plain(printer.said(fix)))


def _head(printer: Printer, summary: Summary, letter: str = "") -> None:
    """Print the head of a run: the model, the steps, how they ran, and whether the writer was killed."""
    model = summary.model if isinstance(summary.model, dict) else {}
    about = f"  {plain(str(model['class']))}" if "class" in model else ""
    parameters = model.get("parameters")
    if type(parameters) is int:
        about += printer.mark("comma") + printer.said(_count("watch.terminal.parameters", parameters))
    printer.paragraph(Text.assemble((letter, "bold"), (plain(summary.name), "bold"), about))
    if summary.first_step is None:
        printer.print(Message("watch.terminal.nothing"))
        return
    # longer texts are reasons why steps were not measured, which are listed below
    ways = [samples_with(way, count) for way, count in summary.how.items() if len(way) < 40]
    printer.paragraph(
        Message(
            "watch.terminal.steps",
            first=summary.first_step,
            last=summary.last_step or summary.first_step,
            samples=_count("watch.terminal.samples", len(summary.samples)),
            ways=printer.join(ways),
            attempts=_count("watch.terminal.attempts", summary.attempts),
            attentions=_count("watch.terminal.attentions", len(summary.sites)),
        )
    )
    if (update := update_sentence(summary)) is not None:
        printer.paragraph(update)
    if summary.writer == "killed":
        printer.paragraph(Message("runs.writer.killed", step=summary.last_step or "-"), style="yellow")


def _loss(summary: Summary, bars: int) -> tuple[str, float, float]:
    low, high, log = drawn_range(summary.losses)
    return sparkline(summary.losses, bars, low, high, log=log), low, high


def _statistic(printer: Printer, summary: Summary, column: str, bars: int, most: int | None = None) -> None:
    """Print one statistic: a line of bars for each attention, with its newest value.

    Args:
        printer: Where to print.
        summary: The run.
        column: The statistic.
        bars: Number of bars.
        most: Largest number of attentions, the worst ones; None: all.
    """
    worst = {id(site): worst_of(site.worst(column)[0], column, bars) for site in summary.sites}
    every = np.concatenate([*worst.values(), np.empty(0)])
    low, high, log = drawn_range(every)
    if np.isnan(every).all():
        printer.console.print(Text.assemble((column, "bold"), f"  {printer.word('watch.terminal.unmeasured')}"))
        return
    scale = ends_text(low, high, column) + (printer.word("watch.terminal.logarithmic") if log else "")
    printer.console.print(Text.assemble((column, "bold"), printer.word("watch.terminal.worst", scale=scale)))
    wide = printer.console.width >= _WIDE_TABLE
    rows: list[Sequence[Text | str]] = []
    newest_values = np.array([float(site.worst(column)[0][-1]) for site in summary.sites])
    order = np.argsort(-badness(newest_values, column), kind="stable")[:most]
    for at in sorted(order.tolist()):  # the worst ones, in the order of the model
        site = summary.sites[at]
        values, heads = site.worst(column)
        newest = float(values[-1])
        first, median = value_text(column, float(values[0])), value_text(column, float(site.median(column)[-1]))
        trend = Text(sparkline(worst[id(site)], bars, low, high, log=log), "cyan")
        head = "-" if math.isnan(newest) else str(site.heads[heads[-1]])
        more = (first, median, str(site.steps[-1])) if wide else ()
        rows.append((site.label, trend, Text(value_text(column, newest), "bold"), head, *more))
    wide_columns = ("first", "median", "step") if wide else ()
    printer.table(_columns("site", "trend", "newest", "head", *wide_columns), rows)
    if left := len(summary.sites) - len(order):
        printer.print(_count("watch.terminal.better", left), "dim")


def _alarms(printer: Printer, summary: Summary, few: _Few | None = None) -> None:
    """Print the worst alarms in the order of their steps, after the one from which they follow."""
    if not summary.alarms:
        printer.print(Message("watch.terminal.no_alarms" if summary.sites else "watch.terminal.no_alarms_nothing"))
        return
    counts = [alarms_with(severity, count) for severity, count in summary.counts.items() if count]
    title = (printer.word("watch.terminal.alarms"), "bold")
    printer.console.print(Text.assemble(title, f"  {printer.join(counts)}"))
    worst = sorted(range(len(summary.alarms)), key=lambda at: (rank(summary.alarms[at].severity), at))
    # sorted ascending, so the last ones are the worst, and among equals the newest
    worst = worst[-(few.alarms if few else MOST_ALARMS_PRINTED) :]
    if left := len(summary.alarms) - len(worst):
        printer.print(Message("watch.terminal.more_alarms", shown=len(worst), count=left))
    # ten alarms of one rule have one source
    sources: set[str] = set()
    roots = root_alarms(summary)
    fixes = {run_headline(summary).fix, *(alarm_fix(summary, one) for one in roots)}
    first = [summary.alarms.index(one) for one in roots]
    for alarm in (summary.alarms[at] for at in [*first, *sorted({*worst} - {*first})]):
        severity = printer.line(named("words.severity", alarm.severity), SEVERITY_STYLES.get(alarm.severity, "red"))
        severity.pad_right(max(0, 8 - severity.cell_len))
        step = printer.word("watch.terminal.at_step", step=alarm.step)
        printer.paragraph(severity + Text(step + plain(printer.said(alarm.text))), 2)
        if few is None and alarm.source not in sources:  # print each source once
            printer.paragraph(printer.word("watch.terminal.source") + printer.said(alarm.source), 11, "dim")
        sources.add(alarm.source)
        if few is None and (fix := alarm_fix(summary, alarm)) not in fixes:  # the headline's stands above
            printer.paragraph(_to_do(printer, fix), 11)
            fixes.add(fix)


def _missing(printer: Printer, summary: Summary) -> None:
    if not summary.missing:
        return
    printer.print(Message("watch.terminal.unmeasured"), "bold")
    for entry in summary.missing[:MOST_UNMEASURED_PRINTED]:
        printer.paragraph(entry.message, 2)
    if len(summary.missing) > MOST_UNMEASURED_PRINTED:
        printer.print(Message("watch.terminal.more", count=len(summary.missing) - MOST_UNMEASURED_PRINTED))


def _columns(*names: str, **parts: str) -> list[TableColumn]:
    return [
        TableColumn(
            name if name in _RUN_NAMES else Message(f"watch.column.{name}", **parts),
            right=name in _RIGHT,
            fold=name in _FOLDED,
        )
        for name in names
    ]


def _count(id: str, count: int) -> Message:
    """Return a count with its noun."""
    return Message(id, count=f"{count:,}")
