"""Running a sweep: compute what is missing in its directory, join it into one table, and average over the seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sqrtdk._progress import counted
from sqrtdk.engines import open_engine
from sqrtdk.errors import OutputError
from sqrtdk.lab.sweep._cell import measure
from sqrtdk.lab.sweep._grid import AXES, Grid
from sqrtdk.lab.sweep._store import COLUMNS, SCHEMA_VERSION, is_whole, opened, read_table


@dataclass(frozen=True, slots=True)
class Swept:
    """A finished sweep.

    Attributes:
        grid: of it.
        results: the Parquet file, one row a cell.
        computed: cells that this run computed.
        reused: cells that were there.
        damaged: new names of files that were damaged; their cells were computed again.
    """

    grid: Grid
    results: Path
    computed: int
    reused: int
    damaged: tuple[str, ...]


def sweep(
    grid: Grid,
    output: Path | str,
    engine: str = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    force: bool = False,
    command: str = "",
) -> Swept:
    """Measure every cell of a grid, or what a former run of the same grid into the same directory left.

    The table is the same whatever computes it and however often it was interrupted (on machines of one kind: the
    last bits of a sum depend on the CPU).

    Args:
        grid: the cells.
        output: directory, made if it is missing: `manifest.json`, `results.parquet`, and parts until that is whole.
        engine: "local", "pool" or "ray".
        workers: of the engine; None: one a CPU.
        ray_address: of a Ray cluster; None: one is started on this machine.
        progress: told (cells that are there, cells of the grid), first of all and after each; None: a bar shows it.
        force: begin anew, whatever the directory holds; files of other names stay.
        command: to be kept in the manifest.

    Returns:
        Swept.

    Raises:
        OutputError: the directory can't be read or written, is another process's, or holds another grid, numbers of
            other versions or sources of sqrtdk or of another torch, other columns, or no sweep at all.
        InvalidValueError: another schema version, an unknown engine.
        LabError: a cell failed, there is no Ray at the address, or its workers have other versions; the cells that
            ended are kept.
        MissingExtraError: pyarrow or ray is missing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = sweep(Grid(d_k=[16, 64], keys=[8], rows=16), folder)
        >>> done.computed, done.results.name
        (2, 'results.parquet')
    """
    opening = open_engine(engine, workers, ray_address)
    with opened(Path(output), grid, force, command) as store, counted("cells", progress) as count:
        reused = sum(store.there)
        count(reused, len(grid))
        if reused < len(grid):
            with opening as running, store.keeping():
                cells = (grid.cell(place) for place, there in enumerate(store.there) if not there)
                for done, (_, row) in enumerate(running.results(measure, cells), reused + 1):
                    store.add(row)
                    count(done, len(grid))
        store.finish()
        return Swept(grid, store.results, len(grid) - reused, reused, store.damaged)


def summary(swept: Swept) -> dict[str, Any]:
    """The sweep as JSON data: its grid, its files, and each combination averaged over its seeds.

    Standard errors are of the average, sqrt(sum se^2) / seeds; `max_abs_logit` is the largest.

    Raises:
        OutputError: the table can't be read, or was changed since.
    """
    table, places = read_table(swept.results, swept.grid)
    if not is_whole(places, swept.grid):
        raise OutputError(
            f"{swept.results} holds {len(places)} rows that are not the {len(swept.grid)} cells of its grid",
            hint="It was changed since; sweep again.",
        )
    seeds = len(swept.grid.seeds)
    data: dict[str, Any] = {}
    for name in COLUMNS:
        by_seed = table.column(name).to_numpy().reshape(-1, seeds)  # rows are sorted by cell, the seed last
        if name in AXES:
            data[name] = by_seed[:, 0]
        elif name.endswith("_se"):
            data[name] = np.sqrt((by_seed**2).sum(1)) / seeds
        else:
            data[name] = by_seed.max(1) if name == "max_abs_logit" else by_seed.mean(1)
    del data["seed"]
    combinations = zip(*(column.tolist() for column in data.values()), strict=True)
    return {
        "schema_version": SCHEMA_VERSION,
        "grid": swept.grid.content(),
        "results": str(swept.results),
        "cells": len(swept.grid),
        "computed": swept.computed,
        "reused": swept.reused,
        "damaged": list(swept.damaged),
        "combinations": [dict(zip(data, values, strict=True)) for values in combinations],
    }
