"""Runs a sweep: computes the missing cells of its directory, joins all into one table, and averages over the seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sqrtdk.engines import open_engine
from sqrtdk.errors import OutputError
from sqrtdk.extending import progress_counted
from sqrtdk_lab.sweep._cell import measure
from sqrtdk_lab.sweep._grid import GRID_AXES, Grid
from sqrtdk_lab.sweep._store import SCHEMA_VERSION, SWEEP_COLUMNS, is_whole, opened, read_table


@dataclass(frozen=True, slots=True)
class Swept:
    """A finished sweep.

    Attributes:
        grid: of the sweep.
        results: the Parquet file, one row per cell.
        computed: cells that this run computed.
        reused: cells that existed before.
        damaged: new names of damaged files; their cells were computed again.
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
    """Measure every cell of a grid that earlier runs into the same directory did not finish.

    The table is the same on every engine and after any interruption (on machines of one kind: the last bits of a sum
    depend on the CPU).

    Args:
        grid: the cells.
        output: directory, made if missing: `manifest.json`, `results.parquet`, and parts until that is complete.
        engine: "local", "pool" or "ray".
        workers: of the engine; None: one per CPU.
        ray_address: of a Ray cluster; None: start one on this machine.
        progress: called with (existing cells, cells of the grid) at the start and after each; None: show a bar.
        force: start over, whatever the directory holds; files of other names stay.
        command: stored in the manifest.

    Returns:
        Swept.

    Raises:
        OutputError: The directory can't be read or written, is in use by another process, or holds another grid,
            numbers of other versions or sources of sqrtdk or of another torch, other columns, or no sweep at all.
        InvalidValueError: The schema version differs, or the engine is unknown.
        LabError: A cell failed, no Ray is at the address, or its workers have other versions; finished cells are kept.
        MissingExtraError: pyarrow or ray is missing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = sweep(Grid(d_k=[16, 64], keys=[8], rows=16), folder)
        >>> done.computed, done.results.name
        (2, 'results.parquet')
    """
    opening = open_engine(engine, workers, ray_address, ("sqrtdk_lab",))
    with opened(Path(output), grid, force, command) as store, progress_counted("cells", progress) as count:
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
    """Return the sweep as JSON data: its grid, its files, and each combination averaged over its seeds.

    Standard errors are of the average, sqrt(sum se^2) / seeds; `max_abs_logit` is the largest.

    Raises:
        OutputError: The table can't be read, or was changed since.
    """
    table, places = read_table(swept.results, swept.grid)
    if not is_whole(places, swept.grid):
        raise OutputError(
            f"{swept.results} holds {len(places)} rows that are not the {len(swept.grid)} cells of its grid",
            hint="It was changed since; sweep again.",
        )
    seeds = len(swept.grid.seeds)
    data: dict[str, Any] = {}
    for name in SWEEP_COLUMNS:
        by_seed = table.column(name).to_numpy().reshape(-1, seeds)  # rows are sorted by cell, the seed last
        if name in GRID_AXES:
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
