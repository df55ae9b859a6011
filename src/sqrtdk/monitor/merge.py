"""Many small parts become one, so that a long run is read quickly however often it was written.

The merged part is there whole before those in it are removed, and its name says which they are: a kill in between
leaves both, and readers and the next writer know what to leave out.
"""

from __future__ import annotations

from pathlib import Path

from sqrtdk.errors import SqrtdkError
from sqrtdk.monitor import disk
from sqrtdk.monitor.names import Part
from sqrtdk.monitor.tables import MAX_FILE_BYTES, MAX_ROWS, decode, encode, joined

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
            self._parts.clear()
            return
        self._parts.append(part)
        if len(self._parts) >= MOST:
            parts, self._parts = self._parts, []
            try:
                self._merge(parts)
            except (SqrtdkError, FileNotFoundError):  # no space for both, or one is damaged: they stay as they are
                return

    def _merge(self, parts: list[Part]) -> None:
        tables = joined([decode(disk.take(self._folder / part.name, MAX_FILE_BYTES)) for part in parts])
        first, last = parts[0], parts[-1]
        whole = Part(first.attempt, first.first, last.last, first.first_step, last.last_step)
        content = encode(tables)
        disk.put(self._folder / whole.name, content)
        for part in parts:
            disk.remove(self._folder / part.name)
        self.add(whole, content.size, len(tables))
