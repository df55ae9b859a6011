"""A series of checkpoints: new ones are measured on an engine, then all results are written as the records of runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqrtdk._progress import progress_counted
from sqrtdk.engines import Cell, Engine, open_engine
from sqrtdk.errors import InvalidValueError, LabError, MissingExtraError, ModelError, RunFolderError, said_by
from sqrtdk.models.build import parse_dtype
from sqrtdk.models.input_file import read_tensors
from sqrtdk.models.limits import check_seed, check_sizes, read_bytes
from sqrtdk.models.options import ATTN, LoadOptions
from sqrtdk.models.tokens import read_text
from sqrtdk.monitor.checkpoints._find import Checkpoint, find_checkpoints, names
from sqrtdk.monitor.checkpoints._measure import (
    Result,
    files_of,
    measure_checkpoint,
    read_result,
    result_key,
    result_name,
    transformers_version,
)
from sqrtdk.monitor.checkpoints._records import Point, forget_renamed, notes_of, refuse_other, write_run
from sqrtdk.monitor.folder import CHECKPOINTS
from sqrtdk.monitor.tables import arrow
from sqrtdk.store.disk import digest
from sqrtdk.store.lock import locked
from sqrtdk.store.manifest import RUN
from sqrtdk.store.results import Results

MAX_HASHED_INPUT_BYTES = 2**31
_LOAD_DEFAULTS = LoadOptions()
# make no sense for a directory that is measured with its weights
_LEFT_OUT = ("static", "revision", "device_map", "offload_folder")
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CheckpointSeries:
    """The outcome for a set of checkpoints.

    Attributes:
        runs: folders of the records, one for each directory of checkpoints.
        computed: number of checkpoints measured by this call.
        reused: number of checkpoints with a kept result.
        failed: checkpoints that could not be measured, and why.
        left_out: files that a pattern matched.
        notes: choices made for the user: random ids, another dtype.
    """

    runs: tuple[Path, ...]
    computed: int
    reused: int
    failed: tuple[tuple[Checkpoint, str], ...]
    left_out: tuple[Path, ...]
    notes: tuple[str, ...]


def measure_checkpoints(
    patterns: Sequence[str | Path],
    output: str | Path,
    options: LoadOptions = _LOAD_DEFAULTS,
    *,
    rows: int | None = None,
    engine: str = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    progress: OnProgress | None = None,
    anew: bool = False,
) -> CheckpointSeries:
    """Measure and audit checkpoints of training runs, all on the same inputs, and write the records of a watch.

    Each checkpoint is loaded, measured in one forward pass in evaluation mode without gradients, and audited as by
    `check`, whose findings become alarms of its step. Such an alarm is shown once, and again only if it is more severe.
    Alarms that look back do so over the series. A checkpoint that can't be measured is a step with its reason, and an
    alarm. Results are kept as they come: after an interruption the same call goes on, and measures only checkpoints
    that changed or failed. The records are the same on every engine.

    Args:
        patterns: directories of checkpoints, or patterns of directories; see `find_checkpoints`.
        output: folder of the records. Checkpoints in several directories belong to several runs, each with its own
            folder in it. Results are kept in its `checkpoints/`.
        options: of loading, and of the inputs.
        rows: measure at most this many rows of a sequence, evenly spread; None: all. The audit uses all rows.
        engine: "local", "pool" or "ray"; its machines see the checkpoints under the same paths.
        workers: number of workers; None: one per CPU.
        ray_address: address of a Ray cluster; None: start one on this machine.
        progress: called with (checkpoints with a result, all checkpoints) at the start and after each; None: show a
            bar.
        anew: measure all checkpoints again.

    Raises:
        InvalidValueError: An option is out of its range, the engine is unknown, or see `find_checkpoints`.
        ModelError: The dtype does not exist, or the file of the text or the inputs can't be read.
        OutputError: `output` can't be written, is in use by another process, or holds something else.
        LabError: No Ray is at the address, or its workers have other versions; the results so far are kept.
        MissingExtraError: pyarrow, transformers or ray is missing.

    Example:
        >>> import tempfile
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from sqrtdk.monitor.reading import read_run
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (10, 20):
        ...         model.save_pretrained(f"{folder}/checkpoint-{step}")
        ...     done = measure_checkpoints([f"{folder}/checkpoint-*"], f"{folder}/series")
        ...     done.computed, read_run(done.runs[0]).heads["step"].to_pylist()
        (2, [10, 10, 20, 20])
    """
    arrow()
    opening = open_engine(engine, workers, ray_address)
    cells, settings = _checked(options, rows)
    checkpoints, left_out = find_checkpoints(patterns, Path(output))
    if transformers_version() is None:
        raise MissingExtraError("transformers is not installed", hint="Install it: pip install 'sqrtdk[hf]'")
    output = Path(output)
    folders = {run: output / name for run, name in names([one.run for one in checkpoints]).items()}
    for folder in (*folders.values(), *([output] if os.path.lexists(output / RUN) else [])):
        refuse_other(folder)
    stored = Results(output / CHECKPOINTS)
    with locked(output / CHECKPOINTS, "*"), progress_counted("checkpoints", progress) as count:
        state = {one: files_of(one.path) for one in checkpoints}
        keys = {one: result_key(one, state[one], settings) for one in checkpoints}
        results = {} if anew else _there(stored, keys)
        reused = len(results)
        missing = [one for one in checkpoints if one not in results]
        count(reused, len(checkpoints))
        cell = [{"path": str(one.path), "step": one.step, **cells} for one in missing]
        for at, document in _measured(opening, cell):
            one = missing[at]
            if "reason" not in document:
                stored.put(result_name(one), keys[one], document, computed_from=str(one.path))
            results[one] = read_result(document)
            count(len(results), len(checkpoints))
        forget_renamed(output, folders)
        notes: list[str] = []
        for run, folder in folders.items():
            points = [Point(one, results[one], state[one].time) for one in checkpoints if one.run == run]
            notes += (choices := notes_of(points))
            write_run(folder, points, {"run": str(run), **settings, "notes": choices})
    failed = tuple((one, results[one].reason or "") for one in missing if results[one].sample is None)
    return CheckpointSeries(
        tuple(folders.values()), len(missing), reused, failed, left_out, tuple(dict.fromkeys(notes))
    )


def _there(stored: Results, keys: dict[Checkpoint, str]) -> dict[Checkpoint, Result]:
    there: dict[Checkpoint, Result] = {}
    for one, key in keys.items():
        with suppress(RunFolderError):  # a damaged result is computed again
            if (document := stored.get(result_name(one), key)) is not None:
                there[one] = read_result(document)
    return there


def _measured(opening: AbstractContextManager[Engine], cells: Sequence[Cell]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield index and result of each cell as it ends; the engine is opened only if there are cells."""
    if not cells:
        return
    with opening as engine:
        left = dict(enumerate(cells))
        for index, document in _survived(engine, cells):
            del left[index]
            yield index, _same_version(document)
        for index, cell in left.items():  # alone on a worker, a checkpoint that kills it is identified
            try:
                (_, document), *_ = engine.results(measure_checkpoint, [cell])
            except LabError as error:
                document = {"loss": None, "state": "", "transformers": transformers_version()}
                document["reason"] = said_by(error)
            yield index, _same_version(document)


