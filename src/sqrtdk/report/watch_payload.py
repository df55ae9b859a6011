"""The data that the page of a run draws with its own script, no larger than a browser likes.

Numbers are float16 with a power of two for each series: three digits, and 0 for less than 1e-12 of the largest.
They are one block, its high bytes before its low ones, deflated, in base64: about two bytes of the page each.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from sqrtdk.report.plain import plain
from sqrtdk.report.watch_statistics import STATISTICS, Array, badness
from sqrtdk.report.watch_summary import SEVERITIES, Site, Summary, rank

MOST_COLUMNS = 240  # samples of a site that are drawn next to each other
MOST_CELLS = 600_000  # of all maps of a page
MOST_NUMBERS = 4_500_000  # values of single heads on a page: about 8 MB
MOST_LOSSES = 2000
MOST_ALARMS = 400
_NOBODY = 0xFFFF  # the worst head where no head has a value
_TOP = 14  # exponent to which the largest value of a series is brought


class Block:
    """Series of 16 bits, one after the other."""

    def __init__(self) -> None:
        self._parts: list[Array] = []
        self._size = 0

    def numbers(self, values: Array) -> list[int]:
        """Keep values; NaN and infinities stay what they are.

        Returns:
            Offset, length and exponent: value = float16 * 2 ** exponent. Equal values are kept once, with length 1.
        """
        finite = np.abs(values[np.isfinite(values)])
        largest = float(finite.max(initial=0.0))
        exponent = math.frexp(largest)[1] - 1 - _TOP if largest else 0
        with np.errstate(invalid="ignore", under="ignore"):
            short = np.ldexp(values.astype(np.float64), -exponent).astype("<f2")
        return [*self.whole(short.view("<u2")), exponent]

    def whole(self, values: Array) -> list[int]:
        """Keep numbers from 0 to 65535: offset and length."""
        flat = values.astype("<u2").ravel()
        if flat.size and (flat == flat[0]).all():
            flat = flat[:1]
        self._parts.append(flat)
        self._size += flat.size
        return [self._size - flat.size, flat.size]

    def text(self) -> str:
        """All of it, as the page has it."""
        pairs = np.concatenate([np.empty(0, "<u2"), *self._parts]).view(np.uint8).reshape(-1, 2)
        planes = np.ascontiguousarray(pairs[:, ::-1].T).tobytes()  # high bytes are much alike
        return base64.b64encode(zlib.compress(planes)).decode()


def payload(runs: Sequence[Summary], by: str = "name") -> dict[str, Any]:
    """Return what the page's script needs, as JSON-ready data in which every text is made visible.

    Of samples that share a column of a map, or a point of the trend of a head, the worst value of each head is kept;
    `samples_a_column` and `samples_a_point` say how many they are.

    Args:
        runs: one, or some.
        by: how the attentions of two runs were matched, "name" or "order".
    """
    samples = max((len(site.steps) for run in runs for site in run.sites), default=1)
    cells = sum(len(site.steps) for run in runs for site in run.sites) * len(STATISTICS)
    numbers = sum(len(site.steps) * len(site.heads) for run in runs for site in run.sites) * len(STATISTICS)
    a_column = math.ceil(max(samples / MOST_COLUMNS, cells / MOST_CELLS, 1))
    a_point = max(a_column, math.ceil(numbers / MOST_NUMBERS))
    block = Block()
    drawn = [_run(run, a_column, a_point, block) for run in runs]
    return {
        "by": by,
        "columns": list(STATISTICS),
        "statistics": {
            name: {
                "worst": one.worst,
                "unit": one.unit,
                "of": [one.of.en, one.of.zh],
                "name": [one.name.en, one.name.zh],
            }
            for name, one in STATISTICS.items()
        },
        "samples_a_column": a_column,
        "samples_a_point": a_point,
        "runs": drawn,
        "block": block.text(),
    }


def alarms_shown(run: Summary) -> list[int]:
    """Which alarms are on the page: all, or the worst and among them the earliest ones."""
    order = sorted(range(len(run.alarms)), key=lambda at: (-rank(run.alarms[at].severity), at))
    return sorted(order[:MOST_ALARMS])


def _run(run: Summary, a_column: int, a_point: int, block: Block) -> dict[str, Any]:
    places = {(site.site, site.index): at for at, site in enumerate(run.sites)}
    return {
        "name": plain(run.name),
        "first": run.first_step,
        "last": run.last_step,
        "samples": run.samples.tolist() if a_column == 1 else None,
        "loss": _losses(run),
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
        "sites": [_site(site, a_column, a_point, block) for site in run.sites],
    }


def _losses(run: Summary) -> list[list[Any]]:
    """Steps and losses; of those that share a place one that is not finite, or else the largest."""
    every = math.ceil(len(run.losses) / MOST_LOSSES) or 1
    bad = np.where(np.isfinite(run.losses), run.losses, math.inf)
    places = [start + int(bad[start : start + every].argmax()) for start in range(0, len(bad), every)]
    return [run.loss_steps[places].tolist(), [_short(value) for value in run.losses[places].tolist()]]


def _site(site: Site, a_column: int, a_point: int, block: Block) -> dict[str, Any]:
    worst, who, medians, values = {}, {}, {}, {}
    for name in STATISTICS:
        cells = _thinned(site.values[name], name, a_column)
        badnesses = badness(cells, name)
        at = badnesses.argmax(1)
        worst[name] = block.numbers(cells[np.arange(len(cells)), at])
        who[name] = block.whole(np.where(np.isneginf(badnesses.max(1)) & np.isnan(cells).all(1), _NOBODY, at))
        medians[name] = block.numbers(_thinned(site.median(name), name, a_column))
        values[name] = block.numbers(_thinned(site.values[name], name, a_point).T)
    return {
        "label": plain(site.label),
        "heads": list(site.heads),
        "steps": _last_of(site.steps, a_column),
        "worst": worst,  # by statistic
        "who": who,
        "medians": medians,
        "points": _last_of(site.steps, a_point) if a_point > a_column else None,
        "values": values,  # by statistic: all points of the first head, then those of the next
    }


def _last_of(steps: Array, a_column: int) -> list[int]:
    return [int(steps[min(start + a_column, len(steps)) - 1]) for start in range(0, len(steps), a_column)]


def _thinned(values: Array, column: str, a_column: int) -> Array:
    """Of so many along the first axis the worst."""
    if a_column == 1:
        return values
    cells = [values[start : start + a_column] for start in range(0, len(values), a_column)]
    places = [np.expand_dims(badness(cell, column).argmax(0), 0) for cell in cells]
    return np.stack([np.take_along_axis(cell, at, 0)[0] for cell, at in zip(cells, places, strict=True)])


def _short(value: float) -> float | str | None:
    """Four digits; null where there is none, and words for infinities, which JSON does not have."""
    if math.isnan(value):
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
