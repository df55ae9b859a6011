"""The checkpoints of training runs: their directories, runs and steps, and the loss that a Trainer logged.

Checkpoints in one directory belong to one run. Step and losses come from trainer_state.json, an untrusted file.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidValueError, ModelError, said_by, short_text
from sqrtdk.messages import Message
from sqrtdk.models.checkpoint import CONFIG
from sqrtdk.models.config import read_json
from sqrtdk.monitor.folder import CHECKPOINTS
from sqrtdk.monitor.names import PARTS_FOLDER
from sqrtdk.store.lock import LOCK
from sqrtdk.store.manifest import MAX_STEP, RUN

_NAMES_OF_RECORDS = {CHECKPOINTS, PARTS_FOLDER, LOCK, RUN}  # names that the folder of the records uses itself
_DIGITS_OF_STEP = len(str(MAX_STEP))
_STEP_AT_END = re.compile(r"\d+\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint.

    Attributes:
        path: Its directory, absolute.
        step: The training step of the checkpoint.
    """

    path: Path
    step: int

    @property
    def run(self) -> Path:
        """The parent directory, which holds all checkpoints of the run."""
        return self.path.parent


def find_checkpoints(
    patterns: Sequence[str | Path], output: Path | None = None
) -> tuple[tuple[Checkpoint, ...], tuple[Path, ...]]:
    """Find the directories of checkpoints that match the patterns, by run and step.

    Args:
        patterns: directories, or patterns of directories (`*`, `?`, `[...]`, `**`).
        output: folder of the records; never a checkpoint, even if a pattern matches it.

    Returns:
        The checkpoints by run and step, and the matched files, which are left out.

    Raises:
        InvalidValueError: A pattern matches no directory, a directory has no step or holds checkpoints itself, or two
            checkpoints of a run have the same step.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("checkpoint-1000", "checkpoint-200"):
        ...         Path(folder, name).mkdir()
        ...     [one.step for one in find_checkpoints([f"{folder}/checkpoint-*"])[0]]
        [200, 1000]
    """
    if not patterns:
        raise InvalidValueError(Message("errors.checkpoints.not_named"), hint=Message("errors.hint.pattern"))
    records = None if output is None else os.path.realpath(output)
    directories: list[Path] = []
    files: list[Path] = []
    for pattern in patterns:
        matches = [Path(os.path.abspath(match)) for match in _matches(os.path.expanduser(pattern))]
        some = [path for path in matches if path.is_dir() and os.path.realpath(path) != records]
        if not some:
            id = "errors.checkpoints.no_directory" if matches else "errors.checkpoints.nothing"
            raise InvalidValueError(
                Message(id, pattern=repr(str(pattern))),
                hint=Message("errors.hint.checkpoints"),
            )
        directories += some
        files += [path for path in matches if not path.is_dir()]
    return _in_order(_named_once(directories)), tuple(dict.fromkeys(files))


def _matches(pattern: str) -> list[str]:
    return [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)


def _named_once(directories: Sequence[Path]) -> Iterator[Path]:
    """Yield each directory once. Of several links to it (`best`, `last`), the name that ends with a number is kept."""
    by_place: dict[str, list[Path]] = {}
    for path in dict.fromkeys(directories):
        by_place.setdefault(os.path.realpath(path), []).append(path)
    for paths in by_place.values():
        # False sorts before True: `checkpoint-500` before `best`, a link to it.
        yield min(paths, key=lambda path: (_STEP_AT_END.search(path.name) is None, str(path)))


def _in_order(directories: Iterator[Path]) -> tuple[Checkpoint, ...]:
    found: dict[tuple[Path, int], Checkpoint] = {}
    for path in directories:
        one = Checkpoint(path, _step(path))
        other = found.setdefault((one.run, one.step), one)
        if other is not one:
            raise InvalidValueError(
                f"two checkpoints of step {one.step} in {str(one.run)!r}: {other.path.name!r} and {one.path.name!r}",
                hint="Leave one of them out: a run has one row a step.",
            )
    return tuple(found[key] for key in sorted(found))


