"""Summarises a run's records for display: statistics by site over steps, and everything that is missing.

The records are untrusted: heads and sites are counted from the rows, and no array is sized by a number in the file.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sqrtdk._shown import Saved
from sqrtdk._sites import site_name
from sqrtdk.messages import Message, joined
from sqrtdk.monitor.reading import Run, of_checkpoints
from sqrtdk.monitor.rows import alarm_of, how_of
from sqrtdk.monitor.samples import AS_IS, EAGER, STEP_UNMEASURED, Alarm, place_and_reason, reason_unmeasured
from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN, Array, badness
from sqrtdk.store.lock import Writer

# Ascending, and equal to the audit's, which would import torch: a run is read without it.
SEVERITY_ORDER = ("note", "warn", "fail", "critical")
MOST_NAMED = 5  # sites that are named for one reason; the rest is counted
UPDATE_COLUMNS = ("learning_rate", "relative_step")
MISSING = (
    *("damaged", "gap", "nothing", "steps", "calls", STEP_UNMEASURED, "absent"),
    *("blind_rows", "nan_rows", "inf_rows", "statistic", "loss"),
)  # kinds of what was not measured


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One attention over all samples that contain it.

    Attributes:
        site: module path.
        index: index of the call at the site.
        heads: numbers of the heads.
        steps: (n,) int64, ascending.
        values: column of `STATISTIC_BY_COLUMN` -> (n, H) float64; NaN is "not measured".
        left_out: column -> number of rows that no statistic includes, such as "nan_rows".
    """

    site: str
    index: int
    heads: tuple[int, ...]
    steps: Array
    values: Mapping[str, Array]
    left_out: Mapping[str, int]

    @property
    def label(self) -> str:
        """The site, followed by the index unless it is the first call.

        Example:
            >>> Site("h.0", 1, (0,), np.array([1]), {}, {}).label, Site("", 0, (0,), np.array([1]), {}, {}).label
            ('h.0 #1', '(root)')
        """
        return site_name(self.site, self.index)

    def worst(self, column: str) -> tuple[Array, Array]:
        """Return each sample's worst head: its value (NaN if no head has one) and its place in `heads`."""
        values = self.values[column]
        at = badness(values, column).argmax(1)
        return values[np.arange(len(values)), at], at

    def median(self, column: str) -> Array:
        """Return each sample's median over the heads that have a value."""
        values = self.values[column]
        medians, some = np.full(len(values), math.nan), ~np.isnan(values).all(1)
        with np.errstate(invalid="ignore"):  # the median of plus and minus infinity is NaN
            medians[some] = np.nanmedian(values[some], axis=1)
        return medians


@dataclass(frozen=True, slots=True)
class UnmeasuredEntry:
    """Something that was not measured, although a reader could assume that it was.

    Attributes:
        kind: one of `MISSING`.
        what: the part, site or statistic; of a loss that is nowhere on record, the call that records it.
        count: the number of steps, samples or rows, depending on the kind.
        first_step: first step, if known.
        last_step: last step, if known.
        reason: the recorded reason.
    """

    kind: str
    what: str = ""
    count: int = 0
    first_step: int | None = None
    last_step: int | None = None
    reason: str = ""

    @property
    def message(self) -> Message:
        """All of this as a sentence.

        Example:
            >>> UnmeasuredEntry("absent", "h.0", 2, 10, 20).message
            'h.0: samples that it is not in: 2 (steps 10 to 20)'
        """
        first, last = self.first_step, self.last_step
        steps = ""
        if first is not None and last is not None:
            between = Message("watch.missing.steps_between", first=first, last=last)
            steps = Message("watch.missing.at_step", first=first) if first == last else between
        what, reason = self.what, self.reason
        id = "loss_never" if self.kind == "loss" and what else self.kind
        return Message(f"watch.missing.{id}", what=what, count=self.count, steps=steps, reason=reason)


