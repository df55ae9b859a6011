"""Reads the folder of a run, even while it is written, and even if it is untrusted.

Nothing is dropped silently: a damaged, missing or foreign part is reported with its steps. The texts in the tables are
untrusted; whatever displays them must escape them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sqrtdk._records import quote
from sqrtdk.errors import RunFolderError
from sqrtdk.messages import Message
from sqrtdk.monitor.names import PARTS_FOLDER, Listing, PartName, UnrecordedSteps, gaps, list_parts, lost_tails, spans
from sqrtdk.monitor.tables import MAX_PART_FILE_BYTES, Table, Tables, arrow, concatenate, decode_part
from sqrtdk.store import disk
from sqrtdk.store.lock import Writer, writer_of
from sqrtdk.store.manifest import MAX_STEP, Attempt, read_manifest

MAX_RUN_ROWS = 2**25  # rows of a run that are read at once
_TRIES = 20  # parts can be merged away between listing and reading
_PAUSE_S = 0.01  # between tries
_GONE: tuple[Writer, ...] = ("ended", "killed")
OF_CHECKPOINTS = {"of": "checkpoints"}  # in the settings of records made from checkpoints


def of_checkpoints(settings: Any) -> bool:
    """Return whether the settings of a run say that its records were made from checkpoints."""
    return isinstance(settings, dict) and settings.items() >= OF_CHECKPOINTS.items()


@dataclass(frozen=True, slots=True)
class Damage:
    """A part that could not be read.

    Attributes:
        name: of the file, escaped if it is not a part's name.
        reason: why it could not be read.
        first_step: smallest step in it, if known.
        last_step: largest step in it, if known.
        unfinished: whether it only lacks the row of its last step, which may still be written.
    """

    name: str
    reason: str
    first_step: int | None = None
    last_step: int | None = None
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """The records of a run, in order of step; for a step recorded twice, those of the later attempt.

    Attributes:
        folder: the directory.
        model: as JSON given by the writer's caller.
        attempts: at the run, including those without records.
        heads: a pyarrow table of `columns.HEAD_COLUMNS`.
        steps: the same for `columns.STEP_COLUMNS`.
        alarms: the same for `columns.ALARM_COLUMNS`.
        damaged: parts that are not in the tables.
        gaps: steps that were never recorded.
        replaces_from: set by `follow`: earlier rows from this step on no longer count; None: all still count.
    """

    folder: Path
    model: Any
    attempts: tuple[Attempt, ...]
    heads: Table
    steps: Table
    alarms: Table
    damaged: tuple[Damage, ...]
    gaps: tuple[UnrecordedSteps, ...]
    replaces_from: int | None = None

    @property
    def settings(self) -> Any:
        """The settings of the watch in the last attempt; None if there is no attempt."""
        return self.attempts[-1].settings if self.attempts else None

    @property
    def of_checkpoints(self) -> bool:
        """Whether the records were made from checkpoints, whose forward passes have no gradients."""
        return of_checkpoints(self.settings)

    @property
    def last_step(self) -> int | None:
        """The last step in the records; None if there is none."""
        return self.steps.column("step")[-1].as_py() if self.steps.num_rows else None


def read_run(folder: str | Path, *, first_step: int = 0, last_step: int = MAX_STEP) -> Run:
    """Read the folder of a run.

    Args:
        folder: written by a `RunWriter`, finished or not.
        first_step: smallest step to read.
        last_step: largest step to read.

    Raises:
        RunFolderError: It is no run's folder, its run.json is damaged, or it has more rows than can be read at once.
        MissingExtraError: pyarrow is missing.
    """
    return _look(Path(folder), _Position(), first_step, last_step)[0]


def follow(folder: str | Path, *, every_s: float = 1.0) -> Iterator[Run]:
    """Yield everything recorded so far, then only what is new, whenever there is more; it never ends.

    Args:
        folder: as for `read_run`.
        every_s: seconds between two checks.

    Raises:
        RunFolderError: As `read_run`.
        MissingExtraError: pyarrow is missing.
    """
    run, position = _look(Path(folder), _Position(), 0, MAX_STEP)
    yield run
    while True:
        run, position = _look(Path(folder), position, 0, MAX_STEP)
        if run.steps.num_rows or run.damaged or run.replaces_from is not None:
            yield run
        else:
            time.sleep(every_s)


class GrowingRun:
    """A run that is read again and again while it is written.

    Each part is read once, and its content is kept; a merged part counts as a new one.

    Attributes:
        writer: whether the run was being written at the last `read`, see `writer_of`.
        over: whether nothing more will be written, unless the training is resumed. Two reads must find no writer, as
            one that begins has made its lock but does not hold it for an instant.

    Args:
        folder: as for `read_run`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.writer: Writer = "unknown"
        self.over = False
        self._folder = Path(folder)
        self._held: dict[PartName, Tables | Damage] = {}
        self._read: object = None

    def read(self) -> Run | None:
        """Return the whole run, as `read_run` returns it, if it has changed since the last call, else None.

        Raises:
            RunFolderError: As `read_run`.
            MissingExtraError: pyarrow is missing.
        """
        gone = self.writer in _GONE
        self.writer = writer_of(self._folder)  # before the parts: all that a writer wrote before it ended are then read
        self.over = gone and self.writer in _GONE
        now = list_parts(self._folder), read_manifest(self._folder)
        if now == self._read:
            return None
        self._read = now
        return _look(self._folder, _Position(), 0, MAX_STEP, self._held)[0]


