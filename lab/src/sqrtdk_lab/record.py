"""The record of one run of one claim, as a JSON document: figures, verdict, control, environment, plots as data."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sqrtdk.errors import InvalidValueError, kind_and_text
from sqrtdk.extending import json_document, parse_json, quote, record_from_json
from sqrtdk.messages import Text
from sqrtdk_lab._drawn import Drawn
from sqrtdk_lab.figures import CONFIDENCE, Figure, Plot
from sqrtdk_lab.judge import ClaimVerdict

SCHEMA_VERSION = 2
MOST_PLACE = 1e100  # of a map; the arithmetic of drawing overflows beyond
Doubt = Literal["same", "undecided"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run of the experiment.

    Attributes:
        parameters: of the run.
        figures: the measured figures.
        verdict: the answer that follows.
    """

    parameters: Mapping[str, Any]
    figures: tuple[Figure, ...]
    verdict: ClaimVerdict


@dataclass(frozen=True, slots=True)
class Record(Drawn):
    """One claim, measured.

    Attributes:
        id: of the claim.
        group: of the register.
        sources: explanations and papers that make the claim.
        statement: the claim.
        formula: LaTeX.
        method: how it was measured.
        control_method: the premise that the control reverses.
        why: the reason for the verdict.
        condition: what the verdict depends on, in one sentence; None for a verdict other than `depends`.
        quick: whether it is the quick run.
        seed: of all randomness.
        outcome: of the experiment.
        control: of the experiment with its premise reversed.
        plots: as data.
        environment: versions and machine.
        command: the command that made the record; empty from Python.
        started: UTC, ISO 8601.
        duration_s: seconds that this run took, including the control; reused training runs count as none.
        level: confidence of its intervals, 0 to 1.
    """

    id: str
    group: str
    sources: tuple[str, ...]
    statement: Text
    formula: str
    method: Text
    control_method: Text
    why: Text
    quick: bool
    seed: int
    outcome: Outcome
    control: Outcome
    condition: Text | None = None
    plots: tuple[Plot, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    started: str = ""
    duration_s: float = math.nan
    level: float = CONFIDENCE

    def __repr__(self) -> str:
        size = "quick" if self.quick else "full"
        return f"Record({self.id!r}, {self.outcome.verdict.answer}; {size}, seed {self.seed}; {self.statement.en!r})"

    @property
    def doubt(self) -> Doubt | None:
        """The flaw of the control: its verdict equals the claim's, or is undecided. None if it is a different one."""
        answer = self.control.verdict.answer
        if answer == "undecided":
            return "undecided"
        return "same" if answer == self.outcome.verdict.answer else None

    @property
    def sound(self) -> bool:
        """Whether the control, with its premise reversed, gave another answer; a judge that can't say no is
        worthless."""
        return self.doubt is None

    @property
    def decided(self) -> bool:
        """Whether every measurable part of experiment and control has an answer, and there is at least one part."""
        parts = [one.verdict.findings for one in (self.outcome, self.control)]
        return all(parts) and all(part.state != "undecided" for findings in parts for part in findings)


def to_json(record: Record) -> str:
    """Return the record as one JSON document."""
    derived = {"schema_version": SCHEMA_VERSION, "sound": record.sound, "decided": record.decided}
    return json_document(derived | dataclasses.asdict(record, dict_factory=_written))


def _written(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a record without those that few have, where they are None."""
    return {name: value for name, value in fields if value is not None or name not in ("one", "reason", "map")}


def read_record(path: Path) -> Record:
    """Read a record that `to_json` wrote.

    Args:
        path: the file.

    Raises:
        InvalidValueError: It is no record, has another schema version, or holds a value that no record has.
    """
    what, hint = f"{path} is not a record of a claim: it", "Delete the file and run the claim again."
    try:
        data = parse_json(path.read_bytes(), what, InvalidValueError, hint)
    except OSError as error:
        raise InvalidValueError(f"{path} is not a record of a claim: {kind_and_text(error)}", hint=hint) from error
    if not isinstance(data, dict) or "schema_version" not in data:
        raise InvalidValueError(f"{what} has no schema_version", hint=hint)
    if (version := data["schema_version"]) != SCHEMA_VERSION:
        version = version if type(version) is int else quote(version)
        raise InvalidValueError(
            f"{path} is a record of schema version {version}; this version of sqrtdk reads {SCHEMA_VERSION}",
            hint="Run the claim again into another directory, or use the version of sqrtdk that wrote it.",
        )
    # a record without an entry that has a default would look as if it had said so
    if missing := [one.name for one in dataclasses.fields(Record) if one.name not in data]:
        raise InvalidValueError(f"{what} lacks {missing[0]!r}", hint=hint)
    record = record_from_json(Record, data, what, InvalidValueError, hint, others=True)
    if (wrong := next(_impossible(record), None)) is not None:
        raise InvalidValueError(f"{what} has {wrong}", hint=hint)
    return record


def figure_of(data: Mapping[str, Any]) -> Figure:
    """Decode a figure from a record's JSON."""
    return record_from_json(Figure, data, "a figure", InvalidValueError, "", others=True)


def _impossible(record: Record) -> Iterator[str]:
    """Yield what no record has, though its types allow it."""
    if not 0 < record.level < 1:
        yield f"the level {record.level}, which is between 0 and 1"
    if record.seed < 0:
        yield f"the seed {quote(record.seed)}, which is 0 or more"
    for one in (record.outcome, record.control):
        findings = one.verdict.findings
        measured = [finding for finding in findings if finding.reason is None]
        if one.verdict.answer != "undecided" and not (measured and all(finding.checks for finding in measured)):
            yield f"the verdict {one.verdict.answer!r}, which rests on no figure"
        for figure in (*one.figures, *(check.figure for finding in findings for check in finding.checks)):
            if figure.samples < 1:
                yield f"a figure of {quote(figure.samples)} samples; it is of 1 or more"
    for plot in record.plots:
        if (drawn := plot.map) is None:
            continue
        if {len(row) for row in drawn.values} != {len(drawn.x)} or len(drawn.values) != len(drawn.y):
            yield f"a map of {len(drawn.x)} x and {len(drawn.y)} y whose rows are not as long, or not as many"
        for places, axis in ((drawn.x, plot.x_axis), (drawn.y, plot.y_axis)):
            rising = all(low < high for low, high in itertools.pairwise(places))
            if not (places and rising and all(abs(place) <= MOST_PLACE for place in places)):
                yield f"a map at {quote(list(places))}; its places are one or more, finite, and rise"
            elif axis == "log" and places[0] <= 0:
                yield f"a map at {quote(list(places))} on a log axis, whose places are above 0"
    for series in (series for plot in record.plots for series in plot.series):
        x, y, low, high = map(len, (series.x, series.y, series.low, series.high))
        if y != x or {low, high} not in ({0}, {x}):
            yield f"a series of {x} x, {y} y, {low} low and {high} high; it has a y for each x, and all ends or none"
        if any(isinstance(one, str) != (series.style == "bars") for one in series.x):
            yield f"a series of style {series.style!r} with x {quote(list(series.x))}; bars have names, others numbers"
