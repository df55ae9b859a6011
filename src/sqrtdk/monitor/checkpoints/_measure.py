"""One checkpoint: loaded, measured as a sampled step of a watch, audited, and its result kept on disk.

Measuring runs in the engine's workers. Each checkpoint has one result file, written at once and whole, so that no
checkpoint is computed twice. The file's key is a hash of everything that decides its numbers: the checkpoint's path,
size and time of each of its files, the options, and the code and versions. A result with another key, or a damaged one,
is computed again and replaced.
"""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sqrtdk._environment import numbers_from
from sqrtdk._records import quote, record_from_json
from sqrtdk.audit.guard import eval_mode, random_state
from sqrtdk.audit.model_run import run_model
from sqrtdk.audit.records import SEVERITIES, Finding
from sqrtdk.engines import Cell
from sqrtdk.errors import INTERRUPTS, ModelError, RunFolderError, SqrtdkError, kind_and_text, said_by
from sqrtdk.messages import Message, said_again, table_of
from sqrtdk.models.checkpoint import CONFIG, weight_files
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import LoadedModel
from sqrtdk.models.run import call
from sqrtdk.monitor.checkpoints._find import Checkpoint, loss_at
from sqrtdk.monitor.forwards import StepTracer
from sqrtdk.monitor.samples import StepSample
from sqrtdk.store import disk


def measure_checkpoint(cell: Cell) -> dict[str, Any]:
    """Measure one checkpoint.

    Args:
        cell: `path`, `step`, `rows` (None: all) and `options` (fields of `LoadOptions`).

    Returns:
        `loss` that was logged, `state` (what is wrong with trainer_state.json), `transformers`
        (the version), and either `reason` (why nothing was measured) or all of these: `sample` (a `StepSample` as JSON
        data), `findings` of the audit, worst first, `model` (class and parameters), `inputs` (a hash of them) and
        `notes` on the loading. Besides, `messages`: ids and values of the sentences in it.
    """
    loss, state = loss_at(Path(cell["path"]), cell["step"])
    document = {"loss": loss, "state": state, "transformers": transformers_version()}
    try:
        measured = _measured(cell["path"], cell["step"], LoadOptions(**cell["options"]), cell["rows"])
        document |= measured
    except INTERRUPTS:
        raise
    except BaseException as error:  # untrusted files, or a model's own code, may raise anything
        document["reason"] = said_by(error) if isinstance(error, SqrtdkError) else kind_and_text(error)
    finally:
        gc.collect()  # models are freed by the cycle collector only, and two large ones must not be in memory at once
    return {**_plain(document), "messages": table_of(document)}


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
    loaded = resolve_model(path, options)
    sample = _sample(loaded, step, options.seed, rows)
    # The comparison runs eager against sdpa, which a named implementation rules out.
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
    module, forwards = loaded.module, StepTracer(loaded.module, rows)
    with ExitStack() as stack:
        stack.enter_context(random_state(module))
        stack.enter_context(eval_mode(module))
        # In eval mode nothing is dropped, but a model may draw numbers of its own in its forward.
        torch.manual_seed(seed)
        with forwards:
            call(module, loaded.inputs)
        watched = forwards.watched_step()
    calls = tuple(replace(one, scale_faults=()) for one in watched.samples())  # the audit's findings say them
    return StepSample(step, calls, watched.how, watched.missed)


def _digest(loaded: LoadedModel) -> str:
    """Return a hash of the inputs, which shows whether two models ran on the same ones."""
    named = loaded.inputs.items() if isinstance(loaded.inputs, dict) else enumerate(loaded.inputs)
    content = []
    for name, value in named:
        for tensor in _tensors(value):
            values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            content.append([name, str(tensor.dtype), list(tensor.shape), disk.digest(values)])
    return disk.hash_of(content)


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


@dataclass(frozen=True, slots=True)
class Files:
    """State of the files of a checkpoint.

    Attributes:
        digest: Hash of their names, sizes and times of change.
        time: The newest time of change, in seconds since 1970.
    """

    digest: str
    time: float


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured at one checkpoint.

    Attributes:
        loss: last training loss up to its step; None if none is recorded.
        state: what is wrong with the file of that loss; "" if nothing is.
        reason: why nothing was measured; None if it was.
        sample: statistics of the attentions; None if nothing was measured.
        findings: of the audit.
        model: description of the model, as JSON values.
        inputs: hash of the inputs, which are equal for all checkpoints that are compared.
        notes: on what sqrtdk decided for the user, such as random ids.
    """

    loss: float | None
    state: str
    reason: str | None = None
    sample: StepSample | None = None
    findings: tuple[Finding, ...] = ()
    model: Any = None
    inputs: str = ""
    notes: tuple[str, ...] = ()


def result_name(one: Checkpoint) -> str:
    """Return the file name, without ending, of a checkpoint's result: "step-<step>-<hash of its path>"."""
    return f"step-{one.step}-{disk.hash_of(str(one.path))}"


def files_of(directory: Path) -> Files:
    """Return the state of the files in a checkpoint's directory, without reading them; it changes if any file does.

    A directory that can't be listed counts as empty; `time` is then that of the directory itself.
    """
    states_by_file, newest = [], 0
    with suppress(OSError):
        # For a directory that can't be listed or is empty, its own time is all there is.
        newest = directory.stat().st_mtime_ns
    with suppress(OSError):  # a directory that can't be listed can't be loaded either, and that error comes later
        found = sorted(path for path in directory.iterdir() if path.is_file())
        states = [(path.name, path.stat()) for path in found]
        states_by_file = [[name, state.st_size, state.st_mtime_ns] for name, state in states]
        newest = max((state.st_mtime_ns for _, state in states), default=newest)
    return Files(disk.hash_of(states_by_file), newest / 1e9)


def result_key(one: Checkpoint, files: Files, measured_with: Any) -> str:
    """Return the key of a stored result, a hash: equal keys mean equal numbers.

    Args:
        one: The checkpoint.
        files: State of its files.
        measured_with: Settings of the measurement, as JSON values.
    """
    versions = dict(numbers_from()), transformers_version()
    return disk.hash_of([str(one.path), one.step, files.digest, measured_with, *versions])


def read_result(document: Any) -> Result:
    """Return the result that `measure_checkpoint` returned as JSON data, directly or by way of a file.

    Raises:
        RunFolderError: The data are not a result.
    """
    result = record_from_json(Result, document, "the result", RunFolderError, "", others=True)
    for finding in result.findings:
        if finding.severity not in SEVERITIES:
            raise RunFolderError(f"the result has a finding of severity {quote(finding.severity)}")
    again: Result = said_again(result, document.get("messages"))
    return again
