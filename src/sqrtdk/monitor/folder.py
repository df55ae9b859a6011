"""Writes the folder of a run: run.json, and under parts/ one file for each range of steps.

    runs/exp1/run.json       the model, and the attempts: one for each process that wrote, with the count of its parts
    runs/exp1/lock           held by the process that writes
    runs/exp1/parts/         attempt-1.part-000000-000031.steps-1-3200.sum-0123456789abcdef.parquet, ...

A part is written whole under another name, flushed to disk and then renamed, so that a process killed at any moment
leaves every finished part and no half one. Many small parts are merged into one, so that a long run is read quickly
however often it was written. The merged part exists whole before its sources are removed, and its name says which they
are: a kill in between leaves both, and readers and the next writer know which to ignore.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from sqrtdk._records import quote
from sqrtdk.errors import InvalidValueError, OutputError, RunFolderError, SqrtdkError
from sqrtdk.monitor.names import PARTS_FOLDER, PartName, last_recorded, list_parts, lost_tails
from sqrtdk.monitor.tables import (
    MAX_PART_FILE_BYTES,
    MAX_PART_ROWS,
    Rows,
    Tables,
    arrow,
    concatenate,
    decode_part,
    encode_part,
    tables_from_rows,
)
from sqrtdk.store import disk
from sqrtdk.store.lock import LOCK, Lock
from sqrtdk.store.manifest import (
    MAX_STEP,
    RUN,
    Attempt,
    Manifest,
    model_difference,
    plain_json,
    read_manifest,
    write_manifest,
)

CHECKPOINTS = "checkpoints"  # results of checkpoints, beside the records made from them


class RunWriter:
    """Writes the records of a run, as the only writer of its folder until it is closed or its process ends.

    Attributes:
        folder: the directory.
        attempt: number of this process among those that wrote the run, from 1.
        first_step: smallest step that it may write.
        last_step: largest recorded step; None: no step is recorded.
        parts: number of parts it wrote.
        notes: texts for the user: steps that are missing or replaced, a folder without locks.

    Example:
        >>> import tempfile
        >>> from sqrtdk.monitor.reading import read_run
        >>> step = {"sampled": False, "loss": 2.5, "time": 0.0, "calls": 0, "unmeasured": 0}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with RunWriter(folder, model={"layers": 1}, settings={"every": 100}) as writer:
        ...         writer.write([], [{"step": 1, **step}, {"step": 2, **step}], [])
        ...     with RunWriter(folder, model={"layers": 1}, settings={"every": 100}) as writer:
        ...         print(writer.attempt, writer.first_step, writer.last_step)
        ...         writer.write([], [{"step": 3, **step}], [])
        ...     read_run(folder).steps["step"].to_pylist()
        2 3 2
        [1, 2, 3]
    """

    def __init__(self, folder: str | Path, *, model: Any, settings: Any, first_step: int | None = None) -> None:
        """Take the folder, and make it if it does not exist.

        Args:
            folder: of a run of the same model, or empty, or missing.
            model: description of the model, as JSON; a folder can only be continued with the same model.
            settings: of the watch, as JSON; they may differ between attempts.
            first_step: step at which training (re)starts; records from there on are replaced, but never deleted. None:
                the step after the last recorded one, 0 in a new run.

        Raises:
            OutputError: Another writer has the folder, it can't be written, or it holds no run.
            RunFolderError: The run is of another model or schema version, or its run.json is damaged.
            InvalidValueError: `first_step` is not a step number.
            MissingExtraError: pyarrow is missing.
        """
        arrow()
        self.folder = Path(folder)
        model, settings = plain_json(model, "the model"), plain_json(settings, "the settings")
        if first_step is not None:
            _check_step(first_step)
        # Everything that can refuse the arguments is above: a refused call leaves no directory behind.
        _make(self.folder)
        _begun(self.folder, model)  # before the lock, which leaves a file in a folder that is refused
        self._lock = Lock(self.folder)
        try:
            self._begin(model, settings, first_step)
        except BaseException:
            self.close()
            raise

    def _begin(self, model: Any, settings: Any, first_step: int | None) -> None:
        """Begin an attempt; the lock is held.

        What an earlier attempt left over is removed: temporary files, and parts whose rows are in a larger part.
        """
        # Read again under the lock: another writer may have begun an attempt since the look in __init__.
        before = _begun(self.folder, model)
        disk.make(self.folder / PARTS_FOLDER)
        disk.tidy(self.folder, RUN)
        disk.tidy(self.folder / PARTS_FOLDER, "*")
        listing = list_parts(self.folder)
        for part in listing.merged:
            disk.remove(self.folder / PARTS_FOLDER / part.name)
        # Parts that run.json counts but that are gone still count: their steps were recorded, and are not taken again.
        parts = (*listing.parts, *lost_tails(before, listing.parts))
        last = last_recorded(before, parts)
        self.first_step = first_step if first_step is not None else 0 if last is None else last + 1
        self.last_step = last_recorded(before, parts, self.first_step)
        numbers = [*(each.number for each in before), *(part.attempt for part in parts)]
        self.attempt = 1 + max(numbers, default=0)
        notes = self._lock.note, _replaced(self.first_step, last), _missing(self.first_step, last)
        self.notes = tuple(note for note in notes if note)
        self._manifest = Manifest(model, (*before, Attempt(self.attempt, self.first_step, time.time(), settings, 0)))
        write_manifest(self.folder, self._manifest)
        self.parts = self._noted = 0
        self._tail = Tail(self.folder / PARTS_FOLDER)

    def write(self, heads: Rows, steps: Rows, alarms: Rows) -> None:
        """Write one part, or several if there are many rows; once this returns, the rows are on disk.

        After an error, finished parts stay. Ctrl-C takes effect before or after a part, never within one. `last_step`
        and `parts` say how far the writer came.

        Args:
            heads: rows of `columns.HEAD_COLUMNS`; a nullable column may be left out.
            steps: rows of `columns.STEP_COLUMNS`, each step once, all after `last_step`. If empty, heads and alarms
                belong to `last_step`, or begin the step that is written next.
            alarms: rows of `columns.ALARM_COLUMNS`; heads and alarms belong to steps of the same part.

        Raises:
            InvalidValueError: The rows don't fit the columns, or the steps.
            OutputError: The disk is full or can't be written, or another writer took the folder.
        """
        self._lock.check()
        tables = tables_from_rows(heads, steps, alarms)
        if not len(tables):
            return
        first, last = tables.first_step, tables.last_step
        # Heads and alarms without a step row may still come for the step that was written last.
        least = self.first_step if self.last_step is None else max(self.first_step, self.last_step + 1)
        if first < least and not (first == self.last_step and not tables.steps.num_rows):
            raise InvalidValueError(
                f"step {first} is recorded already, or before the first one: {least} is the least that can be written",
                hint="After a return to a checkpoint, open the folder anew with its first_step.",
            )
        _check_step(last)
        for piece in tables.pieces():
            self._put(piece, last)

    def _put(self, tables: Tables, until: int) -> None:
        """Write a part; `until` is the last step of the caller's rows, for a message."""
        content = encode_part(tables)
        first, last, rows = tables.first_step, tables.last_step, tables.steps.num_rows
        part = PartName(self.attempt, self.parts, self.parts, first, last, disk.digest(content))
        path = self.folder / PARTS_FOLDER / part.name
        try:
            disk.put(path, content)
        except OutputError as error:
            recorded = (
                "nothing is recorded yet" if self.last_step is None else f"all up to step {self.last_step} is kept"
            )
            raise OutputError(
                f"steps {first} to {until} were not recorded; {recorded}: {error}",
                hint="Free space, and write them again.",
            ) from error
        finally:
            if path.exists():  # also after an interrupt during the write, which is raised now
                self.parts, self.last_step = self.parts + 1, last if rows else self.last_step
        self._note(last)
        if rows:
            self._tail.add(part, content.size, len(tables))
        else:
            self._tail.stop()

    def _note(self, last: int) -> None:
        """Count the parts in run.json; if the disk is full, the next part or `close` writes the count."""
        *before, own = self._manifest.attempts
        own = replace(own, parts=self.parts, last_step=max(last, own.last_step or 0))
        self._manifest = replace(self._manifest, attempts=(*before, own))
        with contextlib.suppress(OutputError):
            write_manifest(self.folder, self._manifest)
            self._noted = self.parts

    def close(self) -> None:
        """Release the lock of the folder; a second call does nothing."""
        if getattr(self, "_noted", 0) < getattr(self, "parts", 0):
            with contextlib.suppress(OutputError):
                self._lock.check()
                self._note(self.last_step or 0)
        self._lock.release()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_step(step: int) -> None:
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise InvalidValueError(f"{step!r} is no number of a step", hint=f"Give a whole number from 0 to {MAX_STEP}.")


