"""Everything that was not measured in a run, although a reader could assume that it was."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sqrtdk.messages import Message, joined
from sqrtdk.monitor.reading import Run
from sqrtdk.monitor.rows import how_of
from sqrtdk.monitor.samples import AS_IS, STEP_UNMEASURED, Alarm, place_and_reason, reason_unmeasured
from sqrtdk.report.watch.sites import Site
from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN, Array

MOST_NAMED = 5  # sites that are named for one reason; the rest is counted
MISSING = (
    *("damaged", "gap", "nothing", "steps", "calls", STEP_UNMEASURED, "absent"),
    *("blind_rows", "nan_rows", "inf_rows", "statistic", "loss"),
)  # kinds of what was not measured


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


def missing_parts(run: Run, sites: tuple[Site, ...], samples: Array, no_loss: int) -> Iterator[UnmeasuredEntry]:
    """Yield what the records of a run lack: parts, steps, samples, rows, statistics and losses.

    Args:
        run: The records.
        sites: The attentions in them.
        samples: Steps that were sampled.
        no_loss: Number of steps without a loss.
    """
    for part in run.damaged:
        yield UnmeasuredEntry("damaged", part.name, 1, part.first_step, part.last_step, part.reason)
    for gap in run.gaps:
        yield UnmeasuredEntry(
            "gap", str(gap.attempt), gap.last_step - gap.first_step + 1, gap.first_step, gap.last_step
        )
    # a run without samples looks healthy: nothing was seen that could alarm
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
        # checkpoints have no loss to record, so that its absence says nothing there
        never = no_loss == run.steps.num_rows and not run.of_checkpoints
        yield UnmeasuredEntry("loss", Message("watch.missing.pass_loss") if never else "", no_loss)


def noted_parts(alarms: Sequence[Alarm], how: Iterable[str]) -> Iterator[UnmeasuredEntry]:
    """Yield the places that the watch could not measure, grouped by the reason that it noted.

    Args:
        alarms: Alarms of the run; those named "step unmeasured" are read.
        how: Ways in which steps ran; reasons that concern whole steps are left out, as they are listed by these ways.
    """
    of_whole_steps = {reason_unmeasured(way) for way in how}
    places: dict[str, dict[str, None]] = defaultdict(dict)
    steps: dict[str, list[int]] = defaultdict(list)
    for alarm in alarms:
        if alarm.name == STEP_UNMEASURED and alarm.text not in of_whole_steps:
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