def _survived(engine: Engine, cells: Sequence[Cell]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield results until the engine gives up on dying workers; `measure_checkpoint` itself raises nothing."""
    results = engine.results(measure_checkpoint, cells)
    while True:
        try:
            index, document = next(results)
        except (StopIteration, LabError):
            return
        yield index, document


def _same_version(document: dict[str, Any]) -> dict[str, Any]:
    theirs, ours = document["transformers"], transformers_version()
    if theirs != ours:
        raise LabError(
            f"a worker has transformers {theirs}, this process {ours}: they may give other numbers",
            hint="Install the same versions in both places, or take the engine 'pool'.",
        )
    return document


def _checked(options: LoadOptions, rows: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of each cell, and the settings for the records, with files identified by their content.

    Raises:
        InvalidValueError, ModelError: See `measure_checkpoints`.
    """
    check_seed(options.seed)
    check_sizes(options.rows, options.seq_len)
    dtype = parse_dtype(options.dtype)
    if rows is not None and (type(rows) is not int or rows < 2):
        raise InvalidValueError(f"rows is a whole number from 2 on, or None; got {rows!r}", hint="None: all rows.")
    if options.attn is not None and options.attn not in ATTN:
        raise InvalidValueError(f"attn is {options.attn!r}", hint=f"Use one of: {', '.join(ATTN)}.")
    plain: dict[str, Any] = asdict(options)
    for name in _LEFT_OUT:
        if plain.pop(name):
            raise InvalidValueError(f"{name} is not for checkpoints, which are measured with their weights", hint="")
    plain["dtype"] = None if dtype is None else str(dtype).removeprefix("torch.")
    settings = {**plain, "rows": rows}
    for name, read in (("text", read_text), ("input_file", read_tensors)):
        if plain[name] is not None:
            read(plain[name])  # fail now, or each checkpoint would report the same broken file
            path = Path(os.path.expanduser(plain[name])).absolute()
            plain[name] = str(path)
            settings[name] = [str(path), _hash_of(path)]
    return {"options": plain, "rows": rows}, settings


def _hash_of(path: Path) -> str:
    try:
        return digest(read_bytes(path, str(path), MAX_HASHED_INPUT_BYTES))
    except OSError as error:
        raise ModelError(f"can't read {str(path)!r}: {error.strerror}", hint="Check the path.") from error
