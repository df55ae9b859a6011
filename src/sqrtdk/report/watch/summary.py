"""Summarises a run's records for display: statistics by site over steps, and everything that is missing.

The records are untrusted: heads and sites are counted from the rows, and no array is sized by a number in the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sqrtdk._shown import Saved
from sqrtdk.messages import Message, joined, named
from sqrtdk.monitor.reading import Run, of_checkpoints
from sqrtdk.monitor.rows import alarm_of, how_of
from sqrtdk.monitor.samples import AS_IS, EAGER, STEP_UNMEASURED, Alarm
from sqrtdk.report.figures import format_number
from sqrtdk.report.watch.missing import UnmeasuredEntry, missing_parts, noted_parts
from sqrtdk.report.watch.sites import Site, column_numbers, sites_of
from sqrtdk.report.watch.statistics import Array
from sqrtdk.store.lock import Writer

# Ascending, and equal to the audit's, which would import torch: a run is read without it.
SEVERITY_ORDER = ("note", "warn", "fail", "critical")
UPDATE_COLUMNS = ("learning_rate", "relative_step")


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
        """Whether the records were made from saved checkpoints, rather than during training."""
        return of_checkpoints(self.settings)

    @property
    def counts(self) -> dict[str, int]:
        """Number of alarms by severity, for each of `SEVERITY_ORDER`, worst first."""
        counted = Counter(alarm.severity for alarm in self.alarms)
        return {severity: counted[severity] for severity in reversed(SEVERITY_ORDER)}

    @property
    def lacks(self) -> bool:
        """Whether something is missing that should be there.

        A statistic that some kernels can't give, and a loss that was never passed to the watch, are not counted.
        """
        return any(entry.kind not in ("statistic", "loss") for entry in self.missing)

    @property
    def lost_parts(self) -> tuple[UnmeasuredEntry, ...]:
        """The parts of the records that can't be read; it is unknown whether an alarm was in them."""
        return tuple(entry for entry in self.missing if entry.kind == "damaged")

    def exit_code(self, fail_on: str) -> int:
        """Return 1 if an alarm is at `fail_on` or above, or if something is missing at "unmeasured", else 0.

        Missing measurements that the watch itself noted count at "note", as every note does. A part that can't be read
        counts at every bar but "never".
        """
        if fail_on == "never":
            return 0
        # an alarm may have stood in the part that is lost
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
    """Return the words for how a step ran.

    Args:
        how: A key of `Summary.how`: as it is, in eager mode because it was compiled, or the reason for not measuring.
    """
    ids = {AS_IS: "watch.how.as_is", EAGER: "watch.how.eager"}
    return Message(ids[how]) if how in ids else how


def samples_with(way: str, count: int) -> Message:
    """Return a sentence that says how many samples of a run were measured in one way.

    Args:
        way: A key of `Summary.how`, such as "eager".
        count: Number of the samples.
    """
    return Message("watch.terminal.samples_with", count=count, what=way_run(way))


def alarms_with(severity: str, count: int) -> Message:
    """Return a sentence that says how many alarms have a severity.

    Args:
        severity: One of `SEVERITY_ORDER`.
        count: Number of the alarms.
    """
    return Message("watch.terminal.alarms_with", count=count, what=named("words.severity", severity))


def rank(severity: str) -> int:
    """Return the rank of a severity, 0 for the mildest.

    A severity that is unknown comes from a later version, and ranks worst to be on the safe side.

    Example:
        >>> rank("note") < rank("critical") < rank("a later one")
        True
    """
    return SEVERITY_ORDER.index(severity) if severity in SEVERITY_ORDER else len(SEVERITY_ORDER)


def summarise(run: Run) -> Summary:
    """Return what the page and the terminal show of a run: its steps, losses, attentions, alarms and what is missing.

    Args:
        run: Records as `sqrtdk.monitor.reading.read_run` returns them.
    """
    steps, sampled = column_numbers(run.steps, "step"), np.array(run.steps["sampled"].to_pylist(), dtype=bool)
    losses = column_numbers(run.steps, "loss")
    # null means that no loss was given; NaN is a loss, and a bad one
    with_loss = ~np.array(run.steps["loss"].is_null().to_pylist(), dtype=bool)
    # no text means that the model ran as it is
    how = Counter(how_of(row) or AS_IS for row in run.steps.to_pylist() if row["sampled"])
    sites = tuple(sites_of(run))
    alarms = sorted(map(alarm_of, run.alarms.to_pylist()), key=lambda alarm: alarm.step)
    return Summary(
        name=str(run.folder),
        model=run.model,
        settings=run.settings,
        attempts=len(run.attempts),
        recorded=len(steps),
        samples=steps[sampled],
        how=how,
        loss_steps=steps[with_loss],
        losses=losses[with_loss],
        sites=sites,
        alarms=tuple(alarm for alarm in alarms if alarm.name != STEP_UNMEASURED),
        missing=(
            *missing_parts(run, sites, steps[sampled], no_loss=int((~with_loss).sum())),
            *noted_parts(alarms, how),
        ),
        first_step=int(steps[0]) if len(steps) else None,
        last_step=int(steps[-1]) if len(steps) else None,
        updates={name: _known(run, name) for name in UPDATE_COLUMNS},
    )


def update_sentence(summary: Summary) -> str | None:
    """Say how far a step moves the weights that give q and k, and with which learning rate; None if neither is known.

    Args:
        summary: The run.
    """
    nothing = np.empty(0), np.empty(0)
    steps, ratios = summary.updates.get("relative_step", nothing)
    at, rates = summary.updates.get("learning_rate", nothing)
    said: list[str] = []
    if len(ratios):
        # two digits at any size: at a rate of 1e-5 a step moves weights by 0.01%
        first, newest = (f"{format_number(100 * float(one), 2)}%" for one in (ratios[0], ratios[-1]))
        ends = {"first": first, "newest": newest}
        said.append(Message("watch.terminal.update", step=int(steps[0]), last=int(steps[-1]), **ends))
    if not len(rates):
        return joined([*said, Message("watch.terminal.no_rate")]) if said else None
    first, newest, most = (format_number(float(one)) for one in (rates[0], rates[-1], rates.max()))
    if first == newest == most:
        said.append(Message("watch.terminal.rate", rate=first))
    else:
        ends = {"first": first, "newest": newest, "most": most}
        said.append(Message("watch.terminal.rates", step=int(at[0]), last=int(at[-1]), **ends))
    return joined(said)


def _known(run: Run, column: str) -> tuple[Array, Array]:
    """Return steps and values of a column of the steps, where there is one."""
    there = ~np.array(run.steps[column].is_null().to_pylist(), dtype=bool)
    return column_numbers(run.steps, "step")[there], column_numbers(run.steps, column)[there]
