"""Draws the forecast of a quantised cache: the worst head of each call, and its error by other ways to quantise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.text import Text as Line

from sqrtdk._language import Language
from sqrtdk._sites import ROOT_NAME
from sqrtdk.audit.cache import QK_NORM, CacheCall, CacheForecast
from sqrtdk.kv.findings import KL_BARS, blamed_text, fix_text, level, scale_text
from sqrtdk.messages import Message, joined, said, text_of_value, word
from sqrtdk.report.console import TableColumn, bracketed, list_sites, paragraph, print_table
from sqrtdk.report.figures import format_number, format_percent
from sqrtdk.report.page import both
from sqrtdk.report.plain import plain

CACHE_COLUMNS = ("site", "worst", "kl", "median", "max", "key_changes", "output_off")
FORMAT_COLUMNS = (
    "cache.formats.format", "words.column.health", "cache.formats.bits", "cache.formats.scale",
    "cache.table.column.kl", "cache.table.column.key_changes", "cache.table.column.output_off",
)  # fmt: skip
_OF_NUMBERS = (2, 4, 5, 6)  # places of the columns of numbers
MOST_CALLS_SHOWN = 40
_CACHE_STYLES = {"note": "cyan", "warn": "yellow", "fail": "red"}


def draw_cache(console: Console, forecast: CacheForecast | None, language: Language = "en") -> None:
    """Print the forecast, or nothing if the check made none."""
    if forecast is None:
        return
    title = Line(said(_title(forecast), language), style="bold")
    title.append(f"  {_counted(forecast, language)}", style="not bold dim")
    paragraph(console, title, 0)
    if forecast.calls:
        _table(console, forecast, language)
    if len(forecast.calls) > MOST_CALLS_SHOWN:
        paragraph(console, Line(word("terminal.more_json", language, count=len(forecast.calls) - MOST_CALLS_SHOWN)), 2)
    for entry in forecast.without_cache[:1]:
        sites = bracketed(list_sites([one.site for one in forecast.without_cache], language), language)
        paragraph(
            console,
            Line(word("terminal.no_cache", language, why=said(entry.reason, language), sites=sites), style="dim"),
            0,
        )
    console.print()


def draw_formats(console: Console, forecasts: Sequence[CacheForecast], language: Language = "en") -> None:
    """Print a line for each format, or nothing if none were compared."""
    if not forecasts:
        return
    paragraph(console, Line(word("cache.formats.title", language), style="bold"), 0)
    columns = [TableColumn(said(name, language), right=at in _OF_NUMBERS) for at, name in _format_titles()]
    lines = []
    for forecast in forecasts:
        severity, cells = _format_row(forecast)
        style = _CACHE_STYLES.get(severity, "")
        told = [said(cell, language) for cell in cells]
        lines.append([Line(told[0], style="bold"), *(Line(cell, style=style) for cell in told[1:])])
    print_table(console, columns, lines, language=language)
    for name, note in _notes_of_formats(forecasts):
        paragraph(console, Line(said(joined([name, note], "colon"), language), style="dim"), 0)
    paragraph(console, Line(word("cache.formats.legend", language), style="dim"), 0)
    console.print()


def formats_section(forecasts: Sequence[CacheForecast]) -> dict[str, Any] | None:
    """Return the page's section on several formats, or None if none were compared."""
    if not forecasts:
        return None
    return {
        "title": _both(Message("cache.formats.title")),
        "legend": _both(Message("cache.formats.legend")),
        "titles": [_both(name) for _, name in _format_titles()],
        "rows": [[_both(cell) for cell in _format_row(forecast)[1]] for forecast in forecasts],
        "notes": [(name, _both(note)) for name, note in _notes_of_formats(forecasts)],
        "source": _both(joined(list(dict.fromkeys(forecast.source for forecast in forecasts)), "semicolon")),
    }


def _format_titles() -> list[tuple[int, Message]]:
    return list(enumerate(Message(name) for name in FORMAT_COLUMNS))


def _format_row(forecast: CacheForecast) -> tuple[str, list[str]]:
    """Return the worst severity of a format, and the cells of its line, with the figures of the head that has it."""
    ranks = ["", *reversed([name for name, _ in KL_BARS])]  # "": below every bar
    heads = [(call, head) for call in forecast.calls for head in range(len(call.stored.heads))]
    stored = (format_number(forecast.bits), forecast.scale)
    if not heads:
        return "", [forecast.dtype, Message("words.verdict.unmeasured"), *stored, *"---"]

    def badness(place: tuple[CacheCall, int]) -> tuple[int, float]:
        error = place[0].stored.heads[place[1]]
        return ranks.index(level(error) or ""), error.kl_mean_nats

    call, head = max(heads, key=badness)
    error, rows = call.stored.heads[head], call.seeing_rows[head]
    severity = level(error) or ""
    figures = [
        format_number(error.kl_mean_nats, 3),
        format_percent(error.changed_rows / rows if rows else None),
        format_percent(error.output_error),
    ]
    return severity, [forecast.dtype, Message(f"words.severity.{severity or 'ok'}"), *stored, *figures]