@dataclass(frozen=True, slots=True)
class _Position:
    """A reader's position: the last part, and the damage already reported."""

    attempt: int = 0
    number: int = -1
    step: int = -1
    reported: frozenset[Damage] = field(default_factory=frozenset)

    def __contains__(self, part: PartName) -> bool:
        return (part.attempt, part.last) <= (self.attempt, self.number)


def _look(
    folder: Path,
    position: _Position,
    first_step: int,
    last_step: int,
    held: dict[PartName, Tables | Damage] | None = None,
) -> tuple[Run, _Position]:
    """Return what is new since `position`. `held` caches parts: those read before, and on return those that count."""
    arrow()
    held = {} if held is None else held
    for trial in range(_TRIES):
        patient = trial < _TRIES - 1
        inventory = read_manifest(folder).attempts  # before the parts: all parts that it counts exist
        listing = list_parts(folder)
        manifest = read_manifest(folder)  # after the parts: it has the attempts of all of them
        lost = lost_tails(inventory, listing.parts)
        written = sorted((*listing.parts, *lost), key=lambda part: (part.attempt, part.first))
        counted = spans(manifest.attempts, written)
        parts, damaged = _in_order(listing, counted)
        for part in lost:  # only the steps that no later attempt recorded again
            _, end = counted.get(part.attempt, (0, -1))
            if part.first_step <= end:
                gone = Message("alarms.part.not_there")
                damaged.append(Damage(part.numbers, gone, part.first_step, min(part.last_step, end)))
        wanted = {
            part: (low, high)
            for part in parts
            if part not in position
            for low, high in [_window(part, counted[part.attempt], position, first_step, last_step)]
            if low <= high
        }
        for part in [part for part in held if part not in wanted]:
            del held[part]
        if _load(folder, [part for part in wanted if part not in held], held, patient):
            break
        time.sleep(_PAUSE_S)
    tables = []
    for part, (low, high) in wanted.items():
        content = held[part]
        if isinstance(content, Damage):
            damaged.append(content)
        else:
            tables.append((part, content.between(low, high)))
    tables, odd = _whole_steps(tables, position)
    damaged += odd
    new = [damage for damage in damaged if damage not in position.reported]
    whole = concatenate([each for _, each in tables])
    begun = [low for number, (low, _) in counted.items() if number > position.attempt > 0]
    run = Run(
        folder=folder,
        model=manifest.model,
        attempts=manifest.attempts,
        heads=whole.heads,
        steps=whole.steps,
        alarms=whole.alarms,
        damaged=tuple(sorted(new, key=lambda damage: (damage.first_step or 0, damage.name))),
        gaps=gaps(manifest.attempts, written),
        replaces_from=min(begun, default=None),
    )
    position = replace(position, reported=position.reported.union(new))
    unfinished = {damage.name for damage in odd if damage.unfinished}
    while parts and parts[-1].name in unfinished:  # the missing row of their step may still come
        parts.pop()
    if parts:
        position = replace(position, attempt=parts[-1].attempt, number=parts[-1].last, step=parts[-1].last_step)
    return run, position


