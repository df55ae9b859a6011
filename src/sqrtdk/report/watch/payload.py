"""Prepares the data that the script of a run's page draws, small enough for a browser.

Numbers are stored as float16 with one power of two for each series. That keeps three digits; values below 1e-12 of the
largest become 0. All numbers form one block, high bytes before low bytes, deflated and in base64: about two bytes each.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from sqrtdk.messages import unfilled
from sqrtdk.report.json_values import pair, rounded
from sqrtdk.report.plain import plain
from sqrtdk.report.watch.sites import Site
from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN, Array, badness
from sqrtdk.report.watch.summary import SEVERITY_ORDER, Summary, rank

MOST_COLUMNS = 240  # columns of a site's map; with more samples, several share a column
MOST_CELLS_OF_PAGE = 600_000  # cells of all maps on a page
MOST_NUMBERS_OF_PAGE = 4_500_000  # values of single heads on a page: about 8 MB
MOST_LOSSES = 2000
_LOSS_DIGITS = 4  # of losses and of the ends of a scale
MOST_ALARMS_OF_PAGE = 400
_NOBODY = 0xFFFF  # index of the worst head if no head has a value
_TOP = 14  # the largest value of a series is scaled to 2^14..2^15; float16 ends at 65504, just below 2^16


class NumberBlock:
    """A block of little-endian 16-bit numbers that holds all series of a page."""

    def __init__(self) -> None:
        self._parts: list[Array] = []
        self._size = 0

    def numbers(self, values: Array) -> list[int]:
        """Append values as float16; NaN and infinities are kept.

        Returns:
            Offset, length and exponent: value = float16 * 2 ** exponent. A constant series is stored with length 1.
        """
        finite = np.abs(values[np.isfinite(values)])
        largest = float(finite.max(initial=0.0))
        # frexp(x) = (m, e) with 0.5 <= m < 1 and x = m * 2^e, so this brings the largest value to 2^14..2^15
        exponent = math.frexp(largest)[1] - 1 - _TOP if largest else 0
        with np.errstate(invalid="ignore", under="ignore"):
            short = np.ldexp(values.astype(np.float64), -exponent).astype("<f2")
        return [*self.whole(short.view("<u2")), exponent]

    def whole(self, values: Array) -> list[int]:
        """Append whole numbers from 0 to 65535.

        Returns:
            [offset, length] of the numbers in the block. A constant series is stored as one number, with length 1.
        """
        flat = values.astype("<u2").ravel()
        # a constant series, as of a fixed scale, costs one number
        if flat.size and (flat == flat[0]).all():
            flat = flat[:1]
        self._parts.append(flat)
        self._size += flat.size
        return [self._size - flat.size, flat.size]

    def text(self) -> str:
        """Return all numbers that were added as text, for the page's script to decode.

        These are first the high bytes of all numbers, then the low bytes, compressed by zlib and written in base64.
        """
        pairs = np.concatenate([np.empty(0, "<u2"), *self._parts]).view(np.uint8).reshape(-1, 2)
        planes = np.ascontiguousarray(pairs[:, ::-1].T).tobytes()  # high bytes are alike and compress well together
        return base64.b64encode(zlib.compress(planes)).decode()


def watch_page_data(runs: Sequence[Summary], by: str = "name") -> dict[str, Any]:
    """Return the data for the page's script, JSON-ready, with every text passed through `plain`.

    Several samples may share a column of a map or a point of a trend (`samples_a_column`, `samples_a_point`). Each head
    then keeps its worst value.

    Args:
        runs: one or several runs.
        by: how the attentions of two runs were matched, "name" or "order".
    """
    samples = max((len(site.steps) for run in runs for site in run.sites), default=1)
    cells = sum(len(site.steps) for run in runs for site in run.sites) * len(STATISTIC_BY_COLUMN)
    numbers = sum(len(site.steps) * len(site.heads) for run in runs for site in run.sites) * len(STATISTIC_BY_COLUMN)
    # the least thinning that keeps columns, cells and numbers of the page within their limits
    a_column = math.ceil(max(samples / MOST_COLUMNS, cells / MOST_CELLS_OF_PAGE, 1))
    a_point = max(a_column, math.ceil(numbers / MOST_NUMBERS_OF_PAGE))
    block = NumberBlock()
    short = short_names([run.name for run in runs])
    drawn = [_run(run, a_column, a_point, block) | {"short": plain(of)} for run, of in zip(runs, short, strict=True)]
    return {
        "by": by,
        "words": {key: pair(words) for key, words in unfilled("watch.script").items()},
        "columns": list(STATISTIC_BY_COLUMN),
        "statistics": {
            name: {
                "worst": one.worst,
                "unit": one.unit,
                "of": pair(one.unit_name),
                "name": pair(one.name),
                "ends": _ends(runs, name),
            }
            for name, one in STATISTIC_BY_COLUMN.items()
        },
        "samples_a_column": a_column,
        "samples_a_point": a_point,
        "runs": drawn,
        "block": block.text(),
    }


def alarms_shown(run: Summary) -> list[int]:
    """Return the indices, in ascending order, of the alarms on the page.

    These are the worst `MOST_ALARMS_OF_PAGE`; among equals, the earliest.
    """
    # the worst ones stay, and the page shows them in the order of their steps
    order = sorted(range(len(run.alarms)), key=lambda at: (-rank(run.alarms[at].severity), at))
    return sorted(order[:MOST_ALARMS_OF_PAGE])


def short_names(folders: Sequence[str]) -> list[str]:
    """Return the ends of the paths of runs, as many parts of each as tell all of them apart.

    Example:
        >>> short_names(["runs/lr1/seed0", "runs/lr2/seed0"]), short_names(["a/exp1", "b/exp2"])
        (['lr1/seed0', 'lr2/seed0'], ['exp1', 'exp2'])
    """
    parts = [PurePath(folder).parts for folder in folders]
    for count in range(1, max(map(len, parts), default=1)):
        ends = ["/".join(one[-count:]) for one in parts]
        if len(set(ends)) == len(ends):
            return ends
    return list(folders)


def _run(run: Summary, a_column: int, a_point: int, block: NumberBlock) -> dict[str, Any]:
    """Return the data of a run for the page; its series are appended to `block`.

    Args:
        run: The run.
        a_column: Number of samples that share a column of a heat map; of them, the worst is shown.
        a_point: Number of samples that share a point of a curve.
        block: The numbers of the page.
    """
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
                "severity": alarm.severity if alarm.severity in SEVERITY_ORDER else SEVERITY_ORDER[-1],
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
    """Return steps and losses. Steps that share a point keep a non-finite loss, or else the largest."""
    every = math.ceil(len(run.losses) / MOST_LOSSES) or 1
    bad = np.where(np.isfinite(run.losses), run.losses, math.inf)  # NaN ranks with the infinities: argmax picks it
    places = [start + int(bad[start : start + every].argmax()) for start in range(0, len(bad), every)]
    return [run.loss_steps[places].tolist(), [rounded(value, _LOSS_DIGITS) for value in run.losses[places].tolist()]]


def _site(site: Site, a_column: int, a_point: int, block: NumberBlock) -> dict[str, Any]:
    """Return the data of one attention for the page; `_run` describes the arguments."""
    worst, who, medians, values = {}, {}, {}, {}
    for name in STATISTIC_BY_COLUMN:
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
        "values": values,  # by statistic: all points of the first head, then all points of the next
    }


def _ends(runs: Sequence[Summary], column: str) -> list[Any] | None:
    """Return the least and the largest value that a map shows, finite if any is; None if nothing was measured.

    The script can't tell: its numbers have three digits, which made 8190 of the 8192 in an alarm.
    """
    every = np.concatenate([np.empty(0), *(site.worst(column)[0] for run in runs for site in run.sites)])
    known = every[~np.isnan(every)]
    shown = known[np.isfinite(known)] if np.isfinite(known).any() else known
    return [rounded(float(end), _LOSS_DIGITS) for end in (shown.min(), shown.max())] if len(shown) else None


def _last_of(steps: Array, a_column: int) -> list[int]:
    return [int(steps[min(start + a_column, len(steps)) - 1]) for start in range(0, len(steps), a_column)]


def _thinned(values: Array, column: str, a_column: int) -> Array:
    """Return the worst of every `a_column` values along the first axis."""
    if a_column == 1:
        return values
    cells = [values[start : start + a_column] for start in range(0, len(values), a_column)]
    places = [np.expand_dims(badness(cell, column).argmax(0), 0) for cell in cells]
    return np.stack([np.take_along_axis(cell, at, 0)[0] for cell, at in zip(cells, places, strict=True)])
