"""`--run`: a graph is run on the CPU, and the figures of its logits join the ledger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from sqrtdk.audit.context import Context
from sqrtdk.audit.model_run import ModelRun, run_model
from sqrtdk.audit.records import Finding, JudgedCall, with_health
from sqrtdk.audit.rules.numbers import range_forecast
from sqrtdk.audit.rules.statistics import entropy, flat, max_logit, saturation
from sqrtdk.models.input_file import read_tensors
from sqrtdk.models.options import LoadOptions
from sqrtdk.tracing.tensors import CallTensors

_ON_FIGURES = (max_logit, range_forecast, saturation, entropy, flat)


def run_program(path: str, config: Any, options: LoadOptions) -> ModelRun:
    """A program of torch.export, run as a model is."""
    from sqrtdk.graphs.program import read_exported

    inputs = None if options.input_file is None else dict(read_tensors(options.input_file))
    loaded = read_exported(path, inputs, trust_remote_code=options.trust_remote_code)
    if config is not None and not hasattr(loaded.module, "config"):
        loaded.module.config = config
    notes = ("the inputs are those that the program was exported with",) if inputs is None else ()
    return run_model(replace(loaded, config=config, notes=notes), "own", seed=options.seed, compare="never")


def run_onnx(run: ModelRun, module: nn.Module, path: str, options: LoadOptions) -> ModelRun:
    """The reading of an ONNX graph with the figures of its logits, from a run through onnxruntime.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        ModelError: it refuses the graph or the inputs.
    """
    from sqrtdk.graphs.graph import read_graph
    from sqrtdk.graphs.made_up import made_up, told_inputs
    from sqrtdk.graphs.model_file import folder_of, load_file
    from sqrtdk.graphs.onnx import read_onnx

    if options.input_file is not None:
        inputs = dict(read_tensors(options.input_file))
    else:
        inputs = made_up(read_graph(load_file(path), folder_of(path)), options.seed)
        note = f"the graph was run with inputs that are made up, with seed {options.seed}: {told_inputs(inputs)}"
        run = replace(run, environment=run.environment | {"notes": [note, *run.environment["notes"]]})
    ran = read_onnx(path, inputs)
    reasons = {entry.site: entry.reason for entry in ran.missing}
    by_site = {(call.site, call.index): call for call in ran.calls}
    in_order = len(ran.calls) == len(run.calls)
    calls = tuple(
        _measured(
            judged,
            ran.calls[place] if in_order else by_site.get((judged.call.site, judged.call.index)),
            reasons.get(judged.call.site, "its tensors were not read from the run"),
        )
        for place, judged in enumerate(run.calls)
    )
    context = Context(module, calls, "dynamic", compare="never", dtype=str(run.environment["dtype"]))
    found = [entry for rule in _ON_FIGURES for entry in rule(context) if isinstance(entry, Finding)]
    findings = (*run.findings, *(entry for entry in found if entry not in run.findings))
    return replace(
        run,
        mode="dynamic",
        calls=with_health(calls, findings),
        findings=findings,
    )


def _measured(judged: JudgedCall, ran: CallTensors | None, reason: str) -> JudgedCall:
    """The judged call with the statistics of its run; with the reason where it did not run."""
    call = None if ran is None else ran.call
    if ran is None or call is None or call.stats is None:
        reason = reason if ran is None or call is None else ran.missing or call.stats_reason or reason
        return replace(judged, call=replace(judged.call, stats_reason=reason))
    return replace(
        judged,
        call=replace(
            judged.call,
            stats=call.stats,
            stats_reason=None,
            max_product=call.max_product,
            future_weight=call.future_weight,
        ),
    )
