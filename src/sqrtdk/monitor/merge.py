"""Many small parts become one, so that a long run is read quickly however often it was written.

The merged part is there whole before those in it are removed, and its name says which they are: a kill in between
leaves both, and readers and the next writer know what to leave out.
"""

from __future__ import annotations

from pathlib import Path

from sqrtdk.errors import SqrtdkError
from sqrtdk.monitor import disk
from sqrtdk.monitor.names import Part, checksum_of
from sqrtdk.monitor.tables import MAX_FILE_BYTES, MAX_ROWS, Tables, decode, encode, joined

MOST = 32  # small parts in a row, of one attempt
SMALL_BYTES = 2**18  # what comes of a merge is at most 32 times as much: no long pause in a training


class Tail:
    """The latest parts of an attempt, all small, none with a large one between."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: list[Part] = []

    def add(self, part: Part, size: int, rows: int) -> None:
        """A part was written; merge it with those before if that is due.

        Args:
            part: its name.
            size: bytes of its file.
            rows: in it.
        """
        if size >= SMALL_BYTES or rows >= MAX_ROWS // MOST:
            self.stop()
            return
        self._parts.append(part)
        if len(self._parts) >= MOST:
            parts, self._parts = self._parts, []
            try:
                self._merge(parts)
            except (SqrtdkError, FileNotFoundError):  # no space for both, or one is damaged: they stay as they are
                return

    def stop(self) -> None:
        """A part was written that stays as it is, as one that has more of the step of another part."""
        self._parts.clear()

    def _merge(self, parts: list[Part]) -> None:
        tables = joined([self._read(part) for part in parts])
        first, last = parts[0], parts[-1]
        content = encode(tables)
        checksum = checksum_of(content)
        whole = Part(first.attempt, first.first, last.last, first.first_step, last.last_step, checksum)
        disk.put(self._folder / whole.name, content)
        for part in parts:
            disk.remove(self._folder / part.name)
        self.add(whole, content.size, len(tables))

    def _read(self, part: Part) -> Tables:
        content = disk.take(self._folder / part.name, MAX_FILE_BYTES)
        part.check(content)
        return decode(content)
