"""One checkpoint: loaded, measured as a sampled step of a watch, and audited. This runs where the engine computes."""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sqrtdk.audit.guard import eval_mode, random_state
from sqrtdk.audit.model_run import run_model
from sqrtdk.audit.records import SEVERITIES
from sqrtdk.engines import Cell
from sqrtdk.errors import INTERRUPTS, ModelError, SqrtdkError, kind_and_text, short_text
from sqrtdk.models.checkpoint import CONFIG, weight_files
from sqrtdk.models.load import resolve
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import LoadedModel
from sqrtdk.models.run import call
from sqrtdk.monitor.checkpoints._find import loss_at
from sqrtdk.monitor.forwards import Forwards
from sqrtdk.monitor.samples import StepSample


def measure(cell: Cell) -> dict[str, Any]:
    """Measure one checkpoint.

    Args:
        cell: `path`, `step`, `rows` (None: all) and `options`, those of loading by name.

    Returns:
        `loss` that was logged (a list of at most one), `state` (what is wrong with the file that tells it),
        `transformers` (the version), and either `reason` (why the rest could not be had), or all of these: `sample` (a
        `StepSample` as JSON data), `findings` of the audit, worst first, `model` (class and parameters), `inputs` (a
        hash of them) and `notes` on the loading.
    """
    loss, state = loss_at(Path(cell["path"]), cell["step"])
    told = {"loss": [] if loss is None else [loss], "state": state, "transformers": transformers_version()}
    try:
        return told | _measured(cell["path"], cell["step"], LoadOptions(**cell["options"]), cell["rows"])
    except INTERRUPTS:
        raise
    except BaseException as error:  # whatever a stranger's files, or a model's own code, bring about
        text = short_text if isinstance(error, SqrtdkError) else kind_and_text
        return told | {"reason": text(error)}
    finally:
        gc.collect()  # models hold themselves by cycles, and two large ones need not be in memory at once


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
    """What a watch measures at a step, of one forward pass."""
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
    """A hash of the inputs, to see whether two models ran on the same."""
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
    """Of the library that builds the models; None where there is none."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None
