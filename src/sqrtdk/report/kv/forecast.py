"""Draws the forecast of a quantised cache: the worst head of each call, and its error by other ways to quantise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from sqrtdk._sites import ROOT_NAME
from sqrtdk.audit.cache import QK_NORM, CacheCall, CacheForecast
from sqrtdk.kv.findings import KL_BARS, blamed_text, fix_text, level, scale_text
from sqrtdk.messages import Message, joined
from sqrtdk.report.console import FINDING_STYLES, TableColumn
from sqrtdk.report.figures import format_number, format_percent
from sqrtdk.report.plain import plain
from sqrtdk.report.printer import Printer

CACHE_COLUMNS = ("site", "worst", "kl", "median", "max", "key_changes", "output_off")
FORMAT_COLUMNS = (
    "cache.formats.format", "words.column.health", "cache.formats.bits", "cache.formats.scale",
    "cache.table.column.kl", "cache.table.column.key_changes", "cache.table.column.output_off",
)  # fmt: skip
_OF_NUMBERS = (2, 4, 5, 6)  # places of the columns of numbers
MOST_CALLS_SHOWN = 40


def draw_cache(printer: Printer, forecast: CacheForecast | None) -> None:
    """Print the forecast of a cache, worst calls first.

    Args:
        printer: Where to print, and in which language.
        forecast: The forecast; None, if the check made none, prints nothing.
    """
    if forecast is None:
        return
    title = printer.line(_title(forecast), "bold")
    printer.paragraph(title.append(f"  {printer.join(_counts(forecast))}", style="not bold dim"))
    if forecast.calls:
        _print_calls(printer, forecast)
    printer.more(len(forecast.calls) - MOST_CALLS_SHOWN, "terminal.more_json")
    # one line for all: an attention in which every row sees every key keeps no cache
    for entry in forecast.without_cache[:1]:
        sites = printer.bracketed(printer.sites([one.site for one in forecast.without_cache]))
        printer.paragraph(Message("terminal.no_cache", why=entry.reason, sites=sites), style="dim")
    printer.blank()


def _print_calls(printer: Printer, forecast: CacheForecast) -> None:
    titles, rows = _cells(forecast.calls[:MOST_CALLS_SHOWN])
    lines = []
    for row, call in zip(rows, forecast.calls, strict=False):
        worst = max((blame.severity for blame in call.blame), key=list(FINDING_STYLES).index, default="")
        lines.append(_line(printer, row, worst))
    printer.table([TableColumn(name, right=at > 0) for at, name in enumerate(titles)], lines)
    printer.paragraph(legend(forecast), style="dim")


def _line(printer: Printer, cells: Sequence[str], severity: str) -> list[Text]:
    """Return the cells of a line, whose first names it; the others have the colour of its severity."""
    style = FINDING_STYLES.get(severity, "")
    return [printer.line(cells[0], "bold"), *(printer.line(cell, style) for cell in cells[1:])]


def draw_formats(printer: Printer, forecasts: Sequence[CacheForecast]) -> None:
    """Print a table with a line for each cache format that was compared.

    Args:
        printer: Where to print, and in which language.
        forecasts: One forecast for each format; if there are none, nothing is printed.
    """
    if not forecasts:
        return
    printer.paragraph(Message("cache.formats.title"), style="bold")
    columns = [TableColumn(Message(id), right=at in _OF_NUMBERS) for at, id in enumerate(FORMAT_COLUMNS)]
    lines = []
    for forecast in forecasts:
        severity, cells = _format_row(forecast)
        lines.append(_line(printer, cells, severity))
    printer.table(columns, lines)
    for name, note in _notes_of_formats(forecasts):
        printer.paragraph(joined([name, note], "colon"), style="dim")
    printer.paragraph(Message("cache.formats.legend"), style="dim")
    printer.blank()


def formats_section(forecasts: Sequence[CacheForecast]) -> dict[str, Any] | None:
    """Return what the page's template needs to compare several cache formats; None if none were compared.

    Returns:
        A dict with "title", "legend", "titles" of the columns, "rows" of cells, one for each format, "notes" and
        "source".
    """
    if not forecasts:
        return None
    return {
        "title": Message("cache.formats.title"),
        "legend": Message("cache.formats.legend"),
        "titles": [Message(id) for id in FORMAT_COLUMNS],
        "rows": [_format_row(forecast)[1] for forecast in forecasts],
        "notes": _notes_of_formats(forecasts),
        "source": joined(list(dict.fromkeys(forecast.source for forecast in forecasts)), "semicolon"),
    }


def _format_row(forecast: CacheForecast) -> tuple[str, list[str]]:
    """Return the worst severity of a format, and the cells of its line, with the figures of the head that has it."""
    ranks = ["", *reversed([name for name, _ in KL_BARS])]  # "": below every bar
    # one bad head spoils a layer, so a format is judged by its worst head
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
    """Return what the page's template needs to show the forecast of a cache; None if the check made none.

    Returns:
        A dict with "title", "legend", "titles" of the columns, "rows" of cells, "notes" as pairs of site and text, and
        "source".
    """
    if forecast is None:
        return None
    names, rows = _cells(forecast.calls)
    at_fault = [(call.site, joined([blamed_text(one), fix_text(one)])) for call in forecast.calls for one in call.blame]
    others = [(one.site, one.reason) for one in (*forecast.not_measured, *forecast.without_cache)]
    return {
        "title": _title(forecast),
        "legend": legend(forecast),
        "titles": names,
        "rows": rows,
        "notes": [*at_fault, *others],
        "source": forecast.source,
    }


def row_of(call: CacheCall) -> tuple[str, ...]:
    """Return the cells of a call in the table of the forecast, as `titles` names them.

    The figures are those of the worst head; KL divergences are in nats. The last cells are the mean KL for each other
    way to quantise.
    """
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
    """Return the titles of the columns of `row_of`: those of all calls, then one for each other way to quantise."""
    columns = [Message(f"cache.table.column.{name}") for name in CACHE_COLUMNS]
    ways = [Message("cache.table.column.qk_norm") if way.name == QK_NORM else way.name for way in call.others]
    return (*columns, *ways)


def legend(forecast: CacheForecast) -> str:
    """Return the sentence that explains the columns, and over how many rows the figures are taken if not over all."""
    rows = max((call.rows for call in forecast.calls), default=0)
    of = max((call.rows_of for call in forecast.calls), default=0)
    figures = Message("cache.table.figures")
    if rows < of:
        figures = Message("cache.table.figures_of_rows", rows=rows, all=of)
    return joined([figures, Message("cache.table.legend")], "colon")


def _counts(forecast: CacheForecast) -> list[str]:
    counts: list[str] = [Message("words.attentions", count=f"{len(forecast.calls):,}")]
    if forecast.not_measured:
        counts.append(Message("cache.table.not_judged", count=len(forecast.not_measured)))
    return counts


def _title(forecast: CacheForecast) -> Message:
    grain, bits = scale_text(forecast.scale), format_number(forecast.bits)
    return Message("cache.table.title", dtype=forecast.dtype, grain=grain, bits=bits)


def _cells(calls: Sequence[CacheCall]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the titles and one row for each call, padded with "-" to the length of the titles."""
    if not calls:
        return (), []
    # the titles of the call with most ways hold for all others
    names = titles(max(calls, key=lambda call: len(call.others)))
    rows = [row_of(call) for call in calls]  # a call may lack ways to quantise that others have
    return names, [(*row, *("-" for _ in names[len(row) :])) for row in rows]