def _in_order(listing: Listing, counted: dict[int, tuple[int, int]]) -> tuple[list[PartName], list[Damage]]:
    """Return the parts in sequence, and as damage: foreign files and missing parts."""
    parts: list[PartName] = []
    damaged = [Damage(name, Message("alarms.part.no_part")) for name in listing.other_files]
    for part in listing.parts:
        of = part.attempt
        if of not in counted:
            reason = Message("alarms.part.no_attempt", attempt=of)
            damaged.append(Damage(part.name, reason, part.first_step, part.last_step))
            continue
        before = parts[-1] if parts and parts[-1].attempt == of else PartName(of, -1, -1, -1, counted[of][0] - 1)
        # a part may go on with the last step of the part before it, if one of the two has a single step: a step larger
        # than a part is written in pieces, see `Tables.pieces`
        single = part.first_step == part.last_step or before.first_step == before.last_step
        more = before.last >= 0 and single and part.first_step == before.last_step
        if part.first <= before.last or (part.first_step <= before.last_step and not more):
            earlier = "alarms.part.steps_before" if before.last >= 0 else "alarms.part.steps_before_attempt"
            reason = Message(earlier)
            damaged.append(Damage(part.name, reason, part.first_step, part.last_step))
            continue
        if part.first > before.last + 1:
            # the missing parts may lie within one step
            first, last = sorted((before.last_step + 1, part.first_step - 1))
            gone = PartName(of, before.last + 1, part.first - 1, first, last)
            damaged.append(Damage(gone.numbers, Message("alarms.part.not_there"), first, last))
        parts.append(part)
    return parts, damaged


def _whole_steps(
    tables: list[tuple[PartName, Tables]], position: _Position
) -> tuple[list[tuple[PartName, Tables]], list[Damage]]:
    """Return the tables in which each step has exactly one row, and the parts left out for breaking that."""
    numbers = [each.steps.column("step").to_numpy() for _, each in tables]
    ends = {int(step) for some in numbers if len(some) for step in (some[0], some[-1])} | {position.step}
    whole: list[tuple[PartName, Tables]] = []
    odd: list[Damage] = []
    last = -1
    for (part, each), some in zip(tables, numbers, strict=True):
        earlier = bool(len(some)) and some[0] <= last
        unfinished = not len(some) and len(each) > 0 and each.last_step not in ends
        if earlier or unfinished:
            reason = Message("alarms.part.unfinished" if unfinished else "alarms.part.steps_before")
            odd.append(Damage(part.name, reason, part.first_step, part.last_step, unfinished))
            continue
        whole.append((part, each))
        last = int(some[-1]) if len(some) else last
    return whole, odd


def _window(
    part: PartName, counted: tuple[int, int], position: _Position, first_step: int, last_step: int
) -> tuple[int, int]:
    """Return the wanted range of a part's steps, which is empty if the first is greater than the last."""
    new = 0
    if part.attempt == position.attempt:  # a later part may hold more rows of the last step that was read
        new = position.step + (part.first <= position.number)
    return max(part.first_step, counted[0], first_step, new), min(part.last_step, counted[1], last_step)


def _load(folder: Path, parts: list[PartName], held: dict[PartName, Tables | Damage], patient: bool) -> bool:
    """Read parts; return False if one is gone because it was merged meanwhile."""
    rows = sum(len(content) for content in held.values() if isinstance(content, Tables))
    for part in parts:
        try:
            content = disk.take(folder / PARTS_FOLDER / part.name, MAX_PART_FILE_BYTES)
            part.check(content)
            tables = decode_part(content)
            first, last = tables.first_step, tables.last_step
            if (first, last) != (part.first_step, part.last_step):
                raise RunFolderError(Message("alarms.part.other_steps", first=first, last=last))
            held[part] = tables
            rows += len(tables)
        except FileNotFoundError:
            if patient:
                return False
            held[part] = Damage(part.name, Message("alarms.part.gone"), part.first_step, part.last_step)
        except RunFolderError as error:
            held[part] = Damage(part.name, error.message, part.first_step, part.last_step)
        if rows > MAX_RUN_ROWS:
            raise RunFolderError(
                f"{quote(folder)} has more than {MAX_RUN_ROWS} rows", hint="Read some of it: first_step, last_step."
            )
    return True
