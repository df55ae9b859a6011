"""A saved run: its alarms, the trend of its worst heads, the newest sample, and what was not measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from sqrtdk._sites import ROOT
from sqrtdk.app import fields
from sqrtdk.app.catalogue import Words
from sqrtdk.app.figures import drawing
from sqrtdk.app.pieces import Cell, headline, lead, left, recorded, shown, table
from sqrtdk.audit.records import FAILING, SEVERITIES
from sqrtdk.lab.figures import Plot, curve
from sqrtdk.lab.text import Text
from sqrtdk.report.figures import number, percent
from sqrtdk.report.watch_statistics import STATISTICS
from sqrtdk.report.watch_words import ALARM_WORDS, SEVERITY_WORDS

_DRAWN = ("max_logit", "entropy_fraction", "peak", "saturated")
_MOST_LINES = 8  # sites in one plot: as many as there are colours
_MOST_RUNS = 8
_MOST_STEPS = 2000  # of a line; a longer one is thinned


def runs_html(document: Mapping[str, Any], words: Words) -> Markup:
    """Draw the document of `sqrtdk watch show`, or the runs of `watch compare` and `watch checkpoints`, one by one."""
    if "differences" in document:
        runs = [document["a"], document["b"]]
    else:
        runs = list(fields.listed(document["runs"])) if "runs" in document else [document]
    drawn = [_run(fields.mapping(run), f"watch-{at}", words) for at, run in enumerate(runs[:_MOST_RUNS])]
    if not drawn:
        raise ValueError("there is no run in it")
    more = len(runs) - len(drawn)
    return Markup("").join(drawn) + (lead(words("saved.left", count=more)) if more else Markup(""))


def _run(document: Mapping[str, Any], prefix: str, words: Words) -> Markup:
    sites = [fields.mapping(one) for one in fields.listed(document["sites"])]
    alarms = [fields.mapping(one) for one in fields.listed(document["alarms"])]
    missing = fields.listed(document["missing"])
    severities = [fields.of(one["severity"], SEVERITIES) for one in alarms]
    word, tone = _result(severities, bool(sites), bool(missing))
    steps = [fields.maybe(document[name]) for name in ("first_step", "last_step")]
    recorded = number(fields.maybe(document["recorded_steps"]))
    first, last = map(number, steps)
    parts = [
        headline(words(f"result.{word}"), tone, fields.text(document["run"])),
        lead(words("watch.steps", first=first, last=last, recorded=recorded, sites=len(sites))),
    ]
    if alarms:
        worst = sorted(alarms, key=lambda one: -SEVERITIES.index(one["severity"]))[: fields.MOST_ROWS]
        columns = ("severity", "alarm", "step_of", "site", "message")
        rows = [_alarm(one, words) for one in worst]
        parts.append(table(words("watch.alarms"), [words(f"column.{name}") for name in columns], rows))
        parts.append(left(len(alarms), words))
    if missing:
        parts.append(lead(words("watch.missing", count=len(missing))))
    if sites:
        parts.append(Markup('<div class="plots">{}</div>').format(_plots(sites, prefix, words)))
        names = [words.of(STATISTICS[name].name) for name in _DRAWN]
        rows = [_newest(one) for one in sites[: fields.MOST_ROWS]]
        parts.append(table(words("watch.newest"), [words("column.site"), *names], rows))
        parts.append(left(len(sites), words))
    return Markup("").join(parts)


def _result(severities: Sequence[str], measured: bool, missing: bool) -> tuple[str, str]:
    if any(name in FAILING for name in severities):
        return "failed", "bad"
    if not measured or missing:
        return "incomplete", "doubtful"
    return ("warnings", "doubtful") if "warn" in severities else ("quiet", "good")


def _alarm(alarm: Mapping[str, Any], words: Words) -> tuple[Cell, ...]:
    name = fields.text(alarm["name"])
    return (
        words.of(SEVERITY_WORDS[alarm["severity"]]),
        ALARM_WORDS.get(name, name) if words.language == "zh" else name,
        number(fields.maybe(alarm["step"])),
        fields.maybe_text(alarm["site"]),
        recorded(fields.text(alarm["text"]), words),
    )


def _series(site: Mapping[str, Any], name: str) -> list[tuple[float, float]]:
    """Steps and the worst head's value where there is one; an infinite value is left to the table."""
    statistic = fields.mapping(fields.mapping(site["statistics"])[name])
    pairs = zip(fields.listed(site["steps"]), fields.listed(statistic["worst"]), strict=True)
    known = [(fields.number(step), fields.number(value)) for step, value in pairs]
    every = max(1, len(known) // _MOST_STEPS)
    return [(step, value) for step, value in known[::every] if math.isfinite(step) and math.isfinite(value)]


def _plots(sites: Sequence[Mapping[str, Any]], prefix: str, words: Words) -> Markup:
    drawn = sites[:_MOST_LINES]
    names = Markup("").join(
        Markup('<li><span class="mark line k{}"></span>{}</li>').format(index, shown(fields.text(site["site"])))
        for index, site in enumerate(drawn)
    )
    parts = []
    for name in _DRAWN:
        series = tuple(curve("", *_columns(_series(site, name)), style="line") for site in drawn)
        own = f"{prefix}-{name}"
        plot = Plot(own, Text("", ""), "$t$", "", series)
        title, meaning = words.of(STATISTICS[name].name), words.of(STATISTICS[name].meaning)
        parts.append(
            Markup(
                '<figure class="plot"><h3>{}</h3><ul class="legend">{}</ul>{}'
                '<figcaption id="{}-caption">{}</figcaption></figure>'
            ).format(title, names, drawing(plot, own, words), own, f"{meaning}{words('watch.over_steps')}")
        )
    more = len(sites) - len(drawn)
    note = lead(words("watch.more_sites", count=more)) if more else Markup("")
    return Markup("").join(parts) + note


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _newest(site: Mapping[str, Any]) -> tuple[Cell, ...]:
    cells: list[Cell] = [fields.text(site["site"]) or ROOT]
    for name in _DRAWN:
        worst = fields.listed(fields.mapping(fields.mapping(site["statistics"])[name])["worst"])
        value = fields.maybe(worst[-1]) if worst else None
        cells.append(percent(value) if STATISTICS[name].unit == "%" else number(value))
    return tuple(cells)
