"""One checkpoint: loaded, measured as a sampled step of a watch, audited, and its result kept on disk.

Measuring runs in the engine's workers. Each checkpoint has one result file, written at once and whole, so that no
checkpoint is computed twice. The file's key is a hash of everything that decides its numbers: the checkpoint's path,
size and time of each of its files, the options, and the code and versions. A result with another key, or a damaged one,
is computed again and replaced.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sqrtdk import _json
from sqrtdk._environment import numbers_from
from sqrtdk._stranger import parse_json
from sqrtdk.audit.guard import eval_mode, random_state
from sqrtdk.audit.model_run import run_model
from sqrtdk.audit.records import SEVERITIES, Finding
from sqrtdk.engines import Cell
from sqrtdk.errors import INTERRUPTS, ModelError, RunFolderError, SqrtdkError, kind_and_text, short_text
from sqrtdk.messages import Message, said_again, table_of
from sqrtdk.models.checkpoint import CONFIG, weight_files
from sqrtdk.models.load import resolve
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import LoadedModel
from sqrtdk.models.run import call
from sqrtdk.monitor import disk
from sqrtdk.monitor.checkpoints._find import Checkpoint, loss_at
from sqrtdk.monitor.disk import Lock
from sqrtdk.monitor.folder import CHECKPOINTS
from sqrtdk.monitor.forwards import Forwards
from sqrtdk.monitor.samples import CallSample, StepSample


def measure(cell: Cell) -> dict[str, Any]:
    """Measure one checkpoint.

    Args:
        cell: `path`, `step`, `rows` (None: all) and `options` (fields of `LoadOptions`).

    Returns:
        `loss` that was logged (a list of at most one), `state` (what is wrong with trainer_state.json), `transformers`
        (the version), and either `reason` (why nothing was measured) or all of these: `sample` (a `StepSample` as JSON
        data), `findings` of the audit, worst first, `model` (class and parameters), `inputs` (a hash of them) and
        `notes` on the loading. Besides, `messages`: ids and values of the sentences in it.
    """
    loss, state = loss_at(Path(cell["path"]), cell["step"])
    told = {"loss": [] if loss is None else [loss], "state": state, "transformers": transformers_version()}
    try:
        measured = _measured(cell["path"], cell["step"], LoadOptions(**cell["options"]), cell["rows"])
        told |= measured
    except INTERRUPTS:
        raise
    except BaseException as error:  # untrusted files, or a model's own code, may raise anything
        text = short_text if isinstance(error, SqrtdkError) else kind_and_text
        told["reason"] = text(error)
    finally:
        gc.collect()  # models are freed by the cycle collector only, and two large ones must not be in memory at once
    return {**_plain(told), "messages": table_of(told)}


def _plain(value: Any) -> Any:
    """Return JSON data with each `Message` as a plain text."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Message) else value


def _measured(path: str, step: int, options: LoadOptions, rows: int | None) -> dict[str, Any]:
    if (Path(path) / CONFIG).exists() and not weight_files(Path(path)):
        raise ModelError("there are no weights, and random ones say nothing of a run", hint="Save the checkpoint anew.")
    loaded = resolve(path, options)
    sample = _sample(loaded, step, options.seed, rows)
    compare = "auto" if options.attn is None else "never"
    run = run_model(loaded, options.attn or "own", seed=options.seed, compare=compare)
    findings = sorted(run.findings, key=lambda finding: -SEVERITIES.index(finding.severity))
    return {
        "sample": asdict(sample),
        "findings": [asdict(finding) for finding in findings],
        "model": {"class": run.model.cls, "parameters": run.model.parameters},
        "inputs": _digest(loaded),
        "notes": list(loaded.notes),
    }


def _sample(loaded: LoadedModel, step: int, seed: int, rows: int | None) -> StepSample:
    """Return the sample of one forward pass, as a watch takes it at a step."""
    module, forwards = loaded.module, Forwards(loaded.module, rows)
    with ExitStack() as stack:
        stack.enter_context(random_state(module))
        stack.enter_context(eval_mode(module))
        torch.manual_seed(seed)
        with forwards:
            call(module, loaded.inputs)
        seen = forwards.step_seen()
    return StepSample(step, seen.samples(), seen.how, seen.missed)