@dataclass(frozen=True, slots=True, eq=False)
class Summary(Saved):
    """Everything that is shown of a run.

    Attributes:
        name: the folder, as the caller named it.
        model: the writer's description of the model.
        settings: settings of the watch.
        attempts: number of processes that wrote.
        recorded: number of steps on record.
        samples: (n,) int64, steps that were to be measured.
        how: number of samples that ran "as is", "eager", or were not measured, by reason.
        loss_steps: (n,) int64, steps with a loss.
        losses: (n,) float64; NaN means that the loss was NaN.
        sites: in the order of the first sample.
        alarms: in order of step, except alarms about missing measurements, which are in `missing`.
        missing: damaged parts, gaps, and everything else that was not measured.
        first_step: None if no step is on record.
        last_step: None if no step is on record.
        updates: column of the records ("learning_rate", "relative_step") -> (steps, values) where it is known.
        writer: whether the run is being written, see `writer_of`; "unknown" if the folder was not asked.
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
    missing: tuple[UnmeasuredEntry, ...]
    first_step: int | None
    last_step: int | None
    updates: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    writer: Writer = "unknown"

    @property
    def of_checkpoints(self) -> bool:
        """Whether the records were made from checkpoints."""
        return of_checkpoints(self.settings)

    @property
    def counts(self) -> dict[str, int]:
        """The number of alarms of each of `SEVERITY_ORDER`, worst first."""
        found = Counter(alarm.severity for alarm in self.alarms)
        return {severity: found[severity] for severity in reversed(SEVERITY_ORDER)}

    @property
    def lacks(self) -> bool:
        """Whether something is missing, apart from a statistic that some kernels lack and a loss never given."""
        return any(entry.kind not in ("statistic", "loss") for entry in self.missing)

    @property
    def lost_parts(self) -> tuple[UnmeasuredEntry, ...]:
        """The parts that can't be read: nobody knows whether an alarm was in them."""
        return tuple(entry for entry in self.missing if entry.kind == "damaged")

    def exit_code(self, fail_on: str) -> int:
        """Return 1 if an alarm is at `fail_on` or above, or if something is missing at "unmeasured", else 0.

        Missing measurements that the watch itself noted count at "note", as every note does. A part that can't be read
        counts at every bar but "never".
        """
        if fail_on == "never":
            return 0
        if self.lost_parts:
            return 1
        if fail_on == "note" and any(entry.kind == STEP_UNMEASURED for entry in self.missing):
            return 1
        if fail_on == "unmeasured":
            return int(bool(self.missing)) or self.exit_code("fail")
        bar = SEVERITY_ORDER.index(fail_on)
        # an unknown severity comes from a later version: count it as failing rather than call the run healthy
        return int(any(a.severity not in SEVERITY_ORDER[:bar] for a in self.alarms))


def way_run(how: str) -> str:
    """Return the words for how a step ran, a key of `Summary.how`."""
    ids = {AS_IS: "watch.how.as_is", EAGER: "watch.how.eager"}
    return Message(ids[how]) if how in ids else how


def rank(severity: str) -> int:
    """Return a severity's rank. An unknown one comes from a later version and ranks worst, to be on the safe side."""
    return SEVERITY_ORDER.index(severity) if severity in SEVERITY_ORDER else len(SEVERITY_ORDER)


def summarise(run: Run) -> Summary:
    """Return the summary of a run that was read."""
    steps, sampled = _numbers(run.steps, "step"), np.array(run.steps["sampled"].to_pylist(), dtype=bool)
    losses = _numbers(run.steps, "loss")
    # null means that no loss was given; NaN is a loss, and a bad one
    told = ~np.array(run.steps["loss"].is_null().to_pylist(), dtype=bool)
    # no text means that the model ran as it is
    how = Counter(how_of(row) or AS_IS for row in run.steps.to_pylist() if row["sampled"])
    sites = tuple(_sites(run))
    alarms = sorted(map(alarm_of, run.alarms.to_pylist()), key=lambda alarm: alarm.step)
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
        alarms=tuple(alarm for alarm in alarms if alarm.name != STEP_UNMEASURED),
        missing=(*_missing(run, sites, steps[sampled], len(steps) - int(told.sum())), *_noted(alarms, how)),
        first_step=int(steps[0]) if len(steps) else None,
        last_step=int(steps[-1]) if len(steps) else None,
        updates={name: _known(run, name) for name in UPDATE_COLUMNS},
    )


def _known(run: Run, column: str) -> tuple[Array, Array]:
    """Return steps and values of a column of the steps, where there is one."""
    there = ~np.array(run.steps[column].is_null().to_pylist(), dtype=bool)
    return _numbers(run.steps, "step")[there], _numbers(run.steps, column)[there]


def _numbers(table: Any, column: str) -> Array:
    numbers: Array = table[column].to_numpy()
    return numbers


