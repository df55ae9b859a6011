"""Runs claims one after the other: the experiment, its control, the verdicts and the record of each.

Each run leaves a complete record, and an existing record is not made again.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TypedDict, overload

import torch
from typing_extensions import Unpack

from sqrtdk.errors import InvalidValueError, OutputError
from sqrtdk.extending import Tell, check_writable, cpu_name, load_extra, numbers_from, plain_data, progress_bar
from sqrtdk.messages import Message
from sqrtdk.models.run import on_cpu_by_default
from sqrtdk.store import disk
from sqrtdk.store.lock import locked
from sqrtdk_lab._drawn import Drawn
from sqrtdk_lab.cells import Cells
from sqrtdk_lab.claim import Claim, ExperimentRun, Map, compute_in_process
from sqrtdk_lab.figures import Figures, Plot
from sqrtdk_lab.judge import judge_claim
from sqrtdk_lab.record import Outcome, Record, read_record, to_json
from sqrtdk_lab.register import CLAIMS, find_claims


def run_claim(
    claim: Claim, *, quick: bool = False, seed: int = 0, compute: Map = compute_in_process, command: str = ""
) -> Record:
    """Measure a claim and its control, and judge both.

    Args:
        claim: from `sqrtdk_lab.register.CLAIMS`.
        quick: use the parameters of the quick run.
        seed: of all randomness.
        compute: computes cells; see `ExperimentRun.map`.
        command: stored in the record.

    Returns:
        The record.
    """
    started, begin = datetime.now(timezone.utc), time.monotonic()
    outcome, plots = _outcome(claim, quick, False, seed, compute)
    control, _ = _outcome(claim, quick, True, seed, compute)
    return Record(
        id=claim.id,
        group=claim.group,
        sources=claim.sources,
        statement=claim.statement,
        formula=claim.formula,
        method=claim.method,
        control_method=claim.control,
        why=claim.why(Figures(list(outcome.figures))),
        quick=quick,
        seed=seed,
        outcome=outcome,
        control=control,
        condition=claim.condition if outcome.verdict.answer == "depends" else None,
        plots=plots,
        environment=lab_environment(),
        command=command,
        started=started.isoformat(timespec="seconds"),
        duration_s=round(time.monotonic() - begin, 3),
    )


def _outcome(claim: Claim, quick: bool, flipped: bool, seed: int, compute: Map) -> tuple[Outcome, tuple[Plot, ...]]:
    parameters = claim.settings(quick=quick, flipped=flipped)
    measured = claim.measure(ExperimentRun(parameters, seed, compute))
    verdict = judge_claim(Figures(measured.figures), claim.parts)
    return Outcome(parameters, tuple(measured.figures), verdict), measured.plots


def lab_environment() -> dict[str, str]:
    """Return code, versions and machine, as text."""
    return {
        **numbers_from("sqrtdk_lab"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }


CELLS_FOLDER = "cells"  # the folder of the cells' results, next to the records
PLOTS = ("svg", "png")
_NEEDED_PACKAGES = ("scipy.stats", "sklearn.datasets")  # experiments need them, perhaps an hour after the start
Draw = Callable[[Record, Path, bool], object]


@dataclass(frozen=True, slots=True)
class Done(Drawn):
    """A finished claim; `save` and `to_json` write its record.

    Attributes:
        record: its record.
        reused: whether the record existed before.
        path: of the record's file; None without an output.
    """

    record: Record
    reused: bool
    path: Path | None

    def _record(self) -> Record:
        return self.record

    def __repr__(self) -> str:
        where = "not written" if self.path is None else repr(str(self.path))
        return f"Done({self.record!r}, {where}{', reused' if self.reused else ''})"


class RunSettings(TypedDict, total=False):
    """The arguments of `run` other than ids."""

    quick: bool
    seed: int
    output: Path | str | None
    force: bool
    engine: str
    workers: int | None
    ray_address: str | None
    command: str
    progress: Callable[[str], None] | None
    draw: Draw | None


@overload
def run(ids: str, **settings: Unpack[RunSettings]) -> Done: ...


@overload
def run(ids: list[str] | tuple[str, ...], **settings: Unpack[RunSettings]) -> Iterator[Done]: ...


def run(
    ids: str | Sequence[str],
    *,
    quick: bool = False,
    seed: int = 0,
    output: Path | str | None = None,
    force: bool = False,
    engine: str = "pool",
    workers: int | None = None,
    ray_address: str | None = None,
    command: str = "",
    progress: Callable[[str], None] | None = None,
    draw: Draw | None = None,
) -> Done | Iterator[Done]:
    """Run one claim, or several, each of which is yielded when it is done.

    Args:
        ids: id of one claim; or a list of ids, where "all" stands for the whole register.
        quick: use the parameters of the quick runs.
        seed: of all randomness; 0 or more.
        output: directory of the records, made if missing; None: nothing is written.
        force: measure again and replace existing records. Without it, records of other settings are an error, and equal
            records are reused, as are the cells of an interrupted run.
        engine: computes the cells of training claims: "local", "pool" or "ray".
        workers: of the engine; None: one per CPU.
        ray_address: of a Ray cluster; None: start one on this machine.
        command: stored in the records.
        progress: called with the current work; None: show a bar.
        draw: called with (record, output, whether it is reused) before the record is written, so that a record never
            lacks its plots. `sqrtdk_lab.report.plots.write_plots` is one.

    Returns:
        The finished claim; for a list of ids an iterator, which runs a claim when the next is requested.

    Raises:
        InvalidValueError: There is no such claim or engine, "all" is outside a list, the seed is negative, or a file is
            no record of the claim or has another schema version.
        MissingExtraError: scipy or scikit-learn is missing.
        OutputError: The directory can't be written, is in use by another process, or holds records of other settings.

    Example:
        >>> run("onehot-64", quick=True).record.outcome.verdict.answer
        'holds'
        >>> [done.record.id for done in run(["onehot-64", "params-single"], quick=True)]
        ['onehot-64', 'params-single']
    """
    if ids == "all":
        raise InvalidValueError("one id is one claim; got 'all'", hint='Give a list: run(["all"]).')
    claims = find_claims([ids] if isinstance(ids, str) else ids)
    if seed < 0:
        raise InvalidValueError(f"a seed is 0 or more; got {seed}", hint="Take 0, 1, 2, ...")
    folder = None if output is None else Path(output)
    cells = Cells(engine, workers, ray_address, folder=folder and folder / CELLS_FOLDER, anew=force)
    # A missing package is an error now, not after the experiments that do not need it.
    for module in _NEEDED_PACKAGES:
        load_extra(module)
    measure = partial(run_claim, quick=quick, seed=seed, compute=cells, command=command)
    find_known = (lambda path, claim: None) if force else partial(_known, quick=quick, seed=seed)
    running = _run(claims, measure, cells, folder, find_known, draw, progress)
    if isinstance(ids, str):
        (done,) = running
        return done
    return running


def _run(
    claims: Sequence[Claim],
    measure: Callable[[Claim], Record],
    cells: Cells,
    folder: Path | None,
    find_known: Callable[[Path, Claim], Record | None],
    draw: Draw | None,
    progress: Callable[[str], None] | None,
) -> Iterator[Done]:
    with contextlib.ExitStack() as stack:
        say = _told(progress) if progress is not None else stack.enter_context(progress_bar("claims"))
        paths = {} if folder is None else {claim.id: folder / f"{claim.id}.json" for claim in claims}
        if folder is not None:
            stack.enter_context(_held(folder))
            for path in paths.values():
                # Before the first claim runs: a record that can't be written costs hours of measuring.
                check_writable(path, force=True)
        known = {claim.id: find_known(paths[claim.id], claim) for claim in claims if paths}
        stack.enter_context(cells)
        for index, claim in enumerate(claims, 1):
            label = f"{claim.id} ({index} of {len(claims)})"
            say(label, 0, 0)
            cells.progress = partial(say, label)
            there = known.get(claim.id)
            # A user's torch.set_default_device("cuda") would change the numbers and their generator.
            with on_cpu_by_default():
                found = there or measure(claim)
            done = Done(found, there is not None, paths.get(claim.id))
            if done.path is not None:
                _keep(done.record, done.path, done.reused, draw)
            yield done


def _keep(record: Record, path: Path, reused: bool, draw: Draw | None) -> None:
    """Write plots and record. The old record is removed first and the new one written last, so plots always fit it."""
    folder = path.parent
    if not reused:
        path.unlink(missing_ok=True)
        for old in (old for kind in PLOTS for old in folder.glob(f"{record.id}-*.{kind}") if old.is_file()):
            old.unlink()
    if draw is not None:
        draw(record, folder, reused)
    if not reused:
        disk.put(path, to_json(record).encode())


def _told(progress: Callable[[str], None]) -> Tell:
    return lambda label, done, total: progress(
        Message("progress.cells_done", claim=label, done=done, total=total) if total else label
    )


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Make the directory if missing, and lock it for this process."""
    with locked(folder, "*.json", *(f"*.{kind}" for kind in PLOTS)):
        disk.make(folder / CELLS_FOLDER)
        disk.tidy(folder / CELLS_FOLDER, "*.json")
        yield