def _digest(loaded: LoadedModel) -> str:
    """Return a hash of the inputs, which shows whether two models ran on the same ones."""
    named = loaded.inputs.items() if isinstance(loaded.inputs, dict) else enumerate(loaded.inputs)
    digest = hashlib.sha256()
    for name, value in named:
        for tensor in _tensors(value):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def transformers_version() -> str | None:
    """Return the installed version of transformers, which builds the models; None if it is not installed."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


MAX_BYTES = 2**28
_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a checkpoint: a hash of their names, sizes and times, and the newest time, in seconds."""

    digest: str
    time: float


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one checkpoint; see `measure`."""

    loss: float | None
    state: str
    reason: str | None
    sample: StepSample | None = None
    findings: tuple[Finding, ...] = ()
    model: Any = None
    inputs: str = ""
    notes: tuple[str, ...] = ()


class Kept:
    """The directory of the results, locked against other processes while the context is open."""

    def __init__(self, output: Path) -> None:
        self._folder = output / CHECKPOINTS

    def __enter__(self) -> Kept:
        disk.make(self._folder)
        self._lock = Lock(self._folder)
        disk.tidy(self._folder, "*")
        return self

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def get(self, one: Checkpoint, key: str) -> Result | None:
        """Return the result of a checkpoint; None if no result has this key."""
        try:
            content = disk.take(self._path(one), MAX_BYTES)
            document = parse_json(content, "the result", RunFolderError, "")
            return read_result(document["result"]) if document["key"] == key else None
        except (OSError, RunFolderError, ValueError, KeyError, TypeError):  # missing or damaged
            return None

    def put(self, one: Checkpoint, key: str, document: dict[str, Any]) -> None:
        """Write a result.

        Raises:
            OutputError: It can't be written.
        """
        text = _json.document({"checkpoint": str(one.path), "key": key, "result": document})
        disk.put(self._path(one), text.encode())

    def _path(self, one: Checkpoint) -> Path:
        return self._folder / f"step-{one.step}-{hashlib.sha256(str(one.path).encode()).hexdigest()[:16]}.json"


def files_of(directory: Path) -> Files:
    """Return the state of a checkpoint's files, which changes if any file does."""
    told, newest = [], 0
    with suppress(OSError):
        newest = directory.stat().st_mtime_ns
    with suppress(OSError):  # a directory that can't be listed can't be loaded either, and that error comes later
        found = sorted(path for path in directory.iterdir() if path.is_file())
        states = [(path.name, path.stat()) for path in found]
        told = [[name, state.st_size, state.st_mtime_ns] for name, state in states]
        newest = max((state.st_mtime_ns for _, state in states), default=newest)
    return Files(_hash(told), newest / 1e9)


def key_of(one: Checkpoint, files: Files, measured_with: Any) -> str:
    """Return the key of a result: equal keys mean equal numbers."""
    return _hash([str(one.path), one.step, files.digest, measured_with, dict(numbers_from()), transformers_version()])


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode(errors="surrogateescape")).hexdigest()[:32]


def read_result(document: dict[str, Any]) -> Result:
    """Decode a result from the JSON data that `measure` returned, directly or read back from a file.

    Raises:
        KeyError, TypeError, ValueError: The data are no result.
    """
    sample = document.get("sample")
    result = Result(
        loss=next(map(_number, document["loss"]), None),
        state=str(document["state"]),
        reason=document.get("reason"),
        sample=None if sample is None else _read_sample(sample),
        findings=tuple(_read_finding(finding) for finding in document.get("findings", ())),
        model=document.get("model"),
        inputs=str(document.get("inputs", "")),
        notes=tuple(map(str, document.get("notes", ()))),
    )
    again: Result = said_again(result, document.get("messages"))
    return again


def _read_sample(document: dict[str, Any]) -> StepSample:
    calls = tuple(_read_call(call) for call in document["calls"])
    return StepSample(**document | {"calls": calls, "not_measured": tuple(document["not_measured"])})


def _read_call(document: dict[str, Any]) -> CallSample:
    columns = {name: [_number(value) for value in values] for name, values in document["columns"].items()}
    ratio = document["scale_ratio"]
    more = {"columns": columns, "scale_ratio": None if ratio is None else _number(ratio)}
    return CallSample(**document | more | {"factors": tuple(document["factors"])})


def _read_finding(document: dict[str, Any]) -> Finding:
    finding = Finding(**document | {name: _value(document[name]) for name in ("value", "threshold")})
    if finding.severity not in SEVERITIES:
        raise ValueError(finding.severity)
    return finding


def _value(value: Any) -> float | str | None:
    if isinstance(value, str):
        return _INFINITIES.get(value, value)
    return None if value is None or value != value else value


def _number(value: Any) -> float:
    """Decode a number as `_json` writes it: null is NaN, and infinities are words."""
    return math.nan if value is None else _INFINITIES[value] if isinstance(value, str) else float(value)
