"""Names of parts, and which steps of which attempt count.

`attempt-1.part-000000-000031.steps-1-3200.sum-0123456789abcdef.parquet` holds the former parts 0 to 31 of attempt 1. A
part within the range of another one was merged into it and is not counted, so that at no moment of a merge a step is
missing or counted twice. The name has the steps, so that they are known even if the part can't be read. It also has the
checksum, which one rename makes durable together with the part, so that no parser meets bytes that were not written.

If attempts overlap, the later one counts: training that went back to a checkpoint runs some steps again, and its
records replace the rest of the earlier attempt. An attempt without records replaces nothing. An attempt whose parts
were lost did record, and its steps are missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqrtdk._records import quote
from sqrtdk.errors import RunFolderError, short_text
from sqrtdk.store.disk import digest
from sqrtdk.store.manifest import MAX_STEP, Attempt

PARTS_FOLDER = "parts"
MAX_PARTS = 2**17
_PART_NUMBERS = r"attempt-(\d{1,9})\.part-(\d{6,12})-(\d{6,12})\.steps-(\d{1,18})-(\d{1,18})"
_PART_FILE_NAME = re.compile(_PART_NUMBERS + r"(?:\.sum-([0-9a-f]{16}))?\.parquet", re.ASCII)


@dataclass(frozen=True, slots=True)
class PartName:
    """What the name of a part says.

    Attributes:
        attempt: number of the attempt that wrote it.
        first: number of its first part, counted from 0 in each attempt.
        last: number of its last part; `first` if no parts were merged.
        first_step: smallest step in it.
        last_step: largest step in it.
        checksum: of its bytes, by `store.disk.digest`; "" in a name written by an older version.
    """

    attempt: int
    first: int
    last: int
    first_step: int
    last_step: int
    checksum: str = ""

    @property
    def name(self) -> str:
        """Name of the file.

        Example:
            >>> PartName(1, 0, 31, 1, 3200, "0123456789abcdef").name
            'attempt-1.part-000000-000031.steps-1-3200.sum-0123456789abcdef.parquet'
        """
        end = f".sum-{self.checksum}.parquet" if self.checksum else ".parquet"
        return f"{self.numbers}.steps-{self.first_step}-{self.last_step}{end}"

    @property
    def numbers(self) -> str:
        """The beginning of the name: attempt and numbers.

        Example:
            >>> PartName(1, 0, 31, 1, 3200).numbers
            'attempt-1.part-000000-000031'
        """
        return f"attempt-{self.attempt}.part-{self.first:06}-{self.last:06}"

    def check(self, content: bytes) -> None:
        """Check that bytes are those that were written under this name, by the checksum in it.

        Raises:
            RunFolderError: The checksum differs.
        """
        if self.checksum and (there := digest(content)) != self.checksum:
            raise RunFolderError(f"it is damaged: its bytes have the checksum {there}, not {self.checksum}")

    @classmethod
    def of(cls, name: str) -> PartName | None:
        """The part that a name describes; None if it is not the name of a part.

        Example:
            >>> PartName.of("attempt-2.part-000004-000004.steps-70-79.parquet")
            PartName(attempt=2, first=4, last=4, first_step=70, last_step=79, checksum='')
            >>> PartName.of("attempt-2.part-000004-000003.steps-70-79.parquet"), PartName.of("notes.txt")
            (None, None)
        """
        if not (read := _PART_FILE_NAME.fullmatch(name)):
            return None
        *numbers, checksum = read.groups(default="")
        attempt, first, last, first_step, last_step = map(int, numbers)
        part = cls(attempt, first, last, first_step, last_step, checksum)
        # The name written anew must be the same: it refuses "attempt-01" and other spellings that would count twice.
        fits = part.name == name and part.first <= part.last and part.first_step <= part.last_step
        return part if fits else None


@dataclass(frozen=True, slots=True)
class Listing:
    """The names of the files in a run's folder.

    Attributes:
        parts: by attempt and number.
        merged: parts whose rows are in a larger part as well.
        other_files: names of other files.
    """

    parts: tuple[PartName, ...]
    merged: tuple[PartName, ...]
    other_files: tuple[str, ...]


def list_parts(folder: Path) -> Listing:
    """List the parts in the folder of a run, ignoring temporary files.

    Raises:
        RunFolderError: The folder can't be read, or holds more files than any run has.
    """
    try:
        # twice, as one pass during a merge can miss a part and also the part it went into
        names = _names(folder) | _names(folder)
    except (FileNotFoundError, NotADirectoryError):  # the run has just begun, or there is no run
        return Listing((), (), ())
    except OSError as error:
        raise RunFolderError(f"the parts of {quote(folder)} can't be read: {short_text(error)}") from error
    if len(names) > MAX_PARTS:
        raise RunFolderError(f"{quote(folder)} has more than {MAX_PARTS} parts, which are not read")
    parts, other_files = [], []
    for name in names:
        if (part := PartName.of(name)) is not None:
            parts.append(part)
        elif not (name.startswith(".") and name.endswith(".tmp")):
            other_files.append(quote(name))
    return Listing(*without_merged(parts), tuple(sorted(other_files)))


def _names(folder: Path) -> set[str]:
    with os.scandir(folder / PARTS_FOLDER) as entries:
        return {entry.name for entry, _ in zip(entries, range(MAX_PARTS + 1), strict=False)}


def without_merged(parts: Iterable[PartName]) -> tuple[tuple[PartName, ...], tuple[PartName, ...]]:
    """Return the parts by attempt and number, and separately those that lie within another one.

    Example:
        >>> old, new, later = PartName(1, 0, 0, 1, 9), PartName(1, 0, 1, 1, 19), PartName(1, 2, 2, 20, 29)
        >>> without_merged([later, old, new]) == ((new, later), (old,))
        True
    """
    apart: list[PartName] = []
    merged: list[PartName] = []
    for part in sorted(parts, key=lambda part: (part.attempt, part.first, -part.last, part.first_step)):
        above = apart[-1] if apart and apart[-1].attempt == part.attempt else None
        # A merge writes the large part first and removes the small ones then, so that for a moment both are there.
        longer = above is not None and above.last - above.first > part.last - part.first
        within = longer and above is not None and above.first <= part.first and part.last <= above.last
        (merged if within else apart).append(part)
    return tuple(apart), tuple(merged)


@dataclass(frozen=True, slots=True)
class UnrecordedSteps:
    """Steps of a run that were never recorded.

    Attributes:
        first_step: The first of them.
        last_step: The last of them, included.
        attempt: Number of the attempt that began without them on record.
    """

    first_step: int
    last_step: int
    attempt: int


def lost_tails(attempts: Sequence[Attempt], parts: Sequence[PartName]) -> tuple[PartName, ...]:
    """Return the missing last parts of each attempt that counted more parts than exist, as one part per attempt.

    Args:
        attempts: from run.json, read before the parts were listed, so that parts written meanwhile are not missing.
        parts: the existing parts.

    Example:
        >>> attempts = [Attempt(1, 0, 0.0, None, parts=8, last_step=799), Attempt(2, 500, 0.0, None, 1, 599)]
        >>> [part.numbers for part in lost_tails(attempts, [PartName(1, 0, 4, 0, 499), PartName(2, 0, 0, 500, 599)])]
        ['attempt-1.part-000005-000007']
        >>> [(part.attempt, part.first_step, part.last_step) for part in lost_tails(attempts, [])]
        [(1, 0, 799), (2, 500, 599)]
    """
    lost = []
    ends: dict[int, tuple[int, int]] = {}  # number and step after the last part of each attempt
    for part in parts:
        number, step = ends.get(part.attempt, (0, 0))
        ends[part.attempt] = max(number, part.last + 1), max(step, part.last_step + 1)
    for attempt in attempts:
        number, step = ends.get(attempt.number, (0, attempt.first_step))
        # The manifest counts the parts that were written; fewer in the folder means that the newest ones were removed.
        if (attempt.parts or 0) > number and attempt.last_step is not None:
            first_step = min(step, attempt.last_step)
            lost.append(PartName(attempt.number, number, (attempt.parts or 0) - 1, first_step, attempt.last_step))
    return tuple(lost)


def spans(attempts: Sequence[Attempt], parts: Sequence[PartName]) -> dict[int, tuple[int, int]]:
    """Return the first and last step of each attempt that count, by its number.

    A later attempt replaces the steps of an earlier one from its first step on. Attempts without records are left out.

    Example:
        >>> attempts = [Attempt(1, 0, 0.0, None), Attempt(2, 50, 0.0, None), Attempt(3, 40, 0.0, None)]
        >>> spans(attempts, [PartName(1, 0, 0, 0, 99), PartName(2, 0, 0, 50, 80)])
        {2: (50, 999999999999999999), 1: (0, 49)}
    """
    wrote = {part.attempt for part in parts}
    counted: dict[int, tuple[int, int]] = {}
    last = MAX_STEP
    # The newest attempt wins: it went on from a checkpoint, and what came after that checkpoint was trained again.
    for attempt in reversed(attempts):
        if attempt.number in wrote:
            counted[attempt.number] = (attempt.first_step, last)
            last = min(last, attempt.first_step - 1)
    return counted


def last_recorded(attempts: Sequence[Attempt], parts: Sequence[PartName], before: int = MAX_STEP + 1) -> int | None:
    """Return the last step below `before` that counts; None if there is none.

    Example:
        >>> attempts = [Attempt(1, 0, 0.0, None), Attempt(2, 50, 0.0, None)]
        >>> parts = [PartName(1, 0, 0, 0, 99), PartName(2, 0, 0, 50, 80)]
        >>> last_recorded(attempts, parts), last_recorded(attempts, parts, before=30)
        (80, 29)
    """
    counted = spans(attempts, parts)
    steps = [
        min(part.last_step, counted[part.attempt][1], before - 1)
        for part in parts
        if part.attempt in counted and part.first_step <= min(counted[part.attempt][1], before - 1)
    ]
    return max(steps, default=None)


def gaps(attempts: Sequence[Attempt], parts: Sequence[PartName]) -> tuple[UnrecordedSteps, ...]:
    """Return the steps that no attempt recorded, because an attempt began later than after the last step before it.

    Example:
        >>> attempts = [Attempt(1, 0, 0.0, None), Attempt(2, 100, 0.0, None)]
        >>> gaps(attempts, [PartName(1, 0, 0, 0, 79), PartName(2, 0, 0, 100, 120)])
        (UnrecordedSteps(first_step=80, last_step=99, attempt=2),)
    """
    wrote: dict[int, list[PartName]] = {}
    for part in parts:
        wrote.setdefault(part.attempt, []).append(part)
    counted = spans(attempts, parts)
    found = []
    before: list[PartName] = []  # parts that count when an attempt begins, in order of step
    for attempt in attempts:
        first = attempt.first_step
        if attempt.number not in wrote:
            continue
        while before and before[-1].first_step >= first:
            before.pop()
        if before and before[-1].last_step + 1 < first <= counted[attempt.number][1]:
            found.append(UnrecordedSteps(before[-1].last_step + 1, first - 1, attempt.number))
        before += wrote[attempt.number]
    return tuple(found)
