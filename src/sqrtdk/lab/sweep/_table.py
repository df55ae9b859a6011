"""The table of a sweep, one row a cell, in Parquet files with checksums."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sqrtdk import _files
from sqrtdk.errors import MissingExtraError
from sqrtdk.lab.sweep._cell import AXES, EXTREMES, FIGURES, MEASURED
from sqrtdk.lab.sweep._grid import Grid

_TEXTS = ("scale", "distribution")
COLUMNS = (
    *AXES,
    *EXTREMES,
    *(f"{name}{end}" for name in FIGURES for end in ("", "_se", "_expected")),
    *(f"{name}{end}" for name in MEASURED for end in ("", "_se")),
)


class DamagedError(Exception):
    """A file is not a whole table of this grid."""


def pyarrow(name: str = "pyarrow") -> Any:
    """Import pyarrow, or a part of it.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"a sweep needs pyarrow: {error}", hint="Run: pip install 'sqrtdk[lab]'") from error


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
        DamagedError: it can't be read, has other columns, or rows of another grid.
    """
    pa = pyarrow()
    try:
        with open(path, "rb") as file:  # no path, from whose folders pyarrow would infer columns
            table = (
                pyarrow("pyarrow.parquet").ParquetFile(file, page_checksum_verification=True).read(use_threads=False)
            )
        if not table.schema.equals(_schema()):
            raise DamagedError("other columns")
        cells = zip(*(table.column(axis).to_pylist() for axis in AXES), strict=True)
        places = np.fromiter(grid.places(cells), dtype=np.int64, count=table.num_rows)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DamagedError(str(error)) from error
    return table, places


def joined(parts: Sequence[tuple[Any, np.ndarray[Any, np.dtype[np.int64]]]]) -> Any:
    """One table of all parts: sorted by place, each place once."""
    table = pyarrow().concat_tables([table for table, _ in parts])
    _, first = np.unique(np.concatenate([places for _, places in parts]), return_index=True)
    return table.take(pyarrow().array(first)).combine_chunks()
