"""Runs claims one after the other; each leaves a whole record, and a record that is already there is not made again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqrtdk import _files, _json
from sqrtdk.errors import InvalidValueError, OutputError
from sqrtdk.lab.cells import Cells
from sqrtdk.lab.claim import Claim
from sqrtdk.lab.experiment import environment, run_claim
from sqrtdk.lab.record import Record, read, to_json
from sqrtdk.lab.register import CLAIMS, find

CELLS = "cells"  # the folder of the cells' results, next to the records


@dataclass(frozen=True, slots=True)
class Done:
    """A claim that is done.

    Attributes:
        record: of it.
        reused: whether the record was there before.
        path: of the record's file; None without an output.
    """

    record: Record
    reused: bool
    path: Path | None


def run(
    ids: Sequence[str],
    *,
    quick: bool = False,
    seed: int = 0,
    output: Path | str | None = None,
    force: bool = False,
    engine: str = "pool",
    workers: int | None = None,
    ray_address: str | None = None,
    command: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Done]:
    """Run claims and yield each as it is done.

    Args:
        ids: of claims, or "all".
        quick: with the parameters of the quick runs.
        seed: of everything random.
        output: directory of the records, made if it is missing; None: nothing is written.
        force: replace records of other settings; without it they are an error, and equal ones are reused.
        engine: what computes the cells of training claims: "local", "pool" or "ray".
        workers: of the engine; None: one a CPU.
        ray_address: of a Ray cluster; None: one is started on this machine.
        command: to be kept in the records.
        progress: told what is being done.

    Raises:
        InvalidValueError: no such claim or engine, or a record of another schema version.
        OutputError: the directory can't be written, or holds records of other settings.

    Example:
        >>> [done.record.outcome.verdict.answer for done in run(["onehot-64"], quick=True)]
        ['holds']
    """
    claims = find(ids)
    folder = None if output is None else Path(output)
    cells = Cells(engine, workers, ray_address, folder=folder and folder / CELLS)
    if folder is not None:
        _prepare(folder)
    known = {} if folder is None or force else {claim.id: _known(folder, claim, quick, seed) for claim in claims}
    return _run(claims, quick, seed, folder, known, cells, command, progress)


def _run(
    claims: Sequence[Claim],
    quick: bool,
    seed: int,
    folder: Path | None,
    known: dict[str, Record | None],
    cells: Cells,
    command: str,
    progress: Callable[[str], None],
) -> Iterator[Done]:
    with cells:
        for index, claim in enumerate(claims, 1):
            label = f"{claim.id} ({index} of {len(claims)})"
            progress(label)
            cells.progress = partial(_tell, progress, label)
            path = folder and folder / f"{claim.id}.json"
            record = known.get(claim.id)
            if record is None:
                record = run_claim(claim, quick=quick, seed=seed, compute=cells, command=command)
                if path is not None:
                    _files.write_text(path, to_json(record), force=True)
                yield Done(record, False, path)
            else:
                yield Done(record, True, path)


def _tell(progress: Callable[[str], None], label: str, done: int, total: int) -> None:
    progress(f"{label}: {done} of {total} cells")


def _prepare(folder: Path) -> None:
    try:
        (folder / CELLS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot write into {folder}: {error.strerror}", hint="Choose another directory with --output."
        ) from error
    _files.check_writable(folder / "probe.json", force=True)


def _known(folder: Path, claim: Claim, quick: bool, seed: int) -> Record | None:
    """The record that a run of these settings left here, if there is one."""
    path = folder / f"{claim.id}.json"
    if not path.exists():
        return None
    record = read(path)
    here = environment()
    settings = {
        "quick": (record.quick, quick),
        "seed": (record.seed, seed),
        "sqrtdk": (record.environment.get("sqrtdk"), here["sqrtdk"]),
        "torch": (record.environment.get("torch"), here["torch"]),
        "parameters": (record.outcome.parameters, _plain(claim.settings(quick=quick))),
        "control": (record.control.parameters, _plain(claim.settings(quick=quick, flipped=True))),
    }
    other = [f"{name} {old} instead of {new}" for name, (old, new) in settings.items() if old != new]
    if other:
        raise OutputError(
            f"{path} is a record of another run: {'; '.join(other)}",
            hint="Give another --output, or --force to replace it.",
        )
    return record


def _plain(parameters: object) -> object:
    """As a record keeps them."""
    return json.loads(_json.document(parameters))


def records(folder: Path | str) -> list[Record]:
    """All records of a directory, in the order of the register.

    Raises:
        InvalidValueError: there is no directory or no record in it, or a file that is no record or one of another
            schema version.
    """
    folder = Path(folder)
    found = {path.stem: read(path) for path in sorted(folder.glob("*.json")) if path.stem in CLAIMS}
    if not found:
        raise InvalidValueError(
            f"{folder} holds no records of claims", hint=f"Make some: sqrtdk lab run all --quick --output {folder}"
        )
    return [found[name] for name in CLAIMS if name in found]
