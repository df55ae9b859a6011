"""Audits an exported graph: walked on shapes, and run on the CPU if it is given inputs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from sqrtdk._progress import report_progress
from sqrtdk.audit.attributes import Key
from sqrtdk.audit.gguf import audit_gguf
from sqrtdk.audit.graph_family import ask_for_config
from sqrtdk.audit.model_run import ModelRun, run_model, without_verdicts
from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.audit.rules.numbers import logits_out_of_range, of_weights
from sqrtdk.audit.rules.statistics import entropy, flat, max_logit, saturation
from sqrtdk.audit.rules.unmeasured import not_read
from sqrtdk.audit.sources import root, source_file, split_lines
from sqrtdk.audit.tolerance import is_close
from sqrtdk.errors import InvalidValueError, ModelError
from sqrtdk.graphs.opening import config_beside, open_graph
from sqrtdk.graphs.places import GraphModel
from sqrtdk.messages import Message
from sqrtdk.models.input_file import read_tensors
from sqrtdk.models.names import graph_kind
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import LoadedModel
from sqrtdk.models.run import call as forward
from sqrtdk.tracing.records import AttentionCall, NotMeasured
from sqrtdk.tracing.trace import trace

# Loading options that were settled when the graph was exported.
_SETTLED = ("text", "batch", "seq_len", "device", "dtype", "device_map", "offload_folder", "revision",
            "attn")  # fmt: skip
_OPTIONS = {"seq_len": "seq-len", "device_map": "device-map", "offload_folder": "offload-folder"}
_ON_FIGURES = (max_logit, logits_out_of_range, saturation, entropy, flat)  # rules on the logits of a run


def audit_graph(
    model: str, options: LoadOptions, ask: Callable[[LoadedModel, ModelRun], ModelRun] | None = None
) -> tuple[ModelRun, tuple[NotMeasured, ...], tuple[Finding, ...]]:
    """Judge every attention of an exported graph from its operators, without running it.

    With inputs in the options, the graph runs on the CPU as any module does, with the statistics of its logits.

    Args:
        model: Path of an .onnx, .pt2 or .gguf file; of a .gguf file only the metadata is read.
        options: Loading options; those that a graph has already settled are refused.
        ask: Asks the laws of a graph that runs, and returns the run with the answers; None to ask none.

    Returns:
        The run, the attentions that were not read, and a finding on each of these.

    Raises:
        InvalidValueError: An option does not apply to a graph.
        ModelError: The file, or the config beside it, can't be read, or it has no attention.
        MissingExtraError: onnx is not installed.
    """
    settled = [_OPTIONS.get(n, n) for n in _SETTLED if getattr(options, n) is not None]
    if settled:
        raise InvalidValueError(
            f"{', '.join(f'--{name}' for name in settled)} given with a graph, which is read as it was exported",
            hint="Leave it out, or check the model that was exported.",
        )
    path = os.path.expanduser(model)
    if graph_kind(path) == ".gguf":
        if options.input_file is not None:
            raise InvalidValueError("--input given with a GGUF file", hint="It holds no graph to run: leave it out.")
        run, lost, findings = audit_gguf(path, model)
        return _at_file(run, path), lost, findings
    config, notes = config_beside(path)
    report_progress(Message("progress.graph"))
    walked = open_graph(path, config, trust_remote_code=options.trust_remote_code)
    loaded = replace(walked.loaded, notes=(*walked.loaded.notes, *notes))
    missing = tuple(NotMeasured(entry.site, entry.reason) for entry in walked.missing)
    try:
        run = run_model(loaded, "own", seed=options.seed, compare="never", silent=not missing)
    except ModelError as error:
        if not missing:
            raise
        raise ModelError(
            f"no attention of {model[:200]!r} could be read: {missing[0].site[:100]}: {missing[0].reason}",
            hint=_hint_on_operators(walked.unread),
        ) from error
    module = loaded.module
    if options.input_file is not None:
        valued, off = _with_values(path, dict(read_tensors(options.input_file)), options)
        if off is None:
            valued = replace(valued, config=config, notes=loaded.notes)
            if config is not None and not hasattr(valued.module, "config"):
                valued.module.config = config
            run = run_model(valued, "own", seed=options.seed, compare="never", keep=ask is not None, silent=not missing)
            module = valued.module
            run = run if ask is None else ask(valued, run)
        else:
            run = _without_figures(run, off)
    run = replace(run, model=replace(run.model, parameters=walked.numbers))
    if walked.sizes:
        run = _without_sizes(run, walked, _at_other_sizes(path, config, options))
    sick = (of_weights(walked.sick),) if walked.sick else ()
    findings = (*(finding for finding in sick if finding not in run.findings), *run.findings)
    run = replace(run, calls=_by_operator(run.calls, walked), findings=findings)
    if config is None:
        run = ask_for_config(run, module, model)
    if any(judged.mistake == "missing" for judged in run.calls):
        run = _noted(run, Message("rules.graph.folded"))
    return _at_file(run, path), missing, tuple(map(not_read, missing))


def _hint_on_operators(unread: tuple[str, ...]) -> str:
    """Return the hint for operators that are not read."""
    if not unread:
        return "Give --input FILE.safetensors, export the model without branches and loops, or check the model itself."
    names = "; ".join(unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
    return f"Not read: {names}. Export the model without these operators, or check the model itself."


def _at_file(run: ModelRun, path: str) -> ModelRun:
    """Return the run with the graph's file, which has no lines, in place of the module that was built from it."""
    stand_in, name = {file for file, _ in split_lines(run.model.at)}, os.path.basename(path)
    others = (source for source in run.sources if source.file not in stand_in)
    sources = (*others, source_file(name, os.path.abspath(path), root()))
    return replace(run, model=replace(run.model, at=f"{name}:1"), sources=sources)