def _make(folder: Path) -> None:
    """Make the directory, if it does not exist."""
    # A new directory survives a power cut only if the entry in its parent is on disk as well.
    there = folder.is_dir()
    disk.make(folder)
    if not there:
        disk.sync(folder.parent)


def _begun(folder: Path, model: Any) -> tuple[Attempt, ...]:
    """Return the attempts at the run in a folder; empty for an empty folder.

    Raises:
        OutputError: The folder holds something else.
        RunFolderError: It holds a run of another model or schema version, or a damaged one.
    """
    if not os.path.lexists(folder / RUN):
        refuse_other_files(folder)
        return ()
    there = read_manifest(folder)
    if there.model != model:
        raise RunFolderError(
            f"{folder} holds a run of another model: {model_difference(there.model, model)}",
            hint="Choose another directory; what is there stays as it is.",
        )
    return there.attempts


def refuse_other_files(folder: Path) -> None:
    """Check that a directory is empty or holds a run.

    Raises:
        OutputError: It holds other files, or it can't be read.
    """
    try:
        # At most 100 names: somebody may give a directory of a million files, and five are named.
        names = [path.name for path, _ in zip(folder.iterdir(), range(100), strict=False)]
        parts = (folder / PARTS_FOLDER).is_dir() and any(
            PartName.of(path.name) for path in (folder / PARTS_FOLDER).iterdir()
        )
    except OSError as error:
        raise OutputError(f"cannot read {folder}: {error.strerror}", hint="Choose another directory.") from error
    others = sorted(name for name in names if not _is_ours(name)) or [PARTS_FOLDER] * parts
    if others:
        raise OutputError(
            f"{folder} holds no run, as there is no {RUN}, and is not empty: {', '.join(map(quote, others[:5]))}",
            hint="Choose an empty or a new directory.",
        )


