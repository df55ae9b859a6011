"""`check`: run a model under a trace, judge every attention, apply every rule, test the laws, and report."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sqrtdk._guesses import with_leads
from sqrtdk._progress import progress_shown, report_progress
from sqrtdk._wrappers import hint_for
from sqrtdk.audit.model_run import ModelRun, Whole, run_model, with_laws
from sqrtdk.audit.own_module import as_inputs, choices, from_module
from sqrtdk.audit.records import FAIL_ON, SEVERITIES, UNMEASURED, CheckReport, Finding
from sqrtdk.audit.rules import RULES, unmeasured
from sqrtdk.audit.sources import root
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.laws import table
from sqrtdk.laws.answers import law_not_asked
from sqrtdk.laws.table import FINDINGS, answers_of, are_named, check_seconds, names_of
from sqrtdk.masks.band import TRIANGLES
from sqrtdk.messages import Message, joined
from sqrtdk.models.limits import check_seed, check_sizes
from sqrtdk.models.load import iter_attn, resolve_model
from sqrtdk.models.names import ggml_kind, graph_kind
from sqrtdk.models.options import ATTN, LoadOptions
from sqrtdk.models.records import AttnBuild, Inputs, LoadedModel
from sqrtdk.models.run import by_default_of
from sqrtdk.models.unchanged import unchanged
from sqrtdk.ranks.group import RankGroup, world
from sqrtdk.ranks.reports import Together
from sqrtdk.theory import kv_cache_bytes
from sqrtdk.tracing.records import AttentionCall, NotMeasured


@with_leads
def check(
    model: nn.Module | str,
    inputs: Any = None,
    *,
    static: bool = False,
    attn: str | None = None,
    text: str | Path | None = None,
    input_file: str | Path | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
    offload_folder: str | Path | None = None,
    base: str | Path | None = None,
    laws: str | Sequence[str] | None = None,
    laws_seconds: float | None = None,
    fail_on: str = "fail",
    command: str = "",
    run: bool = False,
) -> CheckReport:
    """Audit the attention of a model.

    The model runs in evaluation mode, usually up to four times: judged, with a larger scale attribute, and once each
    for eager and sdpa; with attn="both" up to six times. All but the first take the first tokens of made inputs, and
    the whole inputs again if these do not agree. The laws (`sqrtdk.laws`) take 8 to 30 runs, most of them
    without a trace and, of made inputs, with their first tokens; or one run if the model has over 2e9 parameters. With
    `static` a copy on the meta device runs once.

    Args:
        model: A module; or a name for `sqrtdk.models.load.resolve`: "demo", a directory, a hub id, a factory; or an
            exported graph, .onnx or .pt2, which is read, and runs only on an `input_file`; or a .gguf file, for its
            metadata, or for what llama.cpp runs if `run` is true; or a .ggmldump file.
        inputs: A dict or tuple for forward, or one tensor; None makes suitable inputs from the config.
        static: Run on the meta device: scales and formulas, no statistics.
        attn: "eager" or "sdpa" audits that implementation, "both" audits one after the other. None audits the model's
            own and, unless that is costly (offloaded, over 2e9 parameters), compares the two if the model has both.
        text: UTF-8 file for the tokenizer, for a model given by name.
        input_file: safetensors with the inputs, for a model given by name.
        batch: Rows of made-up inputs, default 1.
        seq_len: Tokens per row of made-up inputs.
        device: For a model given by name; a module runs where it is.
        dtype: For a model given by name; a module keeps its own.
        seed: For weights, inputs and the run.
        revision: Of a hub id.
        trust_remote_code: Let the model's own Python files run.
        device_map: "auto" spreads a checkpoint through accelerate.
        offload_folder: Directory for weights that fit nowhere else.
        base: Base model of an adapter's directory; None takes the directory that the adapter names, or its neighbour.
        laws: "all", "none", or names of laws, in a sequence or joined by commas; None is "all".
        laws_seconds: Seconds that all laws together may take; None: any number. Laws that are left then are not asked.
        fail_on: Lowest severity that makes `exit_code` 1: "note", "warn", "fail", "critical"; "never"; or "unmeasured",
            which means "fail" and also counts every attention that could not be judged.
        command: The user's command line, for the report.
        run: Whether a .gguf file runs in llama.cpp; needs the extra `ggml`.

    Returns:
        The report; findings are worst first.

    Raises:
        ModelError: The model can't be built, its forward raises, or no attention runs in it, or the inputs have no row
            or no token.
        InvalidValueError: An option does not exist, or does not apply to a module; or there are no inputs, and no
            config to make them from.
        InvalidTypeError: `model` or `inputs` has another type.
        UnsupportedError: The module can't be switched to `attn`.

    Example:
        >>> report = check("demo:unscaled", seq_len=16)
        >>> {judged.mistake for judged in report.calls}, report.exit_code
        ({'missing'}, 1)
    """
    options = LoadOptions(
        static=static, attn=attn, text=text, input_file=input_file, batch=batch, seq_len=seq_len, device=device,
        dtype=dtype, seed=seed, revision=revision, trust_remote_code=trust_remote_code, device_map=device_map,
        offload_folder=offload_folder, base=base,
    )  # fmt: skip
    with progress_shown("check"):
        return check_with(
            model, inputs, options, laws=laws, laws_seconds=laws_seconds, fail_on=fail_on, command=command, run=run
        )


def check_with(
    model: nn.Module | str,
    inputs: Any,
    options: LoadOptions,
    *,
    laws: str | Sequence[str] | None = None,
    laws_seconds: float | None = None,
    fail_on: str = "fail",
    command: str = "",
    after: Callable[[LoadedModel], None] | None = None,
    run: bool = False,
    ranks: RankGroup | None = None,
) -> CheckReport:
    """Audit a model as `check` does, with the loading options in one object, and report progress.

    Args:
        model: A module, or a MODEL argument.
        inputs: As for `check`.
        options: How the model is loaded.
        laws: Names of laws to ask; None: as `check` does.
        laws_seconds: Limit of the time for laws.
        fail_on: Severity from which on the exit code is 1.
        command: Command line to record in the report.
        after: Called with each model once it is audited, while it is still in memory.
        run: Whether a .gguf file runs in llama.cpp.
        ranks: The ranks that all check the model now; None: they are found by the collectives that the model runs.
    """
    ranks = ranks or world()
    together = Together(ranks, model if isinstance(model, str) else "")
    with contextlib.nullcontext() if ranks is None else ranks.shared_errors(), unchanged(model, inputs) as before:
        asked = laws, laws_seconds, fail_on, command, after
        report = together.report(_checked(model, inputs, options, *asked, runs_file=run, whole=together.whole))
        report = dataclasses.replace(
            report, kv_bytes_per_token=_kv_bytes_per_token([judged.call for judged in report.calls])
        ) if report.ranks else report  # fmt: skip
    notes = [*(report.environment.get("notes") or ()), *before.stayed]
    return dataclasses.replace(report, environment=report.environment | {"notes": notes}) if before.stayed else report


def _checked(
    model: nn.Module | str,
    inputs: Any,
    options: LoadOptions,
    laws: str | Sequence[str] | None,
    laws_seconds: float | None,
    fail_on: str,
    command: str,
    after: Callable[[LoadedModel], None] | None,
    *,
    runs_file: bool,
    whole: Whole | None = None,
) -> CheckReport:
    """Check the options, load the model, and audit it; `check_with` describes the arguments."""
    attn = options.attn
    if fail_on not in FAIL_ON:
        raise InvalidValueError(
            Message("errors.options.fail_on", value=repr(fail_on)),
            hint=Message("errors.hint.one_of", names=joined(FAIL_ON, "comma")),
        )
    if attn is not None and attn not in (*ATTN, "both"):
        raise InvalidValueError(
            Message("errors.options.attn_is", value=repr(attn)),
            hint=Message("errors.hint.one_of_or_both", names=joined(ATTN, "comma")),
        )
    # All arguments are checked before a model is loaded, which may take minutes.
    names = names_of(table.DEFAULT if laws is None else laws)
    check_seconds(laws_seconds)
    check_seed(options.seed)
    check_sizes(options.rows, options.seq_len)
    if runs_file and (not isinstance(model, str) or ggml_kind(model) is None):
        raise InvalidValueError(Message("errors.options.run"), hint=Message("errors.hint.run_gguf"))
    if isinstance(model, str) and graph_kind(model) is not None and not runs_file:
        if inputs is not None:
            raise InvalidValueError(Message("errors.inputs.of_graph"), hint=Message("errors.hint.leave_them_out"))
        from sqrtdk.audit.graphs import audit_graph  # readers of formats that most runs do not need

        def ask(loaded: LoadedModel, run: ModelRun) -> ModelRun:
            report_progress(Message("progress.laws"))
            named = are_named(laws)
            return with_laws(run, answers_of(loaded, run, names, options.seed, named=named, seconds=laws_seconds))

        run, lost, findings = audit_graph(model, options, ask if names else None)
        if not run.laws:
            not_asked = (law_not_asked(name, "", Message("laws.asking.exported_graph")) for name in names)
            run = dataclasses.replace(run, laws=tuple(not_asked))
        return _report([run], lost, findings, seed=options.seed, command=command, fail_on=fail_on)
    runs: list[ModelRun] = []
    missing: list[NotMeasured] = []
    compare = {None: "auto", "both": "always"}.get(attn, "never")
    report_progress(Message("progress.loading"))
    for build in _builds(model, None if inputs is None else as_inputs(inputs), options):
        if build.reason is not None:
            missing.append(NotMeasured("", Message("premises.attention.asked", attn=str(attn), why=build.reason)))
        if build.loaded is not None:
            with by_default_of(build.loaded.module):
                # Laws and the comparison of implementations are done once: in the first run.
                keep = not runs and bool(names)
                how = "never" if runs else compare
                run = run_model(build.loaded, build.attn, seed=options.seed, compare=how, keep=keep, whole=whole)
                if not runs:
                    report_progress(Message("progress.laws"))
                    named, bound = are_named(laws), laws_seconds
                    answers = answers_of(build.loaded, run, names, options.seed, named=named, seconds=bound)
                    run = with_laws(run, answers)
            runs.append(run)
            if after is not None:
                after(build.loaded)
        del build  # frees the model: two large ones must not be in memory at once
    # with "both", implementations that exist are audited; one asked for by name is missed even if another ran
    not_run = [unmeasured.not_run_finding(entry) for entry in missing] if attn in ATTN else []
    return _report(runs, missing, not_run, seed=options.seed, command=command, fail_on=fail_on)


def _builds(model: nn.Module | str, inputs: Inputs | None, options: LoadOptions) -> Iterable[AttnBuild]:
    """Return what to run: the model as it is, with the requested attention, or with both."""
    if isinstance(model, nn.Module):
        return choices(from_module(model, inputs, options), options.attn)
    if not isinstance(model, str):
        raise InvalidTypeError(
            Message("errors.model.kind", kind=type(model).__name__),
            hint=hint_for(model, Message("errors.hint.module_or_name")),
        )
    if options.attn == "both":
        return iter_attn(model, options, inputs)
    return [AttnBuild(options.attn or "own", resolve_model(model, options, inputs))]


def _report(
    runs: Sequence[ModelRun],
    missing: Sequence[NotMeasured],
    not_run: Sequence[Finding],
    *,
    seed: int,
    command: str,
    fail_on: str,
) -> CheckReport:
    """Make one report of all runs, which differ in the implementation of attention."""
    first = runs[0]
    return CheckReport(
        model=first.model,
        mode=first.mode,
        calls=tuple(judged for run in runs for judged in run.calls),
        not_attention=tuple(dict.fromkeys(entry for run in runs for entry in run.not_attention)),
        not_measured=tuple(dict.fromkeys((*missing, *(entry for run in runs for entry in run.not_measured)))),
        findings=_worst_first(runs, not_run),
        seed=seed,
        command=command,
        environment=first.environment | {"attn": ", ".join(filter(None, (run.environment["attn"] for run in runs)))},
        fail_on=fail_on,
        sources=tuple(dict.fromkeys(source for run in runs for source in run.sources)),
        root=root(),
        laws=first.laws,
        kv_bytes_per_token=_kv_bytes_per_token([judged.call for judged in first.calls]),
    )


def _kv_bytes_per_token(calls: Sequence[AttentionCall]) -> int | None:
    """Return the bytes that a KV cache takes for one more token: sum of H (E + Ev) bytes(dtype) over the attentions.

    Counted are self-attentions whose rows see no later keys. Only there do keys and values of earlier tokens stay what
    they were; in an encoder a cache is of no use, and that of a cross-attention does not grow. Returns None if there
    is no such attention.
    """

    def caches(call: AttentionCall) -> bool:
        mask = call.mask
        if not call.self_attention or mask is None:
            return False
        # without values, as on the meta device, a mask has a name alone
        return mask.kind in TRIANGLES if mask.least is None else mask.least >= 0

    cached = list(filter(caches, calls))
    each = (
        kv_cache_bytes(1, call.kv_heads, 1, call.head_dim, value_head_dim=call.value_dim, dtype=vars(torch)[call.dtype])
        for call in cached
    )
    return sum(each) if cached else None


def _worst_first(runs: Sequence[ModelRun], others: Iterable[Finding] = ()) -> tuple[Finding, ...]:
    """Return the findings of all runs, each kind once per site, marked if only one of several runs shows it."""

    def kind(finding: Finding) -> tuple[str, ...]:
        # An unmeasured site may have several reasons, all of which count.
        each = (finding.message,) if finding.rule == UNMEASURED else ()
        return finding.rule, finding.site, str(finding.call), finding.severity, finding.fix, *each

    kinds_of_runs = [{kind(finding) for finding in run.findings} for run in runs]
    first: dict[tuple[str, ...], Finding] = {}
    for run in runs:
        for finding in run.findings:
            alone = len(runs) > 1 and sum(kind(finding) in kinds for kinds in kinds_of_runs) == 1
            if alone and finding.rule not in ("eager_vs_sdpa", *FINDINGS):  # laws are tested in the first run only
                message = Message("premises.attention.only_with", text=finding.message, attn=run.attn)
                finding = dataclasses.replace(finding, message=message)
            # Runs of eager and SDPA find the same twice.
            first.setdefault(kind(finding), finding)
    order = {name: place for place, name in enumerate((*RULES, *FINDINGS))}

    def rank(finding: Finding) -> tuple[int, int]:
        return -SEVERITIES.index(finding.severity), order.get(finding.rule, len(order))

    return tuple(sorted((*others, *first.values()), key=rank))
