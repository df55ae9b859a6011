"""The records of a run from the results of its checkpoints: rows in order of step, alarms over the whole series.

The records follow from the results alone. They are computed anew each time, and only what differs from the existing
records is written.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqrtdk.audit.records import SEVERITIES, Finding
from sqrtdk.errors import OutputError
from sqrtdk.messages import Message
from sqrtdk.models.build import lacks_weights
from sqrtdk.monitor.alarms import ALARM_RULES, fresh, holding
from sqrtdk.monitor.checkpoints._find import Checkpoint
from sqrtdk.monitor.checkpoints._measure import Result
from sqrtdk.monitor.folder import RunWriter, refuse_other_files
from sqrtdk.monitor.journal import head_table
from sqrtdk.monitor.names import PARTS_FOLDER, PartName
from sqrtdk.monitor.reading import OF_CHECKPOINTS, of_checkpoints, read_run
from sqrtdk.monitor.rows import alarm_row, how_row
from sqrtdk.monitor.samples import Alarm, StepSample, not_measured
from sqrtdk.monitor.tables import Table, Tables, stacked, tables_from_rows
from sqrtdk.store import disk
from sqrtdk.store.manifest import RUN, plain_json, read_manifest

CHECKPOINT_ALARM = "checkpoint"  # name of the alarms that belong to no rule of a watch or of the audit
_UNMEASURED_SOURCE = "alarms.source.unmeasured"
_HEADS_A_PART = 2**16  # heads in one part file; a single checkpoint may have more


@dataclass(frozen=True, slots=True)
class Point:
    """One checkpoint of a run with what was measured of it.

    Attributes:
        checkpoint: Where it is, and its step.
        result: What was measured.
        time: When its newest file was written, in seconds since 1970.
    """

    checkpoint: Checkpoint
    result: Result
    time: float


@dataclass(slots=True)
class StepRows:
    """The rows of one step in each table of the records.

    Attributes:
        step: The row of the table of steps, by column.
        heads: A pyarrow table with one row for each head.
        alarms: Rows of the table of alarms, by column.
    """

    step: dict[str, Any]
    heads: Table
    alarms: list[dict[str, Any]]


@dataclass(slots=True)
class _Series:
    """The earlier checkpoints, and the alarms and findings reported for them."""

    samples: list[StepSample] = field(default_factory=list)
    reported: list[Alarm] = field(default_factory=list)
    findings: dict[tuple[str, ...], int] = field(default_factory=dict)
    newest: Point | None = None  # the last one that was measured


def step_rows(points: Sequence[Point]) -> Iterator[StepRows]:
    """Yield the rows of each step of a run.

    Args:
        points: in order of step.
    """
    series = _Series()
    for point in points:
        alarms, how, calls, unmeasured, heads = list(_alarms_of(point, series)), "", 0, 1, stacked("heads", [])
        sample = point.result.sample
        if sample is None:
            how = not_measured(point.result.reason or Message("alarms.checkpoint.no_reason"))
        else:
            how, calls, unmeasured, heads = sample.how, len(sample.measured), sample.unmeasured, head_table(sample)
        step: dict[str, Any] = {
            "step": point.checkpoint.step,
            "sampled": True,
            "loss": point.result.loss,
            "time": point.time,
        }
        step |= how_row(how) | {"calls": calls, "unmeasured": unmeasured}
        yield StepRows(step, heads, [alarm_row(alarm) for alarm in alarms])


def model_of_run(points: Sequence[Point]) -> Any:
    """Return the model's description for the records, from the first checkpoint that could be measured.

    If none could, it is `{"class": "unknown"}`.
    """
    return next((point.result.model for point in points if point.result.sample is not None), {"class": "unknown"})


def notes_of(points: Sequence[Point]) -> list[str]:
    """Return the notes on what sqrtdk decided for the user (random ids, another dtype), each once."""
    notes = (note for point in points for note in point.result.notes)
    return list(dict.fromkeys(note for note in notes if not lacks_weights(note)))


def _alarms_of(point: Point, series: _Series) -> Iterator[Alarm]:
    """Yield the alarms of a checkpoint: what was not measured, the watch's alarms, and the audit's findings."""
    result, step = point.result, point.checkpoint.step
    name = point.checkpoint.path.name
    if result.state:
        text = Message("alarms.checkpoint.losses", name=name, why=result.state)
        yield Alarm(CHECKPOINT_ALARM, "note", step, text, Message(_UNMEASURED_SOURCE))
    if result.sample is None:
        why = result.reason or Message("alarms.checkpoint.no_reason")
        yield Alarm(
            CHECKPOINT_ALARM,
            "fail",
            step,
            Message("alarms.checkpoint.failed", name=name, why=why),
            Message(_UNMEASURED_SOURCE),
        )
        return
    for note in result.notes:
        if lacks_weights(note):
            text = Message("alarms.checkpoint.absent", name=name, note=note)
            yield Alarm(CHECKPOINT_ALARM, "warn", step, text, Message(_UNMEASURED_SOURCE))
    if series.newest is not None and (other := _difference(series.newest, point)):
        yield Alarm(CHECKPOINT_ALARM, "warn", step, other, Message("alarms.source.comparable"))
    holds = holding(series.samples, result.sample)
    found = fresh(holds, series.reported)
    series.samples.append(result.sample)
    series.reported += found
    series.newest = point
    yield from found
    worst: dict[str, int] = defaultdict(lambda: -1)
    for alarm in holds:
        worst[alarm.name] = max(worst[alarm.name], SEVERITIES.index(alarm.severity))
    for finding in result.findings:
        kind = finding.rule, finding.site, finding.fix
        level = SEVERITIES.index(finding.severity)
        twice = (
            finding.rule in ALARM_RULES and worst[finding.rule] >= level
        )  # the watch has this rule too, and reported it
        if not twice and level > series.findings.get(kind, -1):
            series.findings[kind] = level
            yield _alarm(finding, step)


def _alarm(finding: Finding, step: int) -> Alarm:
    value, bar = (one if isinstance(one, float | int) else None for one in (finding.value, finding.threshold))
    site, sentence = finding.site or Message("alarms.place.model"), finding.message
    text = Message("alarms.checkpoint.finding", site=site, text=sentence, step=step)
    if finding.fix:
        text = Message("alarms.checkpoint.finding_and_fix", site=site, text=sentence, step=step, fix=finding.fix)
    return Alarm(finding.rule, finding.severity, step, text, finding.source, finding.site or None, value=value, bar=bar)


def _difference(before: Point, now: Point) -> str:
    """Return why the numbers of two checkpoints can't be compared; "" if they can."""
    here, step, there = now.checkpoint.path.name, now.checkpoint.step, before.checkpoint.path.name
    if before.result.model != now.result.model:
        one, other = now.result.model, before.result.model
        return Message(
            "alarms.checkpoint.other_model",
            name=here,
            step=step,
            cls=str(one.get("class")),
            number=str(one.get("parameters")),
            other=there,
            other_cls=str(other.get("class")),
            other_number=str(other.get("parameters")),
        )
    if before.result.inputs != now.result.inputs:
        return Message("alarms.checkpoint.other_inputs", name=here, step=step, other=there)
    return ""


