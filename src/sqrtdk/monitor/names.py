"""Names of parts: which attempt wrote it, its number there, the steps in it, and the checksum of its bytes.

`attempt-1.part-000000-000031.steps-1-3200.sum-0123456789abcdef.parquet` holds what were the parts 0 to 31 of attempt 1.
A part that lies within another one was merged into it and is not counted, so parts can be merged without a moment in
which a step is missing or there twice. As the name tells the steps, it is known what was in a part that can't be read;
as it tells the checksum, which a rename makes last with the part itself, no parser meets bytes that were not written.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sqrtdk._stranger import shown
from sqrtdk.errors import RunFolderError, short_text

PARTS = "parts"
MAX_PARTS = 2**17
_NUMBERS = r"attempt-(\d{1,9})\.part-(\d{6,12})-(\d{6,12})\.steps-(\d{1,18})-(\d{1,18})"
_NAME = re.compile(_NUMBERS + r"(?:\.sum-([0-9a-f]{16}))?\.parquet", re.ASCII)


@dataclass(frozen=True, slots=True)
class Part:
    """What the name of a part says.

    Attributes:
        attempt: that wrote it.
        first: number of the first part in it, counted from 0 in each attempt.
        last: number of the last one; `first` where none was merged.
        first_step: least step in it.
        last_step: greatest step in it.
        checksum: of its bytes, by `checksum_of`; "": an older version wrote it, and its name tells none.
    """

    attempt: int
    first: int
    last: int
    first_step: int
    last_step: int
    checksum: str = ""

    @property
    def name(self) -> str:
        """Of the file.

        Example:
            >>> Part(1, 0, 31, 1, 3200, "0123456789abcdef").name
            'attempt-1.part-000000-000031.steps-1-3200.sum-0123456789abcdef.parquet'
        """
        end = f".sum-{self.checksum}.parquet" if self.checksum else ".parquet"
        return f"{self.numbers}.steps-{self.first_step}-{self.last_step}{end}"

    @property
    def numbers(self) -> str:
        """The beginning of the name: attempt and numbers.

        Example:
            >>> Part(1, 0, 31, 1, 3200).numbers
            'attempt-1.part-000000-000031'
        """
        return f"attempt-{self.attempt}.part-{self.first:06}-{self.last:06}"

    def check(self, content: bytes) -> None:
        """Refuse bytes that are not those that were written under this name.

        Raises:
            RunFolderError: The checksum is another one.
        """
        if self.checksum and (there := checksum_of(content)) != self.checksum:
            raise RunFolderError(f"it is damaged: its bytes have the checksum {there}, not {self.checksum}")

    @classmethod
    def of(cls, name: str) -> Part | None:
        """What a name says; None where it is not that of a part.

        Example:
            >>> Part.of("attempt-2.part-000004-000004.steps-70-79.parquet")
            Part(attempt=2, first=4, last=4, first_step=70, last_step=79, checksum='')
            >>> Part.of("attempt-2.part-000004-000003.steps-70-79.parquet"), Part.of("notes.txt")
            (None, None)
        """
        if not (read := _NAME.fullmatch(name)):
            return None
        *numbers, checksum = read.groups(default="")
        attempt, first, last, first_step, last_step = map(int, numbers)
        part = cls(attempt, first, last, first_step, last_step, checksum)
        fits = part.name == name and part.first <= part.last and part.first_step <= part.last_step
        return part if fits else None


def checksum_of(content: bytes) -> str:
    """The checksum of a part, as its name has it.

    Example:
        >>> checksum_of(b"PAR1")
        'ae217414c71c180a'
    """
    return hashlib.blake2b(content, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Listing:
    """The parts of a run by attempt and number; those that were merged into others apart, and names of other files."""

    parts: tuple[Part, ...]
    merged: tuple[Part, ...]
    strange: tuple[str, ...]


def list_parts(folder: Path) -> Listing:
    """The parts in the folder of a run; temporary files aside.

    Raises:
        RunFolderError: It can't be read, or holds more files than any run has.
    """
    try:
        names = _names(folder) | _names(folder)  # twice: one pass can miss a part and also the one that it went into
    except (FileNotFoundError, NotADirectoryError):  # of a run that has just begun, or of none
        return Listing((), (), ())
    except OSError as error:
        raise RunFolderError(f"the parts of {shown(folder)} can't be read: {short_text(error)}") from error
    if len(names) > MAX_PARTS:
        raise RunFolderError(f"{shown(folder)} has more than {MAX_PARTS} parts, which are not read")
    parts, strange = [], []
    for name in names:
        if (part := Part.of(name)) is not None:
            parts.append(part)
        elif not (name.startswith(".") and name.endswith(".tmp")):
            strange.append(shown(name))
    return Listing(*without_merged(parts), tuple(sorted(strange)))


def _names(folder: Path) -> set[str]:
    with os.scandir(folder / PARTS) as entries:
        return {entry.name for entry, _ in zip(entries, range(MAX_PARTS + 1), strict=False)}


def without_merged(parts: Iterable[Part]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Parts by attempt and number, and those of them that lie within another one.

    Example:
        >>> old, new, later = Part(1, 0, 0, 1, 9), Part(1, 0, 1, 1, 19), Part(1, 2, 2, 20, 29)
        >>> without_merged([later, old, new]) == ((new, later), (old,))
        True
    """
    kept: list[Part] = []
    merged: list[Part] = []
    for part in sorted(parts, key=lambda part: (part.attempt, part.first, -part.last, part.first_step)):
        above = kept[-1] if kept and kept[-1].attempt == part.attempt else None
        longer = above is not None and above.last - above.first > part.last - part.first
        within = longer and above is not None and above.first <= part.first and part.last <= above.last
        (merged if within else kept).append(part)
    return tuple(kept), tuple(merged)
