"""The data that the page of a run draws with its own script, no larger than a browser likes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sqrtdk.report.plain import plain
from sqrtdk.report.watch_summary import SEVERITIES, STATISTICS, Array, Site, Summary, badness

MOST_COLUMNS = 240  # samples of a site that are drawn next to each other
MOST_NUMBERS = 1_500_000  # values of heads on a page: about 10 MB
MOST_LOSSES = 2000
MOST_ALARMS = 400


def payload(runs: Sequence[Summary]) -> dict[str, Any]:
    """Return what the page's script needs, as JSON-ready data in which every text is made visible.

    Of samples that share a column the worst value of each head is kept; `samples_a_column` says how many they are.
    """
    numbers = sum(site.values[name].size for run in runs for site in run.sites for name in STATISTICS)
    samples = max((len(site.steps) for run in runs for site in run.sites), default=1)
    share = min(1.0, MOST_NUMBERS / max(numbers, 1), MOST_COLUMNS / samples)
    columns = max(8, math.floor(samples * share))
    a_column = math.ceil(samples / columns)
    return {
        "columns": list(STATISTICS),
        "worst": {name: statistic.worst for name, statistic in STATISTICS.items()},
        "units": {name: statistic.unit for name, statistic in STATISTICS.items()},
        "samples_a_column": a_column,
        "runs": [_run(run, a_column) for run in runs],
    }


def alarms_shown(run: Summary) -> list[int]:
    """Which alarms are on the page: all, or the worst and among them the earliest ones."""
    order = sorted(range(len(run.alarms)), key=lambda at: (-_rank(run.alarms[at].severity), at))
    return sorted(order[:MOST_ALARMS])


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)


def _run(run: Summary, a_column: int) -> dict[str, Any]:
    places = {(site.site, site.index): at for at, site in enumerate(run.sites)}
    every = math.ceil(len(run.losses) / MOST_LOSSES) or 1
    return {
        "name": plain(run.name),
        "first": run.first_step,
        "last": run.last_step,
        "samples": run.samples.tolist() if a_column == 1 else None,
        "loss": [run.loss_steps[::every].tolist(), _plain(run.losses[::every])],
        "gaps": [
            [entry.first_step, entry.last_step]
            for entry in run.missing
            if entry.kind in ("gap", "damaged") and entry.first_step is not None
        ],
        "alarms": [
            {
                "step": alarm.step,
                "severity": alarm.severity if alarm.severity in SEVERITIES else SEVERITIES[-1],
                "text": plain(alarm.text),
                "site": places.get((alarm.site, alarm.index or 0)) if alarm.site is not None else None,
                "head": alarm.head,
                "name": plain(alarm.name),
            }
            for alarm in (run.alarms[at] for at in alarms_shown(run))
        ],
        "sites": [_site(site, a_column) for site in run.sites],
    }


def _site(site: Site, a_column: int) -> dict[str, Any]:
    starts = range(0, len(site.steps), a_column)
    values, medians = {}, {}
    for name in STATISTICS:
        cells = [_worst_of(site.values[name][start : start + a_column], name) for start in starts]
        values[name] = [_plain(row) for row in np.stack(cells, 1)] if cells else []
        every = site.median(name)
        medians[name] = _plain(np.array([_worst_of(every[start : start + a_column], name) for start in starts]))
    return {
        "label": plain(site.label),
        "heads": list(site.heads),
        "steps": [int(site.steps[min(start + a_column, len(site.steps)) - 1]) for start in starts],
        "values": values,  # by statistic and head
        "medians": medians,
    }


def _worst_of(values: Array, column: str) -> Any:
    """The worst along the first axis."""
    at = badness(values, column).argmax(0)
    return np.take_along_axis(values, np.expand_dims(at, 0), 0)[0]


def _plain(values: Array) -> list[float | str | None]:
    """Four digits; null where there is none, and words for infinities, which JSON does not have."""
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