# -- the folder ---------------------------------------------------------------------------------------------------


def refuse_other(folder: Path) -> None:
    """Check that a folder is empty or holds the records of checkpoints.

    Raises:
        OutputError: The folder holds a watched run, or no run at all.
        RunFolderError: Its run.json is damaged.
    """
    if not os.path.lexists(folder / RUN):
        if folder.is_dir():
            refuse_other_files(folder)
    elif not all(of_checkpoints(one.settings) for one in read_manifest(folder).attempts):
        raise OutputError(
            f"{folder} holds a run that was watched while it trained, which is not written over",
            hint="Choose another --output.",
        )


def write_run(folder: Path, points: Sequence[Point], settings: dict[str, Any]) -> None:
    """Bring the folder of a run up to date; existing rows that are still right stay as they are.

    Args:
        folder: of the run.
        points: in order of step, at least one.
        settings: of the run.

    Raises:
        OutputError: It can't be written, or see `refuse_other`.
    """
    refuse_other(folder)
    model, rows = model_of_run(points), list(step_rows(points))
    first = None
    if os.path.lexists(folder / RUN):
        if read_manifest(folder).model != plain_json(model, "the model"):
            _forget(folder)
        else:
            there = _by_step(_tables(folder))
            first = _first_other(there, _by_step(_from(rows)))
            if first is None:
                return
    with RunWriter(folder, model=model, settings=OF_CHECKPOINTS | settings, first_step=first) as writer:
        for part in _parts([one for one in rows if one.step["step"] >= writer.first_step]):
            writer.write(stacked("heads", [one.heads for one in part]), [one.step for one in part], _alarms(part))