def _sites(run: Run) -> Iterator[Site]:
    table = run.heads
    if not table.num_rows:
        return
    names = table["site"].combine_chunks().dictionary_encode()
    # group the rows by (site, index)
    keys = np.stack([names.indices.to_numpy(zero_copy_only=False), _numbers(table, "index")], 1)
    places, first, of = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    steps, heads = _numbers(table, "step"), _numbers(table, "head")
    columns = {name: _numbers(table, name) for name in STATISTIC_BY_COLUMN}
    order = np.argsort(of.reshape(-1), kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(of.reshape(-1)))[:-1])
    for place in np.argsort(first, kind="stable"):  # sites in the order of their first row
        rows = groups[place]
        own_steps, at_step = np.unique(steps[rows], return_inverse=True)
        own_heads, at_head = np.unique(heads[rows], return_inverse=True)
        values = {}
        for name, column in columns.items():
            # a head that has no row at a step stays NaN, "not measured"
            values[name] = np.full((len(own_steps), len(own_heads)), math.nan)
            values[name][at_step, at_head] = column[rows]
        left_out = {name: int(_numbers(table, name)[rows].sum()) for name in ("blind_rows", "nan_rows", "inf_rows")}
        number, index = places[place].tolist()
        yield Site(names.dictionary[number].as_py(), index, tuple(own_heads.tolist()), own_steps, values, left_out)


def _missing(run: Run, sites: tuple[Site, ...], samples: Array, no_loss: int) -> Iterator[UnmeasuredEntry]:
    for part in run.damaged:
        yield UnmeasuredEntry("damaged", part.name, 1, part.first_step, part.last_step, part.reason)
    for gap in run.gaps:
        yield UnmeasuredEntry(
            "gap", str(gap.attempt), gap.last_step - gap.first_step + 1, gap.first_step, gap.last_step
        )
    if not len(samples):
        yield UnmeasuredEntry("nothing", count=run.steps.num_rows)
    reasons: dict[str, list[int]] = defaultdict(list)
    failed, without = set(), []
    with_rows: Counter[int] = Counter()
    for site in sites:
        with_rows.update(site.steps.tolist())
    # a step that failed as a whole is told once, not again for each attention
    for row in run.steps.to_pylist():
        step = row["step"]
        if (reason := reason_unmeasured(how_of(row) or AS_IS)) is not None:
            reasons[reason].append(step)
            failed.add(step)
        elif number := row["unmeasured"] + max(0, row["calls"] - with_rows[step]):
            without.append((step, number))
    for reason, steps in reasons.items():
        yield UnmeasuredEntry("steps", "", len(steps), steps[0], steps[-1], reason)
    if without:
        yield UnmeasuredEntry("calls", "", sum(number for _, number in without), without[0][0], without[-1][0])
    for site in sites:
        absent = sorted(set(samples.tolist()) - set(site.steps.tolist()) - failed)
        if absent:
            yield UnmeasuredEntry("absent", site.label, len(absent), absent[0], absent[-1])
        for column, number in site.left_out.items():
            if number:
                yield UnmeasuredEntry(column, site.label, number)
    yield from _unread(sites, gradients=not run.of_checkpoints)
    if no_loss:
        never = no_loss == run.steps.num_rows and not run.of_checkpoints
        yield UnmeasuredEntry("loss", Message("watch.missing.pass_loss") if never else "", no_loss)


def _noted(alarms: Sequence[Alarm], how: Iterable[str]) -> Iterator[UnmeasuredEntry]:
    """Yield what the watch noted as unmeasured, grouped by reason. Reasons of whole steps are listed elsewhere."""
    told = {reason_unmeasured(way) for way in how}
    places: dict[str, dict[str, None]] = defaultdict(dict)
    steps: dict[str, list[int]] = defaultdict(list)
    for alarm in alarms:
        if alarm.name == STEP_UNMEASURED and alarm.text not in told:
            place, reason = place_and_reason(alarm.text)
            places[reason][place or Message("watch.missing.whole_run")] = None
            steps[reason].append(alarm.step)
    for reason, named in places.items():
        what = joined(list(named)[:MOST_NAMED], "comma")
        if len(named) > MOST_NAMED:
            what = Message("watch.missing.more_places", places=what, count=len(named) - MOST_NAMED)
        yield UnmeasuredEntry(STEP_UNMEASURED, what, len(named), steps[reason][0], steps[reason][-1], reason)


def _unread(sites: tuple[Site, ...], gradients: bool) -> Iterator[UnmeasuredEntry]:
    """Yield the statistics that some samples lack. Statistics missing at the same sites and steps share an entry."""
    columns: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    for column in (
        name for name, one in STATISTIC_BY_COLUMN.items() if one.always and (gradients or "_grad_" not in name)
    ):
        lacking = [(site, np.isnan(site.values[column]).all(1)) for site in sites]
        steps = [site.steps[none] for site, none in lacking if none.any()]
        if steps:
            first, last = (int(end(one for part in steps for one in part)) for end in (min, max))
            columns[len(steps), first, last].append(column)
    for (number, first, last), names in columns.items():
        yield UnmeasuredEntry("statistic", joined(names, "comma"), number, first, last)