def _notes_of_formats(forecasts: Sequence[CacheForecast]) -> list[tuple[str, Message]]:
    """Return each format that could not be judged on some attentions, with the first reason."""
    return [
        (
            one.dtype,
            Message("cache.formats.not_judged", count=len(one.not_measured), reason=one.not_measured[0].reason),
        )
        for one in forecasts
        if one.not_measured
    ]


def cache_section(forecast: CacheForecast | None) -> dict[str, Any] | None:
    """Return the page's section on the forecast, or None if the check made none."""
    if forecast is None:
        return None
    names, rows = _cells(forecast.calls)
    at_fault = [
        (call.site, _both(joined([blamed_text(one), fix_text(one)]))) for call in forecast.calls for one in call.blame
    ]
    others = [(one.site, _both(one.reason)) for one in (*forecast.not_measured, *forecast.without_cache)]
    return {
        "title": _both(_title(forecast)),
        "legend": _both(legend(forecast)),
        "titles": [_both(name) for name in names],
        "rows": rows,
        "notes": [*at_fault, *others],
        "source": _both(forecast.source),
    }


def _both(sentence: str) -> Markup:
    """Return a sentence in both languages."""
    return both(text_of_value(sentence))


def row_of(call: CacheCall) -> tuple[str, ...]:
    """Return the figures of a call's worst head, then its mean KL for each other way to quantise."""
    head = call.stored.worst
    error = call.stored.heads[head]
    return (
        plain(call.site) or ROOT_NAME,
        str(head),
        format_number(error.kl_mean_nats, 3),
        format_number(error.kl_median_nats, 3),
        format_number(error.kl_max_nats, 3),
        format_percent(error.changed_rows / call.seeing_rows[head] if call.seeing_rows[head] else None),
        format_percent(error.output_error),
        *(format_number(way.heads[head].kl_mean_nats, 3) for way in call.others),
    )


def titles(call: CacheCall) -> tuple[str, ...]:
    """Return the column titles for `row_of`."""
    columns = [Message(f"cache.table.column.{name}") for name in CACHE_COLUMNS]
    ways = [Message("cache.table.column.qk_norm") if way.name == QK_NORM else way.name for way in call.others]
    return (*columns, *ways)


def legend(forecast: CacheForecast) -> str:
    """Return the explanation of the columns."""
    rows = max((call.rows for call in forecast.calls), default=0)
    of = max((call.rows_of for call in forecast.calls), default=0)
    figures = Message("cache.table.figures")
    if rows < of:
        figures = Message("cache.table.figures_of_rows", rows=rows, all=of)
    return joined([figures, Message("cache.table.legend")], "colon")


def _counted(forecast: CacheForecast, language: Language) -> str:
    parts = [word("words.attentions", language, count=f"{len(forecast.calls):,}")]
    if forecast.not_measured:
        parts.append(said(Message("cache.table.not_judged", count=len(forecast.not_measured)), language))
    return word("words.mark.comma", language).join(parts)


def _title(forecast: CacheForecast) -> Message:
    grain, bits = scale_text(forecast.scale), format_number(forecast.bits)
    return Message("cache.table.title", dtype=forecast.dtype, grain=grain, bits=bits)


def _cells(calls: Sequence[CacheCall]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the titles and one row for each call, padded with "-" to the length of the titles."""
    if not calls:
        return (), []
    names = titles(max(calls, key=lambda call: len(call.others)))
    rows = [row_of(call) for call in calls]  # a call may lack ways to quantise that others have
    return names, [(*row, *("-" for _ in names[len(row) :])) for row in rows]


def _table(console: Console, forecast: CacheForecast, language: Language) -> None:
    head, rows = _cells(forecast.calls[:MOST_CALLS_SHOWN])
    columns = [TableColumn(said(name, language), right=at > 0) for at, name in enumerate(head)]
    lines = []
    for row, call in zip(rows, forecast.calls, strict=False):
        worst = max((blame.severity for blame in call.blame), key=list(_CACHE_STYLES).index, default="")
        lines.append(
            [Line(row[0], style="bold"), *(Line(cell, style=_CACHE_STYLES.get(worst, "")) for cell in row[1:])]
        )
    print_table(console, columns, lines, language=language)
    paragraph(console, Line(said(legend(forecast), language), style="dim"), 0)
