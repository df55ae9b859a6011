"""An exported graph as what `check` audits: its operations walked on shapes, without running them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

from sqrtdk._progress import tell
from sqrtdk.audit.attributes import Key
from sqrtdk.audit.gguf import audit_gguf
from sqrtdk.audit.graph_families import ask_for_config
from sqrtdk.audit.graph_run import run_onnx, run_program
from sqrtdk.audit.like import as_like
from sqrtdk.audit.model_run import ModelRun, run_model, without_verdicts
from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.audit.rules.numbers import of_weights
from sqrtdk.audit.rules.unmeasured import not_read
from sqrtdk.audit.sources import at_file
from sqrtdk.audit.tolerance import close
from sqrtdk.errors import InvalidValueError, ModelError
from sqrtdk.graphs.beside import config_beside
from sqrtdk.graphs.records import Walked
from sqrtdk.graphs.walked import open_graph
from sqrtdk.models.names import graph_kind
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.run import call as forward
from sqrtdk.tracing.records import AttentionCall, NotMeasured
from sqrtdk.tracing.trace import trace

_SETTLED = ("text", "input_file", "batch", "seq_len", "device", "dtype", "device_map", "offload_folder", "revision",
            "attn")  # fmt: skip
_OPTIONS = {"input_file": "input", "seq_len": "seq-len", "device_map": "device-map", "offload_folder": "offload-folder"}
_FOLDED = (
    "a scale that was folded into a weight when the graph was exported can't be told from a trained weight: "
    "where one is missing, look at how it was exported"
)


def audit_graph(
    model: str, options: LoadOptions, *, like: str | None = None, run_it: bool = False
) -> tuple[ModelRun, tuple[NotMeasured, ...], tuple[Finding, ...]]:
    """Judge every attention of a graph without running it.

    Args:
        model: path of an .onnx, .pt2 or .gguf file; of the last its metadata alone is read.
        options: of loading; those that a graph has settled are refused.
        like: a model whose attentions are what is declared.
        run_it: run the graph on the CPU as well, for the figures of its logits.

    Returns:
        What the walk of it yielded, and the attentions that were not read, with a finding on each.

    Raises:
        InvalidValueError: an option that a graph does not follow.
        ModelError: the file, or the config beside it, can't be read; no attention was found.
        MissingExtraError: onnx is not installed.
    """
    taken = ("input_file",) if run_it else ()
    settled = [_OPTIONS.get(n, n) for n in _SETTLED if n not in taken and getattr(options, n) is not None]
    if settled:
        raise InvalidValueError(
            f"{', '.join(f'--{name}' for name in settled)} given with a graph, which is read as it was exported",
            hint="Leave it out, or check the model that was exported.",
        )
    path = os.path.expanduser(model)
    if graph_kind(path) == ".gguf":
        if like is not None or run_it:
            raise InvalidValueError(
                "--like and --run given with a GGUF file", hint="It holds no graph: leave them out."
            )
        run, lost, findings = audit_gguf(path, model)
        return _at_file(run, path), lost, findings
    config, notes = config_beside(path)
    tell("reading the graph")
    walked = open_graph(path, config, trust_remote_code=options.trust_remote_code)
    loaded = replace(walked.loaded, notes=(*walked.loaded.notes, *notes))
    missing = tuple(NotMeasured(entry.site, entry.reason) for entry in walked.missing)
    try:
        run = run_model(loaded, "own", seed=options.seed, compare="never")
    except ModelError as error:
        if not missing:
            raise
        raise ModelError(
            f"no attention of {model[:200]!r} could be read: {missing[0].site[:100]}: {missing[0].reason}",
            hint=_without(walked.unread),
        ) from error
    if walked.sizes:
        run = _without_sizes(run, walked, _again(path, config, options))
    sick = (of_weights(walked.sick),) if walked.sick else ()
    run = replace(run, calls=_by_operator(run.calls, walked), findings=(*sick, *run.findings))
    if run_it and graph_kind(path) == ".pt2":
        run = run_program(path, config, options)
    elif run_it:
        run = run_onnx(run, loaded.module, path, options)
    if config is None and like is None:
        run = ask_for_config(run, loaded.module)
    if like is not None:
        run = as_like(run, loaded.module, like, options)
    elif any(judged.mistake == "missing" for judged in run.calls):
        run = _noted(run, _FOLDED)
    return _at_file(run, path), missing, tuple(map(not_read, missing))


def _without(unread: tuple[str, ...]) -> str:
    """What to do about operators that are not read, by their names."""
    if not unread:
        return "Export the model without branches and loops, or check the model itself."
    more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
    return (
        f"Not read: {'; '.join(unread[:3])}{more}. Export the model without these operators, or check the model itself."
    )


def _at_file(run: ModelRun, path: str) -> ModelRun:
    """The run, at the file of the graph in place of the module that was made of it."""
    model, sources = at_file(run.model, run.sources, path)
    return replace(run, model=model, sources=sources)


def _noted(run: ModelRun, note: str) -> ModelRun:
    return replace(run, environment=run.environment | {"notes": [*run.environment["notes"], note]})


def _by_operator(calls: tuple[JudgedCall, ...], walked: Walked) -> tuple[JudgedCall, ...]:
    """The calls, with the operators that they are; a site with more softmaxes than calls tells nothing."""
    counts = Counter(judged.call.site for judged in calls)

    def named(judged: JudgedCall) -> JudgedCall:
        operators = walked.operators.get(judged.call.site, ())
        if len(operators) != counts[judged.call.site] or operators[judged.call.index] == "Softmax":
            return judged
        return replace(judged, call=replace(judged.call, kind="kernel", op=operators[judged.call.index]))

    return tuple(map(named, calls))


def _again(path: str, config: Any, options: LoadOptions) -> tuple[AttentionCall, ...] | None:
    """The attentions, with other numbers for the sizes that the graph leaves free; None if these do not fit."""
    try:
        walked = open_graph(path, config, trust_remote_code=options.trust_remote_code, larger=True)
        with trace(walked.loaded.module, stats=False) as run:
            forward(walked.loaded.module, walked.loaded.inputs)
    except ModelError:
        return None
    return run.calls


def _without_sizes(run: ModelRun, walked: Walked, again: tuple[AttentionCall, ...] | None) -> ModelRun:
    """The verdicts, but for scales that follow a size which the graph leaves free."""
    if again is None:
        names = ", ".join(walked.sizes)[:200]
        note = f"read at one size of {names} alone: whether a scale follows one of them is not known"
        return _noted(run, note)
    others = {(call.site, call.index): call.scale.effective for call in again}
    reasons: dict[Key, str] = {}
    for call in (judged.call for judged in run.calls):
        key, here = (call.site, call.index), call.scale.effective
        other = others.get(key)
        if here is not None and other is not None and not close(here, other):
            sizes = f"{here:.4g} at one, {other:.4g} at another"
            reasons[key] = f"the scale follows a size that the graph leaves free: {sizes}"
    return without_verdicts(run, reasons, _follows_a_size)


def _follows_a_size(judged: JudgedCall) -> Finding:
    call = judged.call
    return not_read(NotMeasured(call.site, judged.reason or "", call.formula, call.product_at))