def _known(path: Path, claim: Claim, quick: bool, seed: int) -> Record | None:
    """Return the record that a run with these settings left here; None if there is none."""
    if not path.exists():
        return None
    record = _read(path)
    here = numbers_from("sqrtdk_lab")
    settings: dict[str, tuple[object, object]] = {
        "quick": (record.quick, quick),
        "seed": (record.seed, seed),
        **{name: (record.environment.get(name), here[name]) for name in here},
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


def _read(path: Path) -> Record:
    # A renamed file would pass for the record of another claim.
    record = read_record(path)
    if record.id != path.stem:
        raise InvalidValueError(
            f"{path} is a record of the claim {record.id!r}, not of {path.stem!r}",
            hint=f"Call it {record.id}.json, or delete it and run the claim again.",
        )
    return record


def _plain(parameters: object) -> object:
    """Return the parameters as a record stores them."""
    return plain_data(parameters)


def records(folder: Path | str) -> list[Record]:
    """Return all records of a directory, in the order of the register.

    Raises:
        InvalidValueError: The directory is missing or has no record, or a file is no record of the claim in its name,
            or has another schema version.
    """
    folder = Path(folder)
    found = {path.stem: _read(path) for path in sorted(folder.glob("*.json")) if path.stem in CLAIMS}
    if not found:
        raise InvalidValueError(
            Message("errors.lab.no_records", folder=str(folder)),
            hint=Message("errors.hint.run_all", folder=str(folder)),
        )
    return [found[name] for name in CLAIMS if name in found]


def claims_without_record(found: Sequence[Record]) -> list[str]:
    """Return the claims of the register that have no record here.

    Example:
        >>> len(claims_without_record([])) == len(CLAIMS)
        True
    """
    return [name for name in CLAIMS if name not in {record.id for record in found}]
