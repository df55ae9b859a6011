"""Draws the forecast of a quantised cache: the worst head of each call, and its error by other ways to quantise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.text import Text as Line

from sqrtdk._language import Language
from sqrtdk._sites import ROOT
from sqrtdk.audit.cache import Blame, CacheCall, CacheForecast
from sqrtdk.kv.findings import fix_text, scale_text
from sqrtdk.messages import Text, word
from sqrtdk.report.console import Column, bracketed, listed, paragraph, print_table
from sqrtdk.report.figures import number, percent
from sqrtdk.report.page import both
from sqrtdk.report.plain import plain
from sqrtdk.report.said import TITLES, said

COLUMNS = ("worst", "KL nats", "median", "max", "key changes", "output off")
NAMES = {"qk_norm": "q/k norm"}
MOST = 40
LEGEND = (
    "KL of its weights (mean, median, largest), rows whose largest key changes, error of the output; then its mean KL "
    "by other scales, with a channel scale folded into q, and with q and k normalised. Each layer by itself: what "
    "errors of one do to the next is not in it."
)
_BLAME = Text("{cause}: {why}; {fix}", "{cause}：{why}；{fix}")
_STYLES = {"note": "cyan", "warn": "yellow", "fail": "red"}


def draw_cache(console: Console, forecast: CacheForecast | None, language: Language = "en") -> None:
    """Print the forecast, or nothing if the check made none."""
    if forecast is None:
        return
    title = Line(_title(forecast, language), style="bold")
    title.append(f"  {_counted(forecast, language)}", style="not bold dim")
    paragraph(console, title, 0)
    if forecast.calls:
        _table(console, forecast, language)
    if len(forecast.calls) > MOST:
        paragraph(console, Line(word("terminal.more_json", language, count=len(forecast.calls) - MOST)), 2)
    for entry in forecast.without_cache[:1]:
        sites = bracketed(listed([one.site for one in forecast.without_cache], language), language)
        paragraph(
            console,
            Line(word("terminal.no_cache", language, why=said(entry.reason, language), sites=sites), style="dim"),
            0,
        )
    console.print()


def section(forecast: CacheForecast | None) -> dict[str, Any] | None:
    """Return the page's section on the forecast, or None if the check made none."""
    if forecast is None:
        return None
    names, rows = _cells(forecast.calls)
    at_fault = [(call.site, _blamed(one)) for call in forecast.calls for one in call.blame]
    others = [(one.site, _told(one.reason)) for one in (*forecast.not_measured, *forecast.without_cache)]
    return {
        "title": both(Text(_title(forecast, "en"), _title(forecast, "zh"))),
        "legend": both(Text(legend(forecast, "en"), legend(forecast, "zh"))),
        "titles": [both(Text(name, said(name, "zh", TITLES))) for name in names],
        "rows": rows,
        "notes": [*at_fault, *others],
        "source": _told(forecast.source),
    }


def _told(text: str) -> Markup:
    """Return a sentence in both languages."""
    return both(Text(text, said(text, "zh")))


def _blamed(one: Blame) -> Markup:
    """Return the cause of an error and its fix, in both languages."""
    cause = Text(one.cause, said(one.cause, "zh", TITLES))
    why, fix = (Text(text, said(text, "zh")) for text in (one.text, fix_text(one)))
    return both(_BLAME.filled(cause=cause, why=why, fix=fix))


def row_of(call: CacheCall) -> tuple[str, ...]:
    """Return the figures of a call's worst head, then its mean KL for each other way to quantise."""
    head = call.stored.worst
    error = call.stored.heads[head]
    return (
        plain(call.site) or ROOT,
        str(head),
        number(error.kl_mean_nats, 3),
        number(error.kl_median_nats, 3),
        number(error.kl_max_nats, 3),
        percent(error.changed_rows / call.seeing_rows[head] if call.seeing_rows[head] else None),
        percent(error.output_error),
        *(number(way.heads[head].kl_mean_nats, 3) for way in call.others),
    )


def titles(call: CacheCall) -> tuple[str, ...]:
    """Return the column titles for `row_of`."""
    return ("site", *COLUMNS, *(NAMES.get(way.name, way.name) for way in call.others))


def legend(forecast: CacheForecast, language: Language) -> str:
    """Return the explanation of the columns."""
    rows = max((call.rows for call in forecast.calls), default=0)
    of = max((call.rows_of for call in forecast.calls), default=0)
    sampled = "" if rows >= of else f", of {rows} of {of} rows"
    worst = said(f"Figures of the worst head, by its number{sampled}", language)
    return word("words.mark.colon", language).join((worst, said(LEGEND, language)))


def _counted(forecast: CacheForecast, language: Language) -> str:
    parts = [word("words.attentions", language, count=f"{len(forecast.calls):,}")]
    if forecast.not_measured:
        parts.append(said(f"{len(forecast.not_measured)} not judged", language))
    return word("words.mark.comma", language).join(parts)


def _title(forecast: CacheForecast, language: Language) -> str:
    grain, bits = scale_text(forecast.scale), number(forecast.bits)
    return said(f"A cache in {forecast.dtype}, {grain}, {bits} bits a number", language)


def _cells(calls: Sequence[CacheCall]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the titles and one row for each call, padded with "-" to the length of the titles."""
    if not calls:
        return (), []
    names = titles(max(calls, key=lambda call: len(call.others)))
    rows = [row_of(call) for call in calls]  # a call may lack ways to quantise that others have
    return names, [(*row, *("-" for _ in names[len(row) :])) for row in rows]


def _table(console: Console, forecast: CacheForecast, language: Language) -> None:
    head, rows = _cells(forecast.calls[:MOST])
    columns = [Column(said(name, language, TITLES), right=at > 0) for at, name in enumerate(head)]
    lines = []
    for row, call in zip(rows, forecast.calls, strict=False):
        worst = max((blame.severity for blame in call.blame), key=list(_STYLES).index, default="")
        lines.append([Line(row[0], style="bold"), *(Line(cell, style=_STYLES.get(worst, "")) for cell in row[1:])])
    print_table(console, columns, lines, language=language)
    paragraph(console, Line(legend(forecast, language), style="dim"), 0)
