"""What a finished sweep says, seed by seed taken together."""

from __future__ import annotations

from typing import Any

import numpy as np

from sqrtdk.errors import OutputError
from sqrtdk.lab.sweep._cell import AXES
from sqrtdk.lab.sweep._store import SCHEMA_VERSION
from sqrtdk.lab.sweep._sweep import Swept
from sqrtdk.lab.sweep._table import COLUMNS, is_whole, read_table


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
