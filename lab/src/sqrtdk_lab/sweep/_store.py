"""The directory of a sweep: a manifest, parts while it runs, and one table when it is done.

A part is written whole under another name and then renamed. The table is made from all parts, which are removed only
afterwards. A process killed anywhere in between leaves cells twice or not at all, never half: duplicates are dropped,
and missing cells are computed by the next run. No result is deleted unasked: a damaged file is kept under another name,
and an intact one that does not fit (other columns, versions, grid) ends the run.

The finished sweep is one table, a Parquet file with one row per cell.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sqrtdk.errors import InvalidValueError, OutputError, RunFolderError, kind_and_text
from sqrtdk.extending import json_document, load_extra, numbers_from, parse_json, record_from_json
from sqrtdk.store import disk
from sqrtdk.store.lock import LOCK, locked
from sqrtdk_lab.sweep._cell import EXTREME_COLUMNS, MEASURED, SWEEP_FIGURES
from sqrtdk_lab.sweep._grid import GRID_AXES, Grid

_TEXT_AXES = ("scale", "distribution")
SWEEP_COLUMNS = (
    *GRID_AXES,
    *EXTREME_COLUMNS,
    *(f"{name}{end}" for name in SWEEP_FIGURES for end in ("", "_se", "_expected")),
    *(f"{name}{end}" for name in MEASURED for end in ("", "_se")),
)


_LOOK = "Look at the disk; the same command goes on with what can be read."
_MOVE = "Move the file away, choose another --output, or --force to begin anew."


class DamagedError(OutputError):
    """A file is no intact Parquet table."""


def pyarrow(name: str = "pyarrow") -> Any:
    """Import pyarrow, or a part of it.

    Raises:
        MissingExtraError: it is not installed.
    """
    return load_extra(name)


def _schema() -> Any:
    pa = pyarrow()
    kinds = {**dict.fromkeys(GRID_AXES, pa.int64()), **dict.fromkeys(_TEXT_AXES, pa.string())}
    return pa.schema([pa.field(name, kinds.get(name, pa.float64()), nullable=False) for name in SWEEP_COLUMNS])


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write results of cells."""
    write_table(path, pyarrow().Table.from_pylist(list(rows), schema=_schema()))


def write_table(path: Path, table: Any) -> None:
    """Write a table atomically."""
    sink = pyarrow().BufferOutputStream()
    pyarrow("pyarrow.parquet").write_table(table, sink, write_page_checksum=True)
    disk.put(path, sink.getvalue())


