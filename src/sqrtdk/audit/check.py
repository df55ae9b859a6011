"""`check`: run a model once under a trace, judge every attention in it, apply every rule, and report.

The model is left as it was: training flags, hooks, attributes, devices, random state.
"""

from __future__ import annotations

import copy
import importlib.metadata
import platform
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.audit.context import Context, Rerun
from sqrtdk.audit.records import SEVERITIES, CheckReport, Finding, ModelInfo
from sqrtdk.audit.rules import RULES
from sqrtdk.audit.rules.eager_vs_sdpa import implementation
from sqrtdk.audit.rules.unused import NORM_NAMES
from sqrtdk.audit.verdicts import judge_all
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError
from sqrtdk.models.inputs import guess_inputs
from sqrtdk.models.load import resolve
from sqrtdk.models.records import Inputs, LoadedModel
from sqrtdk.models.run import call
from sqrtdk.trace import trace
from sqrtdk.trace.records import NotMeasured

ATTN = ("eager", "sdpa", "both")


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

    Args:
        model: A module, or what `sqrtdk.models.load.resolve` takes: "demo", a directory, a hub id, a factory.
        inputs: A dict or tuple for forward, or one tensor; None makes inputs of the right kind from the config.
        static: Run on the meta device: scales and formulas, no statistics.
        attn: "eager" or "sdpa" to audit that implementation; None or "both" audits the model's own, and compares the
            two where the model has both.
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
        fail_on: Least severity that makes `exit_code` 1: "note", "warn", "fail" or "critical".
        command: What the user typed, for the report.

    Returns:
        The report; findings are worst first.

    Raises:
        ModelError: The model can't be built, its forward raises, or no attention runs in it.
        InvalidValueError: An option that does not exist, or that does not go with a module.

    Example:
        >>> report = check("demo:unscaled", seq_len=16)
        >>> {judged.mistake for judged in report.calls}, report.exit_code
        ({'missing'}, 1)
    """
    if fail_on not in SEVERITIES:
        raise InvalidValueError(f"fail_on is {fail_on!r}", hint=f"Use one of: {', '.join(SEVERITIES)}.")
    if attn is not None and attn not in ATTN:
        raise InvalidValueError(f"attn is {attn!r}", hint=f"Use one of: {', '.join(ATTN)}.")
    if isinstance(model, str):
        loaded = resolve(
            model,
            static=static,
            dtype=dtype,
            device=device or "cpu",
            seed=seed,
            revision=revision,
            trust_remote_code=trust_remote_code,
            attn=None if attn == "both" else attn,
            device_map=device_map,
            offload_folder=offload_folder,
            batch=1 if batch is None else batch,
            seq_len=seq_len,
            text=text,
            input_file=input_file,
        )
        if inputs is not None:
            loaded = LoadedModel(
                loaded.module, _as_inputs(inputs), loaded.id, loaded.kind, loaded.config, loaded.attn, loaded.notes
            )
    elif isinstance(model, nn.Module):
        given: dict[str, object] = {
            "text": text,
            "input_file": input_file,
            "device_map": device_map,
            "offload_folder": offload_folder,
        }
        given |= {"device": device, "dtype": dtype, "revision": revision}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise InvalidValueError(
                f"{', '.join(wrong)} given with a module", hint="Prepare the module and its inputs yourself."
            )
        loaded = _from_module(model, inputs, static, batch, seq_len, seed)
    else:
        raise InvalidTypeError(f"model is a {type(model).__name__}", hint="Give a torch.nn.Module or a name.")
    switch = attn if attn in ("eager", "sdpa") and isinstance(model, nn.Module) else None
    return _audit(loaded, seed=seed, switch=switch, compare=attn in (None, "both"), fail_on=fail_on, command=command)


def _as_inputs(inputs: Any) -> Inputs:
    if isinstance(inputs, Tensor):
        return (inputs,)
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if isinstance(inputs, list | tuple):
        return tuple(inputs)
    raise InvalidTypeError(f"inputs are a {type(inputs).__name__}", hint="Give a dict, a tuple, or one tensor.")


def _experts(model: nn.Module) -> Any:
    return getattr(getattr(model, "config", None), "_experts_implementation", None)


def _to_meta(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """A copy of the model on the meta device, made without copying a weight, and the inputs there."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")

    def move(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    moved = {k: move(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(map(move, inputs))
    try:
        twin = copy.deepcopy(model, memo)
        choose: Any = getattr(twin, "set_experts_implementation", None)
        if choose is not None and _experts(model) is not None:
            choose("batched_mm")  # the others route by values, which meta tensors lack
        return twin, moved
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} can't be copied to the meta device: {type(error).__name__}: {error}",
            hint="Build it under `with torch.device('meta')` and check that.",
        ) from error


def _from_module(
    model: nn.Module, inputs: Any, static: bool, batch: int | None, seq_len: int | None, seed: int
) -> LoadedModel:
    notes: tuple[str, ...] = ()
    if inputs is None:
        with _random_state(model):
            made, notes = guess_inputs(model, batch=1 if batch is None else batch, seq_len=seq_len, seed=seed)
    else:
        made = _as_inputs(inputs)
    module = model
    if static and not any(parameter.is_meta for parameter in model.parameters()):
        module, made = _to_meta(model, made)
    config = getattr(model, "config", None)
    name = getattr(config, "_attn_implementation", None)
    attn = name if isinstance(name, str) else None
    return LoadedModel(module, made, type(model).__name__, "module", config, attn, notes)


@contextmanager
def _random_state(model: nn.Module) -> Iterator[None]:
    """Restore the random state of Python, of the CPU and of the model's CUDA devices."""
    state = random.getstate()
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the time of the block, submodule by submodule."""
    before = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _watch_norms(model: nn.Module) -> Iterator[set[str]]:
    """Collect the paths of the QK norms whose forward runs."""
    ran: set[str] = set()
    handles = []
    try:
        for path, module in model.named_modules(remove_duplicate=False):
            if path.rpartition(".")[2] in NORM_NAMES:
                handles.append(module.register_forward_hook(lambda *_, path=path: ran.add(path)))
        yield ran
    finally:
        for handle in handles:
            handle.remove()


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
        "attn": loaded.attn,
        "notes": list(loaded.notes),
    }


def _audit(
    loaded: LoadedModel, *, seed: int, switch: str | None, compare: bool, fail_on: str, command: str
) -> CheckReport:
    module = loaded.module
    static = any(p.is_meta for p in module.parameters()) and not hasattr(module, "hf_device_map")
    with ExitStack() as stack:
        stack.enter_context(_random_state(module))
        stack.enter_context(_eval_mode(module))
        if switch is not None and hasattr(module, "set_attn_implementation"):
            stack.enter_context(implementation(module, switch))
        with _watch_norms(module) as ran:
            torch.manual_seed(seed)
            with trace(module, stats=not static) as run:
                call(module, loaded.inputs)
        if not run.calls:
            reasons = [entry.reason for entry in run.not_measured] + [entry.reason for entry in run.not_attention]
            what = "no attention could be read" if run.not_measured else "no attention ran"
            raise ModelError(
                f"{what} in {loaded.id}" + (f": {reasons[0]}" if reasons else ""),
                hint="Give a model with softmax(q . k) v in its forward, run without torch.compile.",
            )

        def rerun(stats: bool, enlarge: Mapping[tuple[str, int], float] | None) -> Rerun:
            torch.manual_seed(seed)
            options: dict[str, Any] = {"enlarge": dict(enlarge)} if enlarge else {}
            with trace(module, stats=stats, **options) as again:
                output = call(module, loaded.inputs)
            return Rerun(again.calls, tuple(_tensors(output)), len(again.not_measured))

        judged = judge_all(run.calls, module)
        context = Context(
            model=module,
            calls=judged,
            mode="static" if static else "dynamic",
            rerun=None if static else rerun,
            ran=frozenset(ran),
            compare=compare,
            dtype=str(_environment(loaded)["dtype"]),
        )
        found = [entry for rule in RULES.values() for entry in rule(context)]
    findings = [entry for entry in found if isinstance(entry, Finding)]
    skipped = tuple(entry for entry in found if isinstance(entry, NotMeasured))
    order = {name: place for place, name in enumerate(RULES)}
    findings.sort(key=lambda finding: (-SEVERITIES.index(finding.severity), order[finding.rule]))
    return CheckReport(
        model=ModelInfo(loaded.id, type(module).__name__, sum(p.numel() for p in module.parameters())),
        mode=context.mode,
        calls=judged,
        not_attention=run.not_attention,
        not_measured=run.not_measured + skipped,
        findings=tuple(findings),
        seed=seed,
        command=command,
        environment=_environment(loaded),
        fail_on=fail_on,
    )
