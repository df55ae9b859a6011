"""Cells: expensive computations of an experiment, spread over an engine, and kept on disk so that none runs twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from typing_extensions import Self

from sqrtdk.engines import Engine, open_engine
from sqrtdk.extending import code_hash, exact_data, numbers_back, numbers_from
from sqrtdk.store import disk
from sqrtdk.store.results import Results
from sqrtdk_lab.claim import Cell

_JUDGING = ("claims/", "catalogue/", "messages/")  # bars and sentences: to change one trains no model again
Compute = Callable[[Cell], dict[str, Any]]


class Cells:
    """A map over cells: `cells(function, list_of_cells)` returns the results in order.

    Equal cells are computed once. With a folder each result is a file, written whole at once, so that an interrupted
    run continues where it stopped. The file's name is a hash of the cell, the source texts of the function and of this
    package without the claims, and the versions of Python and the libraries; a change of any of them computes the cell
    anew.

    Args:
        engine: "local", "pool" or "ray"; opened when the first cell must be computed.
        workers: number of processes; None: one per CPU.
        address: of a Ray cluster; None: start one on this machine.
        folder: for the results; it must exist, locked by the caller. None: keep them in memory.
        anew: compute existing results again, once, and replace them.
        progress: called with (done, total) after each cell.

    Raises:
        InvalidValueError, MissingExtraError: See `open_engine`.
    """

    def __init__(
        self,
        engine: str = "local",
        workers: int | None = None,
        address: str | None = None,
        *,
        folder: Path | None = None,
        anew: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._opening = open_engine(engine, workers, address, ("sqrtdk_lab",))
        self._results = None if folder is None else Results(folder)
        self._anew, self.progress = anew, progress
        self._known: dict[str, dict[str, Any]] = {}
        self._engine: Engine | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._engine = None
        self._stack.__exit__(*raised)

    def __call__(self, function: Compute, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """Return the results in the order of the cells."""
        keys = [cell_key(function, cell) for cell in cells]
        missing = {key: cell for key, cell in zip(keys, cells, strict=True) if not self._find(key)}
        if missing:
            self._compute(function, missing)
        return [self._known[key] for key in keys]

    def _compute(self, function: Compute, missing: dict[str, Cell]) -> None:
        if self._engine is None:
            self._engine = self._stack.enter_context(self._opening)
        keys = list(missing)
        for done, (index, result) in enumerate(self._engine.results(function, list(missing.values())), 1):
            self._keep(keys[index], missing[keys[index]], result)
            if self.progress is not None:
                self.progress(done, len(keys))

    def _find(self, key: str) -> bool:
        if key not in self._known and self._results is not None and not self._anew:
            there = self._results.get(key, key)
            if there is None:
                return False
            self._known[key] = numbers_back(there)
        return key in self._known

    def _keep(self, key: str, cell: Cell, result: dict[str, Any]) -> None:
        self._known[key] = numbers_back(exact_data(result))  # exactly what a later run would read
        if self._results is not None:
            self._results.put(key, key, result, computed_from=cell)


def cell_key(function: Compute, cell: Cell) -> str:
    """Return the name of a cell's result: equal for equal cells of the same function, code and versions."""
    made_by = {**numbers_from("sqrtdk_lab"), "code": code_hash(*_JUDGING, packages=("sqrtdk", "sqrtdk_lab"))}
    content = [function.__module__, function.__qualname__, _source(function.__module__), made_by, cell]
    return disk.hash_of(content)


@cache
def _source(module: str) -> str:
    """Return the hash of the module's own file, which need not be in this package."""
    return disk.digest(Path(import_module(module).__file__ or "").read_bytes(), 16)