def read_table(path: Path, grid: Grid) -> tuple[Any, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the table of a file, and the place in the grid of each of its rows.

    Raises:
        DamagedError: It is no intact table: it is truncated, or a checksum is wrong.
        OutputError: It can't be read, or it is intact but has other columns or another grid.
    """
    pa = pyarrow()
    try:
        data = path.read_bytes()  # outside the decoding, whose errors are OSErrors too
    except (OSError, MemoryError) as error:
        raise OutputError(f"cannot read {path}: {kind_and_text(error)}", hint=_LOOK) from error
    try:
        file = pyarrow("pyarrow.parquet").ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        table = file.read(use_threads=False)
        names = table.column_names
    except MemoryError as error:  # Arrow raises it too
        raise OutputError(f"cannot read {path}: {kind_and_text(error)}", hint=_LOOK) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"{path} is damaged: {kind_and_text(error)}", hint=_LOOK) from error
    if not table.schema.equals(_schema()):
        other = sorted(set(SWEEP_COLUMNS) ^ set(names))
        what = f"other columns than this version writes: {', '.join(other)}" if other else "columns in another order"
        raise OutputError(f"{path} has {what}", hint=_MOVE)
    try:
        cells = zip(*(table.column(axis).to_pylist() for axis in GRID_AXES), strict=True)
        places = np.fromiter(grid.places(cells), dtype=np.int64, count=table.num_rows)
    except KeyError as error:
        raise OutputError(f"{path} holds cells of another grid: {error} is not in this one", hint=_MOVE) from error
    return table, places


def is_whole(places: np.ndarray[Any, np.dtype[np.int64]], grid: Grid) -> bool:
    """Return whether a table's rows are the grid's cells, in order and each once."""
    return np.array_equal(places, np.arange(len(grid)))


def join_parts(parts: Sequence[tuple[Any, np.ndarray[Any, np.dtype[np.int64]]]]) -> Any:
    """Join all parts into one table, sorted by place, each place once."""
    table = pyarrow().concat_tables([table for table, _ in parts])
    _, first = np.unique(np.concatenate([places for _, places in parts]), return_index=True)
    return table.take(pyarrow().array(first)).combine_chunks()


SCHEMA_VERSION = 1
MANIFEST, RESULTS, PARTS = "manifest.json", "results.parquet", "part-*.parquet"
_OURS = (MANIFEST, RESULTS, PARTS)
_PART_EVERY_S = 1.0  # work that a kill may cost; a part per cell would be a million files
_DECIDE = ("sqrtdk", "code", "torch")  # versions that decide the numbers
_MAX_MANIFEST = 2**22  # bytes


class SweepStore:
    """The directory of a sweep, while only this process writes it; `opened` returns one."""

    def __init__(self, folder: Path, grid: Grid) -> None:
        self.folder, self.grid = folder, grid
        self.there = bytearray(len(grid))  # 1 for each cell that is on disk
        self.damaged: tuple[str, ...] = ()
        self._whole = False  # whether the results file has all cells in order
        self._waiting: list[dict[str, Any]] = []
        self._next_part = 0
        self._last_part = time.monotonic()

    @property
    def results(self) -> Path:
        """The table of a finished sweep."""
        return self.folder / RESULTS

    def scan(self) -> None:
        """Find the existing cells; a damaged file is renamed and listed."""
        damaged = []
        for path in self.tables():
            try:
                _, places = read_table(path, self.grid)
            except DamagedError:
                damaged.append(_set_aside(path).name)
                continue
            self._whole |= path == self.results and is_whole(places, self.grid)
            for place in places.tolist():
                self.there[place] = 1
        self.damaged = tuple(damaged)
        numbers = [int(path.stem.removeprefix("part-")) for path in self.folder.glob(PARTS)]
        self._next_part = max(numbers, default=-1) + 1

    def tables(self) -> list[Path]:
        """Return the files with results."""
        found = sorted(self.folder.glob(PARTS))
        return [self.results, *found] if self.results.exists() else found

    @contextlib.contextmanager
    def keeping(self) -> Iterator[SweepStore]:
        """Write the added rows when the block ends, in whatever way it ends."""
        try:
            yield self
        finally:
            self._write_part()

    def add(self, row: dict[str, Any]) -> None:
        """Store the result of a cell."""
        self._waiting.append(row)
        if time.monotonic() - self._last_part >= _PART_EVERY_S:
            self._write_part()

    def _write_part(self) -> None:
        if self._waiting:
            write_rows(self.folder / f"part-{self._next_part:05d}.parquet", self._waiting)
            self._next_part += 1
            self._waiting = []
        self._last_part = time.monotonic()

    def finish(self) -> None:
        """Join the parts into one table, sorted by cell.

        Raises:
            OutputError: A part can't be read, or cells are missing; the parts stay.
        """
        parts = sorted(self.folder.glob(PARTS))
        if not self._whole:
            found = [read_table(path, self.grid) for path in self.tables()]
            table = join_parts(found) if found else found
            if len(table) != len(self.grid):
                raise OutputError(
                    f"{self.folder} holds {len(table)} of {len(self.grid)} cells though all were computed",
                    hint="Files went since they were written; the same command computes what is missing.",
                )
            write_table(self.results, table)
        for path in parts:
            path.unlink(missing_ok=True)


def _set_aside(path: Path) -> Path:
    """Rename a damaged file to NAME.damaged, or NAME.damaged-2 and so on if that name is taken."""
    name = path.with_name(f"{path.name}.damaged")
    number = 2
    while name.exists():
        name, number = path.with_name(f"{path.name}.damaged-{number}"), number + 1
    try:
        path.rename(name)
    except OSError as error:
        raise OutputError(
            f"cannot rename the damaged {path}: {error.strerror}", hint="Move it away, or choose another --output."
        ) from error
    return name


@contextlib.contextmanager
def opened(folder: Path, grid: Grid, force: bool, command: str) -> Iterator[SweepStore]:
    """Open the directory of a sweep, new or to be continued.

    Raises:
        OutputError: It can't be written, is in use by another process, or holds something else; see `sweep`.
        InvalidValueError: It has another schema version.
        MissingExtraError: pyarrow is missing.
    """
    pyarrow()
    with locked(folder, *_OURS):
        if force:
            for name in _OURS:
                for path in folder.glob(name):
                    path.unlink()
        store = SweepStore(folder, grid)
        begun = _manifest(folder, force)
        if begun is not None:
            _check_grid(folder, begun, grid)
            if store.tables():
                _check_versions(folder, begun)
            store.scan()
        if begun is None or not any(store.there):
            manifest = {
                "schema_version": SCHEMA_VERSION,
                "grid": grid.content(),
                "versions": versions(),
                "command": command,
            }
            disk.put(folder / MANIFEST, json_document(manifest).encode())
        yield store


def versions() -> dict[str, str]:
    """Return the versions that decide the numbers, and the version that writes the files."""
    return {**numbers_from("sqrtdk_lab"), "pyarrow": pyarrow().__version__}


@dataclass(frozen=True, slots=True)
class _Manifest:
    schema_version: int
    grid: dict[str, Any]
    versions: dict[str, str]


def _manifest(folder: Path, force: bool) -> _Manifest | None:
    path = folder / MANIFEST
    what, hint = f"{path} is not the manifest of a sweep: it", "Choose another --output, or --force to begin anew."
    try:
        document = parse_json(disk.take(path, _MAX_MANIFEST), what, OutputError, hint)
    except FileNotFoundError:
        if not force and any(path.name != LOCK for path in folder.iterdir()):
            raise OutputError(
                f"{folder} is not empty and holds no sweep: there is no {MANIFEST}",
                hint="Choose another --output, or --force to sweep into it.",
            ) from None
        return None
    except RunFolderError as error:
        raise OutputError(f"{path}: {error}", hint=hint) from error
    manifest = record_from_json(_Manifest, document, what, OutputError, hint, others=True)
    if manifest.schema_version != SCHEMA_VERSION:
        raise InvalidValueError(
            f"{folder} was written in schema version {manifest.schema_version}; "
            f"this version of sqrtdk writes {SCHEMA_VERSION}",
            hint=hint,
        )
    return manifest


def _check_grid(folder: Path, manifest: _Manifest, grid: Grid) -> None:
    here, there = grid.content(), manifest.grid
    names = [name for name in here | there if there.get(name) != here.get(name)]
    if names:
        other = "; ".join(f"{name} is {there.get(name)} there and {here.get(name)} here" for name in names)
        raise OutputError(
            f"{folder} holds a sweep of another grid: {other}",
            hint="Choose another --output, or --force to begin anew and lose what is there.",
        )


def _check_versions(folder: Path, manifest: _Manifest) -> None:
    here, there = versions(), manifest.versions
    pairs = {name: (there.get(name), here[name]) for name in _DECIDE}
    other = [f"{name} {old}, now {new}" for name, (old, new) in pairs.items() if old != new]
    if other:
        raise OutputError(
            f"{folder} holds numbers of other versions, which may differ: {'; '.join(other)}",
            hint="Take the old versions, choose another --output, or --force to begin anew.",
        )
