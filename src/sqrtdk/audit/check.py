"""`check`: run a model under a trace, judge every attention in it, apply every rule, and report.

The model is left as it was: training flags, hooks, devices, random state, and the attributes that the audit itself
sets. What a forward pass changes by itself (a cache, a buffer that counts its calls) changes as with any forward pass.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.audit.context import Context, Rerun
from sqrtdk.audit.given import as_inputs, choices, from_module, on_meta, refuse_empty
from sqrtdk.audit.guard import eval_mode, random_state, watch_norms
from sqrtdk.audit.health import health
from sqrtdk.audit.probe import make_probe
from sqrtdk.audit.records import FAIL_ON, SEVERITIES, UNMEASURED, CheckReport, Finding, JudgedCall, ModelInfo
from sqrtdk.audit.rules import RULES, unmeasured
from sqrtdk.audit.silence import silences
from sqrtdk.audit.switch import ATTN, current, implementation, offers_choice
from sqrtdk.audit.verdicts import judge_all
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError
from sqrtdk.models.attentions import IDLE, watch_modules
from sqrtdk.models.limits import check_seed, check_sizes
from sqrtdk.models.load import iter_attn, resolve
from sqrtdk.models.modules import frozen_hint
from sqrtdk.models.records import AttnBuild, LoadedModel
from sqrtdk.models.run import call as forward
from sqrtdk.tracing.records import NotAttention, NotMeasured
from sqrtdk.tracing.trace import trace


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """What one run of the model yielded."""

    attn: str  # "eager" or "sdpa" where it was chosen, else "own"
    model: ModelInfo
    mode: str
    environment: dict[str, Any]
    calls: tuple[JudgedCall, ...]
    not_attention: tuple[NotAttention, ...]
    not_measured: tuple[NotMeasured, ...]
    findings: tuple[Finding, ...]


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
    fail_on: str = "fail",
    command: str = "",
) -> CheckReport:
    """Audit the attention of a model.

    The model runs in evaluation mode, as a rule up to four times: judged, with a larger scale attribute, and once each
    for eager and sdpa; with attn="both" up to six times. With `static` a copy of it on the meta device runs once. Where
    only an attribute declares a scale, up to three more runs ask whether the model follows it.

    Args:
        model: A module, or what `sqrtdk.models.load.resolve` takes: "demo", a directory, a hub id, a factory.
        inputs: A dict or tuple for forward, or one tensor; None makes inputs of the right kind from the config.
        static: Run on the meta device: scales and formulas, no statistics.
        attn: "eager" or "sdpa" audits that implementation, "both" the one and then the other. None audits the model's
            own and, unless that is costly (offloaded, over 2e9 parameters), compares the two where the model has both.
        text: UTF-8 file for the tokenizer, for a model given by name.
        input_file: safetensors with the inputs, for a model given by name.
        batch: Rows of made-up inputs, default 1.
        seq_len: Tokens a row of made-up inputs.
        device: For a model given by name; a module runs where it is.
        dtype: For a model given by name; a module keeps its own.
        seed: For weights, inputs and the run.
        revision: Of a hub id.
        trust_remote_code: Let the model's own Python files run.
        device_map: "auto" spreads a checkpoint through accelerate.
        offload_folder: Directory for what fits nowhere else.
        fail_on: Least severity that makes `exit_code` 1: "note", "warn", "fail", "critical"; "never"; or "unmeasured",
            which is "fail" and every attention that could not be judged.
        command: What the user typed, for the report.

    Returns:
        The report; findings are worst first.

    Raises:
        ModelError: The model can't be built, its forward raises, or no attention runs in it, or on inputs without a
            row or a token.
        InvalidValueError: An option that does not exist, or that does not go with a module; no inputs, and no config
            to make them from.
        InvalidTypeError: `model` or `inputs` of another type.
        UnsupportedError: The module can't be switched to `attn`.

    Example:
        >>> report = check("demo:unscaled", seq_len=16)
        >>> {judged.mistake for judged in report.calls}, report.exit_code
        ({'missing'}, 1)
    """
    if fail_on not in FAIL_ON:
        raise InvalidValueError(f"fail_on is {fail_on!r}", hint=f"Use one of: {', '.join(FAIL_ON)}.")
    if attn is not None and attn not in (*ATTN, "both"):
        raise InvalidValueError(f"attn is {attn!r}", hint=f"Use one of: {', '.join(ATTN)}, both.")
    check_seed(seed)
    check_sizes(1 if batch is None else batch, seq_len)
    given = None if inputs is None else as_inputs(inputs)
    named: dict[str, Any] = {
        "text": text,
        "input_file": input_file,
        "device_map": device_map,
        "offload_folder": offload_folder,
        "device": device,
        "dtype": dtype,
        "revision": revision,
    }
    builds: Iterable[AttnBuild]
    if isinstance(model, str):
        options = named | {"static": static, "seed": seed, "trust_remote_code": trust_remote_code, "inputs": given}
        options |= {"device": device or "cpu", "batch": 1 if batch is None else batch, "seq_len": seq_len}
        if attn == "both":
            builds = iter_attn(model, **options)
        else:
            builds = [AttnBuild(attn or "own", resolve(model, attn=attn, **options))]
    elif isinstance(model, nn.Module):
        if wrong := [name for name, value in named.items() if value is not None]:
            raise InvalidValueError(
                f"{', '.join(wrong)} given with a module", hint="Prepare the module and its inputs yourself."
            )
        builds = choices(from_module(model, given, static, batch, seq_len, seed), attn)
    else:
        raise InvalidTypeError(f"model is a {type(model).__name__}", hint="Give a torch.nn.Module or a name.")
    runs: list[_Run] = []
    missing: list[NotMeasured] = []
    compare = {None: "auto", "both": "always"}.get(attn, "never")
    for build in builds:
        if build.reason is not None:
            missing.append(NotMeasured("", f"attention {attn} was asked for: {build.reason}"))
        if build.loaded is not None:
            runs.append(_audit(build.loaded, build.attn, seed=seed, compare="never" if runs else compare))
        del build  # two large models need not be in memory at once
    # of "both" each is audited that there is; one that was asked for by its name is missed where there is another
    not_run = [unmeasured.not_run(entry) for entry in missing] if attn in ATTN else []
    return _report(runs, missing, not_run, seed=seed, command=command, fail_on=fail_on)


def _report(
    runs: Sequence[_Run],
    missing: Sequence[NotMeasured],
    not_run: Sequence[Finding],
    *,
    seed: int,
    command: str,
    fail_on: str,
) -> CheckReport:
    """One report on all runs, which differ in the implementation of attention."""
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
    )


def _worst_first(runs: Sequence[_Run], others: Iterable[Finding] = ()) -> tuple[Finding, ...]:
    """The findings of all runs, each kind once a site; what one of several runs shows says which. `others` join."""

    def kind(finding: Finding) -> tuple[str, ...]:
        each = (finding.message,) if finding.rule == UNMEASURED else ()
        return finding.rule, finding.site, finding.severity, finding.fix, *each

    seen = [{kind(finding) for finding in run.findings} for run in runs]
    kept: dict[tuple[str, ...], Finding] = {}
    for run in runs:
        for finding in run.findings:
            alone = len(runs) > 1 and sum(kind(finding) in kinds for kinds in seen) == 1
            if alone and finding.rule != "eager_vs_sdpa":
                finding = dataclasses.replace(finding, message=f"{finding.message} (only with {run.attn} attention)")
            kept.setdefault(kind(finding), finding)
    order = {name: place for place, name in enumerate(RULES)}
    return tuple(
        sorted((*others, *kept.values()), key=lambda found: (-SEVERITIES.index(found.severity), order[found.rule]))
    )


def _tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a model's output, in order."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and not output.is_meta:
            yield output.detach()
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _environment(loaded: LoadedModel) -> dict[str, Any]:
    first = next((p for p in loaded.module.parameters() if p.is_floating_point()), None)
    return {
        "sqrtdk": _version("sqrtdk"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "platform": platform.platform(),
        "device": str(first.device) if first is not None else "cpu",
        "dtype": str(first.dtype).removeprefix("torch.") if first is not None else "",
        "attn": current(loaded.module),
        "notes": list(loaded.notes),
    }


def _audit(loaded: LoadedModel, attn: str, *, seed: int, compare: str) -> _Run:
    """Run a model under a trace with the attention asked for, judge its calls and apply the rules."""
    module = loaded.module
    static = on_meta(module, loaded.inputs)
    with ExitStack() as stack:
        stack.enter_context(random_state(module))
        stack.enter_context(eval_mode(module))
        if attn in ATTN and offers_choice(module):
            stack.enter_context(implementation(module, attn))
        environment = _environment(loaded)
        with watch_norms(module) as ran, watch_modules() as called:
            torch.manual_seed(seed)
            with trace(module, stats=not static) as run:
                try:
                    forward(module, loaded.inputs)
                except ModelError:
                    refuse_empty(loaded.inputs)
                    raise
        if not any(call.batch and call.query_len and call.key_len for call in run.calls):
            refuse_empty(loaded.inputs)
        if not run.calls:
            reasons = [entry.reason for entry in run.not_measured] + [entry.reason for entry in run.not_attention]
            what = "no attention could be read" if run.not_measured else "no attention ran"
            raise ModelError(
                f"{what} in {loaded.id}" + (f": {reasons[0]}" if reasons else ""),
                hint=frozen_hint(module)
                or "Give a model with softmax(q . k) v in its forward, run without torch.compile, "
                "in the thread that calls forward: other threads are not seen.",
            )
        lost, idle_or_doubtful = silences(module, called, run)

        def rerun(stats: bool, enlarge: Mapping[tuple[str, int], float] | None) -> Rerun:
            torch.manual_seed(seed)
            options: dict[str, Any] = {"enlarge": dict(enlarge)} if enlarge else {}
            with trace(module, stats=stats, **options) as again:
                output = forward(module, loaded.inputs)
            return Rerun(again.calls, tuple(_tensors(output)), len(again.not_measured))

        judged = judge_all(run.calls, module, make_probe(run.calls, lambda: rerun(False, None).calls))
        context = Context(
            model=module,
            calls=judged,
            mode="static" if static else "dynamic",
            rerun=None if static else rerun,
            ran=frozenset(ran),
            compare=compare,
            dtype=str(environment["dtype"]),
            lost=lost,
            idle_or_doubtful=idle_or_doubtful,
        )
        found = [entry for rule in RULES.values() for entry in rule(context)]
        findings = tuple(entry for entry in found if isinstance(entry, Finding))
    return _Run(
        attn=attn,
        model=ModelInfo(loaded.id, type(module).__name__, sum(p.numel() for p in module.parameters())),
        mode=context.mode,
        environment=environment,
        calls=tuple(dataclasses.replace(entry, health=health(entry, findings)) for entry in judged),
        not_attention=run.not_attention,
        not_measured=(
            *lost,
            *(entry for entry in idle_or_doubtful if entry.reason == IDLE),
            *(entry for entry in found if isinstance(entry, NotMeasured)),
        ),
        findings=findings,
    )
