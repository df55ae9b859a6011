"""The table of a sweep, one row a cell, in Parquet files with checksums."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sqrtdk import _extras, _files
from sqrtdk.errors import OutputError, kind_and_text
from sqrtdk.lab.sweep._cell import AXES, EXTREMES, FIGURES, MEASURED
from sqrtdk.lab.sweep._grid import Grid

_TEXTS = ("scale", "distribution")
COLUMNS = (
    *AXES,
    *EXTREMES,
    *(f"{name}{end}" for name in FIGURES for end in ("", "_se", "_expected")),
    *(f"{name}{end}" for name in MEASURED for end in ("", "_se")),
)


_LOOK = "Look at the disk; the same command goes on with what can be read."
_MOVE = "Move the file away, choose another --output, or --force to begin anew."


class DamagedError(OutputError):
    """What a file holds is no whole Parquet table."""


def pyarrow(name: str = "pyarrow") -> Any:
    """Import pyarrow, or a part of it.

    Raises:
        MissingExtraError: it is not installed.
    """
    return _extras.load(name)


def _schema() -> Any:
    pa = pyarrow()
    kinds = {**dict.fromkeys(AXES, pa.int64()), **dict.fromkeys(_TEXTS, pa.string())}
    return pa.schema([pa.field(name, kinds.get(name, pa.float64()), nullable=False) for name in COLUMNS])


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write results of cells."""
    write_table(path, pyarrow().Table.from_pylist(list(rows), schema=_schema()))


def write_table(path: Path, table: Any) -> None:
    """Write a table, all of it or nothing."""
    sink = pyarrow().BufferOutputStream()
    pyarrow("pyarrow.parquet").write_table(table, sink, write_page_checksum=True)
    _files.write_bytes(path, sink.getvalue(), force=True)


def read_table(path: Path, grid: Grid) -> tuple[Any, np.ndarray[Any, np.dtype[np.int64]]]:
    """The table of a file, and the place in the grid of each of its rows.

    Raises:
        DamagedError: its bytes are no whole table: it was cut, or a checksum is wrong.
        OutputError: it can't be read, or is whole but of other columns or of another grid.
    """
    pa = pyarrow()
    try:
        data = path.read_bytes()  # apart from the decoding, whose errors are OSErrors as well
    except (OSError, MemoryError) as error:
        raise OutputError(f"cannot read {path}: {kind_and_text(error)}", hint=_LOOK) from error
    try:
        file = pyarrow("pyarrow.parquet").ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        table = file.read(use_threads=False)
        names = table.column_names
    except MemoryError as error:  # of Arrow too
        raise OutputError(f"cannot read {path}: {kind_and_text(error)}", hint=_LOOK) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"{path} is damaged: {kind_and_text(error)}", hint=_LOOK) from error
    if not table.schema.equals(_schema()):
        other = sorted(set(COLUMNS) ^ set(names))
        what = f"other columns than this version writes: {', '.join(other)}" if other else "columns in another order"
        raise OutputError(f"{path} has {what}", hint=_MOVE)
    try:
        cells = zip(*(table.column(axis).to_pylist() for axis in AXES), strict=True)
        places = np.fromiter(grid.places(cells), dtype=np.int64, count=table.num_rows)
    except KeyError as error:
        raise OutputError(f"{path} holds cells of another grid: {error} is not in this one", hint=_MOVE) from error
    return table, places


def is_whole(places: np.ndarray[Any, np.dtype[np.int64]], grid: Grid) -> bool:
    """Whether a table's rows are the grid's cells, in order and each once."""
    return np.array_equal(places, np.arange(len(grid)))


def joined(parts: Sequence[tuple[Any, np.ndarray[Any, np.dtype[np.int64]]]]) -> Any:
    """One table of all parts: sorted by place, each place once."""
    table = pyarrow().concat_tables([table for table, _ in parts])
    _, first = np.unique(np.concatenate([places for _, places in parts]), return_index=True)
    return table.take(pyarrow().array(first)).combine_chunks()
