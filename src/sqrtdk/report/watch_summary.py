"""A run's records in the form in which they are shown: statistics by site over steps, and all that is missing.

The records are a stranger's: heads and sites are counted as they come, and nothing is sized by a number in them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sqrtdk._shown import Saved
from sqrtdk._sites import site_name
from sqrtdk.monitor.reading import Run
from sqrtdk.monitor.samples import AS_IS, NOT_MEASURED, UNMEASURED, Alarm
from sqrtdk.report.watch_statistics import STATISTICS, Array, badness

SEVERITIES = ("note", "warn", "fail", "critical")  # ascending
FAIL_ON = ("note", "warn", "unmeasured", "fail", "critical", "never")
MOST_NAMED = 5  # places of one reason


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One attention over the samples that it is in.

    Attributes:
        site: module path.
        index: of the call at the site.
        heads: their numbers.
        steps: (n,) int64, ascending.
        values: by column of `STATISTICS`, (n, H) float64; NaN is "not measured".
        left_out: rows that are in no statistic, by column of their count.
    """

    site: str
    index: int
    heads: tuple[int, ...]
    steps: Array
    values: Mapping[str, Array]
    left_out: Mapping[str, int]

    @property
    def label(self) -> str:
        """Site, and index where it is not the first call.

        Example:
            >>> Site("h.0", 1, (0,), np.array([1]), {}, {}).label, Site("", 0, (0,), np.array([1]), {}, {}).label
            ('h.0 #1', '(root)')
        """
        return site_name(self.site, self.index)

    def worst(self, column: str) -> tuple[Array, Array]:
        """Of each sample the value of the worst head, and its place in `heads`; NaN where no head has one."""
        values = self.values[column]
        at = badness(values, column).argmax(1)
        return values[np.arange(len(values)), at], at

    def median(self, column: str) -> Array:
        """Of each sample the median over heads, those without a value left out."""
        values = self.values[column]
        medians, some = np.full(len(values), math.nan), ~np.isnan(values).all(1)
        with np.errstate(invalid="ignore"):  # of plus and minus infinity
            medians[some] = np.nanmedian(values[some], axis=1)
        return medians


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that a reader could take for measured, and is not.

    Attributes:
        kind: a key of `watch_words.MISSING`.
        what: of which part, site or statistic.
        count: how many; of what, the kind says.
        first_step: where that is known.
        last_step: where that is known.
        reason: as it was recorded.
    """

    kind: str
    what: str = ""
    count: int = 0
    first_step: int | None = None
    last_step: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Summary(Saved):
    """A run.

    Attributes:
        name: the folder as it was named.
        model: as the writer described it.
        settings: of the watch.
        attempts: processes that wrote.
        recorded: steps on record.
        samples: (n,) int64, steps that were to be measured.
        how: how many of them ran "as is", "eager", or were not measured.
        loss_steps: (n,) int64, steps with a loss.
        losses: (n,) float64; NaN is what the loss was.
        sites: in the order of the first sample.
        alarms: in order of step; those that something was not measured are in `missing`.
        missing: damaged parts, gaps, and whatever else was not measured.
        first_step: None: there is no step.
        last_step: None: there is no step.
    """

    name: str
    model: Any
    settings: Any
    attempts: int
    recorded: int
    samples: Array
    how: Mapping[str, int]
    loss_steps: Array
    losses: Array
    sites: tuple[Site, ...]
    alarms: tuple[Alarm, ...]
    missing: tuple[Missing, ...]
    first_step: int | None
    last_step: int | None

    @property
    def counts(self) -> dict[str, int]:
        """Alarms by severity, all of `SEVERITIES`, the worst first."""
        found = Counter(alarm.severity for alarm in self.alarms)
        return {severity: found[severity] for severity in reversed(SEVERITIES)}

    def exit_code(self, fail_on: str) -> int:
        """1 where an alarm is at `fail_on` or above; at "unmeasured" also where something is missing.

        What the watch itself noted as not measured counts at "note", as every note does.
        """
        if fail_on == "never":
            return 0
        if fail_on == "note" and any(entry.kind == UNMEASURED for entry in self.missing):
            return 1
        if fail_on == "unmeasured":
            return int(bool(self.missing)) or self.exit_code("fail")
        bar = SEVERITIES.index(fail_on)
        # a severity that is not known is a later version's, and no reason to say that all is well
        return int(any(a.severity not in SEVERITIES[:bar] for a in self.alarms))


def rank(severity: str) -> int:
    """Place of a severity; one that is not known is a later version's, and no reason to say that all is well."""
    return SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)


def summarise(run: Run) -> Summary:
    """Make the summary of a run that was read."""
    steps, sampled = _numbers(run.steps, "step"), np.array(run.steps["sampled"].to_pylist(), dtype=bool)
    losses = _numbers(run.steps, "loss")
    told = ~np.array(run.steps["loss"].is_null().to_pylist(), dtype=bool)  # NaN is a loss, and bad news
    how = Counter((text or AS_IS) for text, is_one in zip(run.steps["how"].to_pylist(), sampled, strict=True) if is_one)
    sites = tuple(_sites(run))
    alarms = sorted((Alarm(**row) for row in run.alarms.to_pylist()), key=lambda alarm: alarm.step)
    return Summary(
        name=str(run.folder),
        model=run.model,
        settings=run.settings,
        attempts=len(run.attempts),
        recorded=len(steps),
        samples=steps[sampled],
        how=how,
        loss_steps=steps[told],
        losses=losses[told],
        sites=sites,
        alarms=tuple(alarm for alarm in alarms if alarm.name != UNMEASURED),
        missing=(*_missing(run, sites, steps[sampled], len(steps) - int(told.sum())), *_noted(alarms, how)),
        first_step=int(steps[0]) if len(steps) else None,
        last_step=int(steps[-1]) if len(steps) else None,
    )