def _noted(run: ModelRun, note: str) -> ModelRun:
    return replace(run, environment=run.environment | {"notes": [*run.environment["notes"], note]})


def _by_operator(calls: tuple[JudgedCall, ...], walked: GraphModel) -> tuple[JudgedCall, ...]:
    """Return the calls with their operators' names, unless a site has more softmaxes than calls."""
    counts = Counter(judged.call.site for judged in calls)

    def named(judged: JudgedCall) -> JudgedCall:
        operators = walked.operators.get(judged.call.site, ())
        if len(operators) != counts[judged.call.site] or operators[judged.call.index] == "Softmax":
            return judged
        return replace(judged, call=replace(judged.call, kind="kernel", op=operators[judged.call.index]))

    return tuple(map(named, calls))


def _at_other_sizes(path: str, config: Any, options: LoadOptions) -> tuple[AttentionCall, ...] | None:
    """Return the attentions at other values for the graph's free sizes, or None if the graph does not accept them."""
    try:
        walked = open_graph(path, config, trust_remote_code=options.trust_remote_code, larger=True)
        with trace(walked.loaded.module, stats=False) as run:
            forward(walked.loaded.module, walked.loaded.inputs)
    except ModelError:
        return None
    return run.calls


def _without_sizes(run: ModelRun, walked: GraphModel, again: tuple[AttentionCall, ...] | None) -> ModelRun:
    """Withdraw the verdicts on scales that change with a size which the graph leaves free."""
    if again is None:
        return _noted(run, Message("rules.graph.one_size", names=", ".join(walked.sizes)[:200]))
    others = {(call.site, call.index): call.scale.effective for call in again}
    reasons: dict[Key, str] = {}
    for judged in run.calls:
        here, other = judged.call.scale.effective, others.get(judged.key)
        if here is not None and other is not None and not is_close(here, other):
            sizes = {"scale": f"{here:.4g}", "other": f"{other:.4g}"}
            reasons[judged.key] = Message("rules.graph.follows_size", **sizes)

    def follows_a_size(judged: JudgedCall) -> Finding:
        call = judged.call
        return not_read(NotMeasured(call.site, judged.reason or "", call.formula, call.product_at))

    return without_verdicts(run, reasons, follows_a_size)


def _with_values(path: str, inputs: dict[str, Tensor], options: LoadOptions) -> tuple[LoadedModel, str | None]:
    """Return a graph as a module with values and inputs, and the reason to draw no conclusion from its run, if any.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        ModelError: The graph can't be loaded or run, or does not take the inputs.
    """
    if graph_kind(path) == ".pt2":
        from sqrtdk.graphs.program import read_exported

        return read_exported(path, inputs, trust_remote_code=options.trust_remote_code), None
    from sqrtdk.graphs.onnx import open_onnx

    opened = open_onnx(path, inputs)
    return opened.loaded, opened.off


def _without_figures(run: ModelRun, reason: str) -> ModelRun:
    """Return the reading of a graph with the reason why the figures of its run are not believed."""
    calls = tuple(replace(judged, call=replace(judged.call, stats_reason=reason)) for judged in run.calls)
    return replace(run, mode="dynamic", calls=calls)
