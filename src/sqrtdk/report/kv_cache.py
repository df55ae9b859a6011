"""The forecast of a quantised cache in a terminal: the worst head of each call, and what other ways would give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from sqrtdk.audit.cache import CacheCall, CacheForecast
from sqrtdk.kv.findings import fix_text, scale_text
from sqrtdk.report.console import listed, paragraph
from sqrtdk.report.figures import count, number, percent
from sqrtdk.report.plain import plain

COLUMNS = ("worst", "KL nats", "median", "max", "key changes", "output off")
NAMES = {"qk_norm": "q/k norm"}
MOST = 40
_STYLES = {"note": "cyan", "warn": "yellow", "fail": "red"}


def draw_cache(console: Console, forecast: CacheForecast | None) -> None:
    """Print the forecast; nothing where none was asked for."""
    if forecast is None:
        return
    title = Text(_title(forecast), style="bold")
    title.append(f"  {_counted(forecast)}", style="not bold dim")
    paragraph(console, title, 0)
    if forecast.calls:
        _table(console, forecast)
    if len(forecast.calls) > MOST:
        paragraph(console, Text(f"... and {len(forecast.calls) - MOST} more: see --json"), 2)
    for entry in forecast.without_cache[:1]:
        sites = listed([one.site for one in forecast.without_cache])
        paragraph(console, Text(f"No cache: {entry.reason} ({sites})", style="dim"), 0)
    console.print()


def section(forecast: CacheForecast | None) -> dict[str, Any] | None:
    """What the page shows of it; None where none was asked for."""
    if forecast is None:
        return None
    names, rows = _cells(forecast.calls)
    at_fault = [
        (call.site, f"{one.cause}: {one.text}; {fix_text(one)}") for call in forecast.calls for one in call.blame
    ]
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
    """The figures of a call's worst head, then its mean KL in every other way."""
    head = call.stored.worst
    error = call.stored.heads[head]
    return (
        plain(call.site) or "(root)",
        str(head),
        number(error.kl_mean_nats, 3),
        number(error.kl_median_nats, 3),
        number(error.kl_max_nats, 3),
        percent(error.changed_rows / call.seeing_rows[head] if call.seeing_rows[head] else None),
        percent(error.output_error),
        *(number(way.heads[head].kl_mean_nats, 3) for way in call.others),
    )


def titles(call: CacheCall) -> tuple[str, ...]:
    """Above the figures of `row_of`."""
    return ("site", *COLUMNS, *(NAMES.get(way.name, way.name) for way in call.others))


def legend(forecast: CacheForecast) -> str:
    """What the columns are."""
    rows = max((call.rows for call in forecast.calls), default=0)
    of = max((call.rows_of for call in forecast.calls), default=0)
    sampled = "" if rows >= of else f", of {rows} of {of} rows"
    return (
        f"Figures of the worst head, by its number{sampled}: KL of its weights (mean, median, largest), rows whose "
        "largest key changes, error of the output; then its mean KL by other scales, with a channel scale folded into "
        "q, and with q and k normalised. Each layer by itself: what errors of one do to the next is not in it."
    )


def _counted(forecast: CacheForecast) -> str:
    parts = [count(len(forecast.calls), "attention")]
    if forecast.not_measured:
        parts.append(f"{len(forecast.not_measured)} not judged")
    return ", ".join(parts)


def _title(forecast: CacheForecast) -> str:
    return f"A cache in {forecast.dtype}, {scale_text(forecast.scale)}, {number(forecast.bits)} bits a number"


def _cells(calls: Sequence[CacheCall]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The titles, and a row of each call as long as they are."""
    if not calls:
        return (), []
    names = titles(max(calls, key=lambda call: len(call.others)))
    rows = [row_of(call) for call in calls]
    return names, [(*row, *("-" for _ in names[len(row) :])) for row in rows]


def _table(console: Console, forecast: CacheForecast) -> None:
    """One line a call where that fits, else the site above its figures."""
    head, rows = _cells(forecast.calls[:MOST])
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    wide = sum(widths) + 2 * (len(widths) - 1) <= console.width
    columns = slice(0 if wide else 1, None)
    console.print(_line(head[columns], widths[columns], wide), style="dim", soft_wrap=True)
    for row, call in zip(rows, forecast.calls, strict=False):
        if not wide:
            paragraph(console, Text(row[0], style="bold"), 0)
        worst = max((blame.severity for blame in call.blame), key=list(_STYLES).index, default="")
        console.print(Text(_line(row[columns], widths[columns], wide), style=_STYLES.get(worst, "")), soft_wrap=True)
    paragraph(console, Text(legend(forecast), style="dim"), 0)


def _line(cells: Sequence[str], widths: Sequence[int], wide: bool) -> str:
    padded = [
        cell.ljust(width) if wide and not i else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded)