def _numbers(table: Any, column: str) -> Array:
    numbers: Array = table[column].to_numpy()
    return numbers


def _sites(run: Run) -> Iterator[Site]:
    table = run.heads
    if not table.num_rows:
        return
    names = table["site"].combine_chunks().dictionary_encode()
    keys = np.stack([names.indices.to_numpy(zero_copy_only=False), _numbers(table, "index")], 1)
    places, first, of = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    steps, heads = _numbers(table, "step"), _numbers(table, "head")
    columns = {name: _numbers(table, name) for name in STATISTICS}
    order = np.argsort(of.reshape(-1), kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(of.reshape(-1)))[:-1])
    for place in np.argsort(first, kind="stable"):
        rows = groups[place]
        own_steps, at_step = np.unique(steps[rows], return_inverse=True)
        own_heads, at_head = np.unique(heads[rows], return_inverse=True)
        values = {}
        for name, column in columns.items():
            values[name] = np.full((len(own_steps), len(own_heads)), math.nan)
            values[name][at_step, at_head] = column[rows]
        left_out = {name: int(_numbers(table, name)[rows].sum()) for name in ("blind_rows", "nan_rows", "inf_rows")}
        number, index = places[place].tolist()
        yield Site(names.dictionary[number].as_py(), index, tuple(own_heads.tolist()), own_steps, values, left_out)


def _missing(run: Run, sites: tuple[Site, ...], samples: Array, no_loss: int) -> Iterator[Missing]:
    for part in run.damaged:
        yield Missing("damaged", part.name, 1, part.first_step, part.last_step, part.reason)
    for gap in run.gaps:
        yield Missing("gap", str(gap.attempt), gap.last_step - gap.first_step + 1, gap.first_step, gap.last_step)
    if not len(samples):
        yield Missing("nothing", count=run.steps.num_rows)
    reasons: dict[str, list[int]] = defaultdict(list)
    failed, without = set(), []
    with_rows: Counter[int] = Counter()
    for site in sites:
        with_rows.update(site.steps.tolist())
    for row in run.steps.to_pylist():
        step = row["step"]
        if row["how"] and row["how"].startswith(NOT_MEASURED):
            reasons[row["how"].removeprefix(NOT_MEASURED)].append(step)
            failed.add(step)
        elif number := row["unmeasured"] + max(0, row["calls"] - with_rows[step]):
            without.append((step, number))
    for reason, steps in reasons.items():
        yield Missing("steps", "", len(steps), steps[0], steps[-1], reason)
    if without:
        yield Missing("calls", "", sum(number for _, number in without), without[0][0], without[-1][0])
    for site in sites:
        absent = sorted(set(samples.tolist()) - set(site.steps.tolist()) - failed)
        if absent:
            yield Missing("absent", site.label, len(absent), absent[0], absent[-1])
        for column, number in site.left_out.items():
            if number:
                yield Missing(column, site.label, number)
    yield from _unread(sites, gradients=not run.of_checkpoints)
    if no_loss:
        yield Missing("loss", "", no_loss)


def _noted(alarms: Sequence[Alarm], how: Iterable[str]) -> Iterator[Missing]:
    """What the watch noted as not measured, places with one reason together; that of whole steps is told with them."""
    told = {text.removeprefix(NOT_MEASURED) for text in how}
    places: dict[str, dict[str, None]] = defaultdict(dict)
    steps: dict[str, list[int]] = defaultdict(list)
    for alarm in alarms:
        if alarm.name == UNMEASURED and alarm.text not in told:
            place, colon, reason = alarm.text.partition(": ")
            reason, place = (reason, place) if colon else (alarm.text, "(run)")
            places[reason][place] = None
            steps[reason].append(alarm.step)
    for reason, named in places.items():
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        what = ", ".join(list(named)[:MOST_NAMED]) + more
        yield Missing(UNMEASURED, what, len(named), steps[reason][0], steps[reason][-1], reason)


def _unread(sites: tuple[Site, ...], gradients: bool) -> Iterator[Missing]:
    """Statistics that some samples of some sites lack; those that lack the same ones in one entry."""
    columns: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    for column in (name for name, one in STATISTICS.items() if one.always and (gradients or "_grad_" not in name)):
        lacking = [(site, np.isnan(site.values[column]).all(1)) for site in sites]
        steps = [site.steps[none] for site, none in lacking if none.any()]
        if steps:
            first, last = (int(end(one for part in steps for one in part)) for end in (min, max))
            columns[len(steps), first, last].append(column)
    for (number, first, last), names in columns.items():
        yield Missing("statistic", ", ".join(names), number, first, last)