def forget_renamed(output: Path, folders: Mapping[Path, Path]) -> None:
    """Remove the records of runs whose folder has another name now, as more runs need longer names.

    Args:
        output: parent of all folders.
        folders: the folder of each run.
    """
    for there in (output, *sorted(path for path in output.iterdir() if path.is_dir())):
        if there in folders.values() or not os.path.lexists(there / RUN):
            continue
        settings = [attempt.settings for attempt in read_manifest(there).attempts]
        if settings and all(of_checkpoints(one) and one.get("run") in map(str, folders) for one in settings):
            _forget(there)


def _forget(folder: Path) -> None:
    """Remove the records of a run, but not the results of its checkpoints."""
    for path in (folder / PARTS_FOLDER).glob("*.parquet"):
        if PartName.of(path.name):
            disk.remove(path)
    (folder / RUN).unlink(missing_ok=True)  # last, as parts without run.json would look like a foreign folder


def _tables(folder: Path) -> Tables:
    run = read_run(folder)
    return Tables(run.heads, run.steps, run.alarms)


def _from(rows: Sequence[StepRows]) -> Tables:
    return tables_from_rows(stacked("heads", [one.heads for one in rows]), [one.step for one in rows], _alarms(rows))


def _alarms(rows: Sequence[StepRows]) -> list[dict[str, Any]]:
    return [row for one in rows for row in one.alarms]


def _by_step(tables: Tables) -> dict[int, str]:
    """Return all rows of each step as one text, in which NaN equals NaN."""
    texts: dict[int, list[str]] = {}
    for table in (tables.steps, tables.heads, tables.alarms):
        for row in table.to_pylist():
            texts.setdefault(row["step"], []).append(repr(row))
    return {step: "\n".join(rows) for step, rows in texts.items()}


def _first_other(there: dict[int, str], here: dict[int, str]) -> int | None:
    """Return the first step of the attempt that makes the old records equal the new ones; None if they are equal.

    Example:
        >>> _first_other({1: "a", 9: "b"}, {1: "a", 9: "b"}), _first_other({1: "a"}, {1: "a", 9: "b"})
        (None, 2)
        >>> _first_other({1: "a", 9: "b"}, {1: "a"}), _first_other({1: "a", 9: "d"}, {1: "a", 9: "b"})
        (0, 2)
    """
    other = [step for step in there.keys() | here.keys() if there.get(step) != here.get(step)]
    if not other:
        return None
    # an attempt without rows replaces nothing: if trailing steps are gone, the last remaining one is written again
    first = min(*other, max(here))
    # no later, as the steps in between would be a gap
    return max((step + 1 for step in there if step < first), default=0)


def _parts(rows: Sequence[StepRows]) -> Iterator[list[StepRows]]:
    part: list[StepRows] = []
    size = 0
    for one in rows:
        if part and size + len(one.heads) > _HEADS_A_PART:
            yield part
            part, size = [], 0
        part.append(one)
        size += len(one.heads)
    if part:
        yield part
