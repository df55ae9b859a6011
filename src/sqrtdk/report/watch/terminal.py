"""Draws a run in the terminal: a sparkline for each attention, the newest values, and the alarms."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sqrtdk._language import Language
from sqrtdk.messages import joined, named, said, word
from sqrtdk.report.console import console_text, paragraph
from sqrtdk.report.figures import format_number, format_percent
from sqrtdk.report.plain import plain
from sqrtdk.report.watch.compare import NOTABLE_DIFFERENCE, RunComparison
from sqrtdk.report.watch.fix import alarm_fix, root_alarm
from sqrtdk.report.watch.headline import Headline, compared_headline, run_headline
from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN, Array, badness
from sqrtdk.report.watch.summary import Summary, rank, way_run

SEVERITY_STYLES = {"note": "cyan", "warn": "yellow", "fail": "red", "critical": "bold magenta"}
MOST_ALARMS_PRINTED = 12
MOST_UNMEASURED_PRINTED = 12
_HOME, _TO_END_OF_LINE, _TO_END = "\x1b[H", "\x1b[K", "\x1b[J"
_BAR_GLYPHS = "▁▂▃▄▅▆▇█"
_NO_VALUE = "·"
_WIDE_TABLE = 90  # least width at which a table has further columns beside trend and newest value
_WRAPPED = ("site", "farthest")
_RUN_NAMES = ("A", "B")
_RIGHT = ("first", "newest", "head", "median", "step", "apart", *_RUN_NAMES)
_LOG_FROM = 30.0  # positive values that span more than this factor are drawn on a log scale


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

    return console_text(lambda console: _whole(console, summary, columns, language), width, color)


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
        draw = functools.partial(_whole, summary=summary, columns=columns, language=language, few=few)
        text = console_text(draw, width, color).split("\n")
    shown = "".join(f"{line}{_TO_END_OF_LINE}\n" for line in text[: lines - 1])
    return f"{_HOME}{shown}{_TO_END}"


@dataclass(frozen=True, slots=True)
class _Few:
    """How many attentions (for each statistic) and alarms fit. Sources and missing measurements are not shown then."""

    sites: int
    alarms: int


def _whole(
    console: Console, summary: Summary, columns: Sequence[str], language: Language, few: _Few | None = None
) -> None:
    _told_first(console, run_headline(summary), language)
    _head(console, summary, language)
    bars = max(12, min(60, console.width - 64))  # a sparkline takes what the other columns leave
    if len(summary.losses):
        line, low, high = _loss(summary, bars)
        first, newest = (format_number(float(summary.losses[at])) for at in (0, -1))
        console.print(
            Text.assemble((word("watch.terminal.loss", language), "bold"), (line, "cyan"), f"  {first} -> {newest}")
        )
        console.print(Text(f"      {_ends(low, high)}", style="dim"))
    for column in columns:
        console.print()
        _statistic(console, summary, column, bars, language, few.sites if few else None)
    console.print()
    _alarms(console, summary, language, few)
    if few is None:
        _missing(console, summary, language)
    elif summary.missing:
        console.print(Text(_count("watch.terminal.missing", len(summary.missing), language)))


def comparison_text(
    a: Summary, b: Summary, compared: RunComparison, *, width: int = 100, color: bool = False, language: Language = "en"
) -> str:
    """Return the differences of two runs as text."""

    def draw(console: Console) -> None:
        _told_first(console, compared_headline(a, b, compared), language)
        for letter, run in (("A", a), ("B", b)):
            _head(console, run, language, f"{letter}  ")
        console.print()
        _differences(console, compared, language)
        for letter, labels in (("A", compared.only_a), ("B", compared.only_b)):
            if labels:
                names = said(joined([plain(label) for label in labels[:5]], "comma"), language)
                names += word("watch.terminal.and_more", language, count=len(labels) - 5) if len(labels) > 5 else ""
                paragraph(console, Text(word("watch.terminal.only_in", language, side=letter, names=names)), 0)
        for letter, run in (("A", a), ("B", b)):
            console.print()
            console.print(Text(letter, style="bold"))
            _alarms(console, run, language)
            _missing(console, run, language)

    return console_text(draw, width, color)


def _differences(console: Console, compared: RunComparison, language: Language) -> None:
    if not compared.measured:
        console.print(Text(word("watch.terminal.no_shared", language), style="yellow"))
        return
    a, b = (said(joined(list(map(str, steps)), "comma"), language) for steps in (compared.steps_a, compared.steps_b))
    at = word("watch.terminal.at" if a == b else "watch.terminal.at_both", language, a=a, b=b)
    why = "" if compared.overlap else word("watch.terminal.no_overlap", language)
    if compared.by == "order":
        why += word("watch.terminal.in_order", language)
    medians = word("watch.terminal.medians", language, at=at, why=why)
    paragraph(console, Text.assemble((word("watch.terminal.differs", language), "bold"), medians), 0)
    bar = f"{NOTABLE_DIFFERENCE:.0%}"
    table = _table(language, "statistic", "apart", "over", "farthest", "A", "B", bar=bar)
    alike = [one.column for one in compared.differences if one.measured and not one.count]
    unmeasured = [
        one.column for one in compared.differences if not one.measured and STATISTIC_BY_COLUMN[one.column].always
    ]
    for one in compared.differences:
        pair = one.farthest
        name = Text(one.column, style="cyan")
        if pair is None or one.typical is None or one.column in alike:
            continue
        differ = Text(
            word("watch.terminal.count_of", language, count=one.count, all=one.measured),
            style="yellow" if one.count else "",
        )
        apart = format_percent(one.typical) if math.isfinite(one.typical) else "inf"
        values = (_value(one.column, pair.a), _value(one.column, pair.b))
        table.add_row(name, Text(apart, style="bold"), differ, plain(pair.label), *values)
    if table.row_count:
        console.print(table)
        paragraph(console, Text(word("watch.terminal.apart_means", language), style="dim"), 0)
    nowhere = word("watch.terminal.nowhere", language, bar=bar)
    for words, names in ((nowhere, alike), (word("watch.terminal.unmeasured_both", language), unmeasured)):
        if names:
            listed = said(joined(names, "comma"), language)
            paragraph(console, Text(words + word("words.mark.colon", language) + listed), 0)


def sparkline(values: Sequence[float] | Array, width: int, low: float, high: float, *, log: bool = False) -> str:
    """Draw values as bars of eight heights, at most `width` characters. A bar shows the last known value of its share.

    Args:
        values: NaN ("not measured") is drawn as a dot, an infinity as the highest or the lowest bar.
        width: in characters.
        low: value of the lowest bar.
        high: value of the highest bar.
        log: whether bars show the logarithm, which needs `low` > 0.

    Example:
        >>> sparkline([0, 1, 2, 3, math.nan, 7], 10, 0, 7)
        '▁▂▃▄·█'
        >>> sparkline(range(100), 4, 0, 99), sparkline([1, 10, 100], 3, 1, 100, log=True)
        ('▃▄▆█', '▁▅█')
    """
    cells = np.array_split(np.asarray(values, dtype=float), min(width, len(values))) if len(values) else []
    drawing = ""
    for cell in cells:
        known = cell[~np.isnan(cell)]
        if not len(known):
            drawing += _NO_VALUE
            continue
        value = min(max(float(known[-1]), low), high)  # an infinity becomes the lowest or the highest bar
        share = 0.0
        if high > low:
            share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        drawing += _BAR_GLYPHS[round(share * (len(_BAR_GLYPHS) - 1))]
    return drawing


def worst_of(values: Array, column: str, width: int) -> Array:
    """Return at most `width` values, each the worst of its share of the input.

    Example:
        >>> worst_of(np.array([1.0, 9.0, 2.0, math.nan]), "max_logit", 2).tolist()
        [9.0, 2.0]
    """
    cells = np.array_split(values, min(width, len(values)))
    return np.array([cell[badness(cell, column).argmax()] for cell in cells])


def _told_first(console: Console, head: Headline, language: Language) -> None:
    """Print the headline and what to do, above everything else."""
    stop = word("words.mark.stop", language).rstrip()
    paragraph(console, Text(plain(head.text.of(language)) + stop, style="bold"), 0)
    if head.fix:
        paragraph(console, _to_do(head.fix, language), 0)
    console.print()


def _to_do(fix: str, language: Language) -> Text:
    return Text.assemble((word("runs.fix.label", language), "bold"), plain(said(fix, language)))


def _head(console: Console, summary: Summary, language: Language, letter: str = "") -> None:
    model = summary.model if isinstance(summary.model, dict) else {}
    name = f"  {plain(str(model['class']))}" if "class" in model else ""
    parameters = model.get("parameters")
    if type(parameters) is int:
        name += word("words.mark.comma", language) + _count("watch.terminal.parameters", parameters, language)
    paragraph(console, Text.assemble((letter, "bold"), (plain(summary.name), "bold"), name), 0)
    if summary.first_step is None:
        console.print(word("watch.terminal.nothing", language))
        return
    # longer texts are reasons why steps were not measured, which are listed below
    counted = [(way, number_of) for way, number_of in summary.how.items() if len(way) < 40]
    ways = [
        word("watch.terminal.samples_with", language, count=number_of, what=plain(_way(way, language)))
        for way, number_of in counted
    ]
    text = word(
        "watch.terminal.steps",
        language,
        first=summary.first_step,
        last=summary.last_step or summary.first_step,
        samples=_count("watch.terminal.samples", len(summary.samples), language),
        ways=word("words.mark.comma", language).join(ways),
        attempts=_count("watch.terminal.attempts", summary.attempts, language),
        attentions=_count("watch.terminal.attentions", len(summary.sites), language),
    )
    paragraph(console, Text(text), 0)
    if summary.writer == "killed":
        paragraph(console, Text(word("runs.writer.killed", language, step=summary.last_step or "-"), style="yellow"), 0)


def _loss(summary: Summary, bars: int) -> tuple[str, float, float]:
    low, high, log = _range(summary.losses)
    return sparkline(summary.losses, bars, low, high, log=log), low, high


def _statistic(
    console: Console, summary: Summary, column: str, bars: int, language: Language, most: int | None = None
) -> None:
    worst = {id(site): worst_of(site.worst(column)[0], column, bars) for site in summary.sites}
    every = np.concatenate([*worst.values(), np.empty(0)])
    low, high, log = _range(every)
    if np.isnan(every).all():
        console.print(Text.assemble((column, "bold"), f"  {word('watch.terminal.unmeasured', language)}"))
        return
    scale = _ends(low, high, column) + (word("watch.terminal.logarithmic", language) if log else "")
    console.print(Text.assemble((column, "bold"), word("watch.terminal.worst", language, scale=scale)))
    wide = console.width >= _WIDE_TABLE
    table = _table(language, "site", "trend", "newest", "head", *(("first", "median", "step") if wide else ()))
    newest_values = np.array([float(site.worst(column)[0][-1]) for site in summary.sites])
    order = np.argsort(-badness(newest_values, column), kind="stable")[:most]
    for at in sorted(order.tolist()):  # the worst ones, in the order of the model
        site = summary.sites[at]
        values, heads = site.worst(column)
        newest = float(values[-1])
        more = (_value(column, float(values[0])), _value(column, float(site.median(column)[-1])), str(site.steps[-1]))
        table.add_row(
            plain(site.label),
            Text(sparkline(worst[id(site)], bars, low, high, log=log), style="cyan"),
            Text(_value(column, newest), style="bold"),
            "-" if math.isnan(newest) else str(site.heads[heads[-1]]),
            *(more if wide else ()),
        )
    console.print(table)
    if left := len(summary.sites) - len(order):
        console.print(Text(_count("watch.terminal.better", left, language), style="dim"))


def _alarms(console: Console, summary: Summary, language: Language, few: _Few | None = None) -> None:
    if not summary.alarms:
        none = "watch.terminal.no_alarms" if summary.sites else "watch.terminal.no_alarms_nothing"
        console.print(word(none, language))
        return
    some = [
        word("watch.terminal.alarms_with", language, count=count, what=_severity(severity, language))
        for severity, count in summary.counts.items()
        if count
    ]
    counts = word("words.mark.comma", language).join(some)
    console.print(Text.assemble((word("watch.terminal.alarms", language), "bold"), f"  {counts}"))
    worst = sorted(range(len(summary.alarms)), key=lambda at: (rank(summary.alarms[at].severity), at))
    # sorted ascending, so the last ones are the worst, and among equals the newest
    worst = worst[-(few.alarms if few else MOST_ALARMS_PRINTED) :]
    if left := len(summary.alarms) - len(worst):
        console.print(word("watch.terminal.more_alarms", language, shown=len(worst), count=left))
    sources: set[str] = set()
    fixes = {run_headline(summary).fix}
    root = root_alarm(summary)
    first = [] if root is None else [summary.alarms.index(root)]
    for alarm in (summary.alarms[at] for at in [*first, *sorted({*worst} - {*first})]):
        style = SEVERITY_STYLES.get(alarm.severity, "red")
        severity = Text(plain(_severity(alarm.severity, language)), style)
        severity.pad_right(max(0, 8 - severity.cell_len))
        step = word("watch.terminal.at_step", language, step=alarm.step)
        head = severity + Text(step + plain(said(alarm.text, language)))
        paragraph(console, head, 2)
        if few is None and alarm.source not in sources:  # print each source once
            paragraph(
                console,
                Text(word("watch.terminal.source", language) + plain(said(alarm.source, language)), style="dim"),
                11,
            )
        sources.add(alarm.source)
        if few is None and (fix := alarm_fix(summary, alarm)) not in fixes:  # the headline's stands above
            paragraph(console, _to_do(fix, language), 11)
            fixes.add(fix)


def _missing(console: Console, summary: Summary, language: Language) -> None:
    if not summary.missing:
        return
    console.print(Text(word("watch.terminal.unmeasured", language), style="bold"))
    for entry in summary.missing[:MOST_UNMEASURED_PRINTED]:
        paragraph(console, Text(plain(said(entry.message, language))), 2)
    if len(summary.missing) > MOST_UNMEASURED_PRINTED:
        console.print(word("watch.terminal.more", language, count=len(summary.missing) - MOST_UNMEASURED_PRINTED))


def _table(language: Language, *columns: str, **parts: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        title = column if column in _RUN_NAMES else word(f"watch.column.{column}", language, **parts)
        justify: Literal["left", "right"] = "right" if column in _RIGHT else "left"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=column not in _WRAPPED)
    return table


def _count(id: str, number_of: int, language: Language) -> str:
    """Return a count with its noun."""
    return word(id, language, count=f"{number_of:,}")


def _severity(name: str, language: Language) -> str:
    return said(named("words.severity", name), language)


def _way(way: str, language: Language) -> str:
    return said(way_run(way), language)


def _range(values: Array) -> tuple[float, float, bool]:
    """Return the least and the largest finite value, and whether to draw them on a log scale."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 0.0, 1.0, False
    low, high = float(finite.min()), float(finite.max())
    return low, high, low > 0 and high > _LOG_FROM * low


def _ends(low: float, high: float, column: str = "") -> str:
    return f"{_BAR_GLYPHS[0]} {_value(column, low)}  {_BAR_GLYPHS[-1]} {_value(column, high)}"


def _value(column: str, value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return (
        format_percent(value)
        if column in STATISTIC_BY_COLUMN and STATISTIC_BY_COLUMN[column].unit == "%"
        else format_number(value)
    )
