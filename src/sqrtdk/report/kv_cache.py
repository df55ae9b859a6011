"""The forecast of a quantised cache in a terminal: the worst head of each call, and what other ways would give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.text import Text as Line

from sqrtdk._language import Language
from sqrtdk._sites import ROOT
from sqrtdk.audit.cache import CacheCall, CacheForecast
from sqrtdk.kv.findings import fix_text, scale_text
from sqrtdk.lab.text import Text, say
from sqrtdk.report.console import Column, listed, paragraph, print_table
from sqrtdk.report.figures import number, percent
from sqrtdk.report.page import both
from sqrtdk.report.plain import plain
from sqrtdk.report.said import said
from sqrtdk.report.terminal_words import bracketed, named, word

COLUMNS = ("worst", "KL nats", "median", "max", "key changes", "output off")
NAMES = {"qk_norm": "q/k norm"}
MOST = 40
WORDS = {
    "site": Text("site", "调用位置"),
    "worst": Text("worst", "最差头"),
    "KL nats": Text("KL nats", "KL nat"),
    "median": Text("median", "中位数"),
    "max": Text("max", "最大"),
    "key changes": Text("key changes", "键改变"),
    "output off": Text("output off", "输出偏差"),
    "q/k norm": Text("q/k norm", "q/k 规范化"),
    "title": Text("A cache in {dtype}, {grain}, {bits} bits a number", "{dtype} 的缓存，{grain}，每个数 {bits} 位"),
    "attention": Text("{count} attention", "{count} 处注意力"),
    "attentions": Text("{count} attentions", "{count} 处注意力"),
    "not judged": Text("{count} not judged", "{count} 处未能判定"),
    "sampled": Text(", of {rows} of {of} rows", "，取 {of} 行中的 {rows} 行"),
    "legend": Text(
        "Figures of the worst head, by its number{sampled}: KL of its weights (mean, median, largest), rows whose "
        "largest key changes, error of the output; then its mean KL by other scales, with a channel scale folded into "
        "q, and with q and k normalised. Each layer by itself: what errors of one do to the next is not in it.",
        "数值取自最差的头（给出头号{sampled}）：权重的 KL 散度（均值、中位数、最大值）、最大键改变的行、输出误差；"
        "其后为采用其他缩放方式、将通道缩放并入 q、对 q 与 k 规范化时的平均 KL。"
        "各层单独计算：不含一层的误差对下一层的影响。",
    ),
}
_STYLES = {"note": "cyan", "warn": "yellow", "fail": "red"}


def draw_cache(console: Console, forecast: CacheForecast | None, language: Language = "en") -> None:
    """Print the forecast; nothing where none was asked for."""
    if forecast is None:
        return
    title = Line(_title(forecast, language), style="bold")
    title.append(f"  {_counted(forecast, language)}", style="not bold dim")
    paragraph(console, title, 0)
    if forecast.calls:
        _table(console, forecast, language)
    if len(forecast.calls) > MOST:
        paragraph(console, Line(word("more_json", language, count=len(forecast.calls) - MOST)), 2)
    for entry in forecast.without_cache[:1]:
        sites = bracketed(listed([one.site for one in forecast.without_cache], language), language)
        paragraph(
            console, Line(word("no cache", language, why=said(entry.reason, language), sites=sites), style="dim"), 0
        )
    console.print()


def section(forecast: CacheForecast | None) -> dict[str, Any] | None:
    """What the page shows of it; None where none was asked for."""
    if forecast is None:
        return None
    names, rows = _cells(forecast.calls)
    at_fault = [
        (call.site, _told(one.cause, ": ", one.text, "; ", fix_text(one)))
        for call in forecast.calls
        for one in call.blame
    ]
    others = [(one.site, _told(one.reason)) for one in (*forecast.not_measured, *forecast.without_cache)]
    return {
        "title": both(Text(_title(forecast, "en"), _title(forecast, "zh"))),
        "legend": both(Text(legend(forecast, "en"), legend(forecast, "zh"))),
        "titles": [both(WORDS.get(name, Text(name, name))) for name in names],
        "rows": rows,
        "notes": [*at_fault, *others],
        "source": forecast.source,
    }


def _told(*parts: str) -> Markup:
    """Sentences and the marks between them, in both languages."""
    marks = {": ": "：", "; ": "；"}
    return both(Text("".join(parts), "".join(marks.get(part) or said(part, "zh") for part in parts)))


def row_of(call: CacheCall) -> tuple[str, ...]:
    """The figures of a call's worst head, then its mean KL in every other way."""
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
    """Above the figures of `row_of`."""
    return ("site", *COLUMNS, *(NAMES.get(way.name, way.name) for way in call.others))


def legend(forecast: CacheForecast, language: Language) -> str:
    """What the columns are."""
    rows = max((call.rows for call in forecast.calls), default=0)
    of = max((call.rows_of for call in forecast.calls), default=0)
    sampled = "" if rows >= of else say(WORDS["sampled"], language, rows=rows, of=of)
    return say(WORDS["legend"], language, sampled=sampled)


def _counted(forecast: CacheForecast, language: Language) -> str:
    number_of = len(forecast.calls)
    parts = [say(WORDS["attention" if number_of == 1 else "attentions"], language, count=f"{number_of:,}")]
    if forecast.not_measured:
        parts.append(say(WORDS["not judged"], language, count=len(forecast.not_measured)))
    return word("comma", language).join(parts)


def _title(forecast: CacheForecast, language: Language) -> str:
    grain = said(scale_text(forecast.scale), language)
    return say(WORDS["title"], language, dtype=forecast.dtype, grain=grain, bits=number(forecast.bits))


def _cells(calls: Sequence[CacheCall]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The titles, and a row of each call as long as they are."""
    if not calls:
        return (), []
    names = titles(max(calls, key=lambda call: len(call.others)))
    rows = [row_of(call) for call in calls]
    return names, [(*row, *("-" for _ in names[len(row) :])) for row in rows]


def _table(console: Console, forecast: CacheForecast, language: Language) -> None:
    head, rows = _cells(forecast.calls[:MOST])
    columns = [Column(named(WORDS, name, language), right=at > 0) for at, name in enumerate(head)]
    lines = []
    for row, call in zip(rows, forecast.calls, strict=False):
        worst = max((blame.severity for blame in call.blame), key=list(_STYLES).index, default="")
        lines.append([Line(row[0], style="bold"), *(Line(cell, style=_STYLES.get(worst, "")) for cell in row[1:])])
    print_table(console, columns, lines)
    paragraph(console, Line(legend(forecast, language), style="dim"), 0)