def _is_ours(name: str) -> bool:
    """Return whether a process killed before run.json existed can have left this file."""
    return name in (LOCK, PARTS_FOLDER, CHECKPOINTS) or (name.startswith(f".{RUN}.") and name.endswith(".tmp"))


def _replaced(first: int, last: int | None) -> str:
    if last is None or first > last:
        return ""
    return f"steps {first} to {last} are there from before: what is recorded from now on replaces them"


def _missing(first: int, last: int | None) -> str:
    return "" if last is None or first <= last + 1 else f"steps {last + 1} to {first - 1} were never recorded"


SMALL_PARTS_BEFORE_MERGE = 32  # small parts in a row, of one attempt, before they are merged
SMALL_BYTES = 2**18  # a merged part is at most 32 times as large, so that no merge delays a training step for long


class Tail:
    """The newest parts of an attempt that are small enough to be merged: those after the last large one.

    Args:
        folder: The directory of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: list[PartName] = []

    def add(self, part: PartName, size: int, rows: int) -> None:
        """Append a written part, and merge the small parts once there are `SMALL_PARTS_BEFORE_MERGE` of them.

        Args:
            part: its name.
            size: bytes of its file.
            rows: number of its rows.
        """
        if size >= SMALL_BYTES or rows >= MAX_PART_ROWS // SMALL_PARTS_BEFORE_MERGE:
            self.stop()
            return
        self._parts.append(part)
        if len(self._parts) >= SMALL_PARTS_BEFORE_MERGE:
            parts, self._parts = self._parts, []
            try:
                self._merge(parts)
            except (SqrtdkError, FileNotFoundError):  # no space for both, or a damaged part: keep the small parts
                return

    def stop(self) -> None:
        """Forget the parts so far, because the last one can't be merged.

        It is large, or it has further rows of the last step of another part.
        """
        self._parts.clear()

    def _merge(self, parts: list[PartName]) -> None:
        tables = concatenate([self._read(part) for part in parts])
        first, last = parts[0], parts[-1]
        content = encode_part(tables)
        checksum = disk.digest(content)
        whole = PartName(first.attempt, first.first, last.last, first.first_step, last.last_step, checksum)
        # The whole before the removals: a process killed in between leaves rows twice, which a reader notices by the
        # names, and never too few.
        disk.put(self._folder / whole.name, content)
        for part in parts:
            disk.remove(self._folder / part.name)
        # A merged part may itself be small, and is then merged with its like.
        self.add(whole, content.size, len(tables))

    def _read(self, part: PartName) -> Tables:
        content = disk.take(self._folder / part.name, MAX_PART_FILE_BYTES)
        part.check(content)
        return decode_part(content)