def _step(path: Path) -> int:
    # "runs/a" instead of "runs/a/checkpoint-*" is the usual slip, so the hint gives the pattern.
    if not (path / CONFIG).exists() and next(path.glob(f"checkpoint-*/{CONFIG}"), None) is not None:
        raise InvalidValueError(
            f"{str(path)!r} is no checkpoint, and holds checkpoints", hint=f"Give {str(path / 'checkpoint-*')!r}."
        )
    number = _STEP_AT_END.search(path.name)
    step = global_step(path) if number is None else int(number[0][-_DIGITS_OF_STEP:])
    if step is None or not 0 <= step <= MAX_STEP or (number is not None and len(number[0]) > _DIGITS_OF_STEP):
        raise InvalidValueError(
            f"the checkpoint {str(path)!r} has no step: its name does not end with one, nor is there a readable"
            " trainer_state.json with a global_step",
            hint="Leave it out, or rename it to NAME-STEP.",
        )
    return step


def names(runs: Sequence[Path]) -> dict[Path, str]:
    """Return a distinct directory name for each run: the end of its path, as long as needed to tell the runs apart.

    Example:
        >>> list(names([Path("/runs/a"), Path("/runs/b")]).values()), list(names([Path("/runs/a")]).values())
        (['a', 'b'], [''])
        >>> list(names([Path("/runs/a/out"), Path("/runs/b/out"), Path("/runs")]).values())
        ['a-out', 'b-out', 'runs']
    """
    runs = list(dict.fromkeys(runs))
    if len(runs) == 1:
        return {runs[0]: ""}
    deepest = max(len(run.parts) for run in runs)
    for count in range(1, deepest + 1):
        tails = {run: "-".join(part for part in run.parts[-count:] if part != run.anchor) or "root" for run in runs}
        folded = {name.casefold() for name in tails.values()}  # some file systems ignore case
        if len(folded) == len(runs) and not folded & _NAMES_OF_RECORDS:
            return tails
    return {run: f"{number}-{run.name}" for number, run in enumerate(runs, 1)}


TRAINER_STATE = "trainer_state.json"
MAX_STATE_BYTES = 100 * 2**20  # trainer_state.json has one entry for each logged step


def global_step(directory: Path) -> int | None:
    """Return the step in trainer_state.json; None if it has none.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, TRAINER_STATE).write_text('{"global_step": 500}')
        ...     global_step(Path(folder)), global_step(Path(folder, "nowhere"))
        (500, None)
    """
    try:
        step = read_json(directory / TRAINER_STATE, MAX_STATE_BYTES).get("global_step")
    except (OSError, ModelError):
        return None
    return step if type(step) is int else None


def loss_at(directory: Path, step: int) -> tuple[float | None, str]:
    """Return the last training loss that the Trainer of transformers logged up to a step.

    Args:
        directory: Directory of the checkpoint, with `trainer_state.json`.
        step: Step of the checkpoint.

    Returns:
        The loss, or None if there is none; and what is wrong with the file, "" if nothing is.
    """
    try:
        history = read_json(directory / TRAINER_STATE, MAX_STATE_BYTES).get("log_history")
    except FileNotFoundError:
        return None, ""
    except (OSError, ModelError) as error:
        return None, said_by(error) if isinstance(error, ModelError) else short_text(error, 200)
    if not isinstance(history, list):
        return None, Message("alarms.checkpoint.no_history", file=TRAINER_STATE)
    losses = [(entry["step"], float(entry["loss"])) for entry in history if _is_loss(entry) and entry["step"] <= step]
    return max(losses, key=lambda one: one[0], default=(0, None))[1], ""


def _is_loss(entry: Any) -> bool:
    return (
        # The trainer also logs evaluations, {"eval_loss": 2.1, "step": 500}: they have no `loss`.
        isinstance(entry, dict)
        and type(entry.get("step")) is int
        and (type(entry.get("loss")) is float or (type(entry.get("loss")) is int and abs(entry["loss"]) < 2**53))
    )
