"""One side of a comparison: a module, a name, a trace file or an exported graph, run once with its tensors kept."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.audit.guard import eval_mode, random_state
from sqrtdk.audit.own_module import from_module, on_meta
from sqrtdk.audit.switch import implementation, offers_choice
from sqrtdk.audit.tokens import Tokens, tokens_of
from sqrtdk.compare.align import name_of
from sqrtdk.compare.records import SideInfo, Unpaired
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError, UnsupportedError
from sqrtdk.models.load import resolve
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import Inputs, LoadedModel
from sqrtdk.models.run import call as forward
from sqrtdk.models.signature import forward_arguments
from sqrtdk.recording.records import Cut
from sqrtdk.tracing.tensors import CallTensors
from sqrtdk.tracing.trace import Trace

PACKAGES = ("torch", "transformers")
Given = nn.Module | str | Path


@dataclass(slots=True, eq=False)
class Side:
    """A side that has run.

    Attributes:
        info: for the report.
        calls: its attentions.
        missed: those that could not be read.
        inputs: that it ran on; None of a trace file.
        tokens: which of them are no padding.
        forwards: how often it has run.
        again: runs it in float64 and gives the inputs of its attentions by `name_of`; None where that can't be done.
        cuts: of a trace file what each call is of the one that ran, parallel to `calls`; empty where all are whole.
    """

    info: SideInfo
    calls: tuple[CallTensors, ...]
    missed: tuple[Unpaired, ...] = ()
    inputs: Inputs | None = None
    tokens: Tokens = field(default_factory=Tokens)
    forwards: int = 1
    again: Callable[[], Mapping[str, Tensor]] | None = None
    cuts: tuple[Cut | None, ...] = ()


def open_side(given: Given, label: str, inputs: Inputs | None, options: LoadOptions, *, other: Inputs | None) -> Side:
    """Load and run a side.

    Args:
        given: what the user named.
        label: "A" or "B".
        inputs: that were given; None makes some, or takes the other side's.
        options: of loading.
        other: inputs that the other side ran on, if it has run.
    """
    if isinstance(given, nn.Module):
        attn = options.attn
        loaded = from_module(given, _fitted(given, inputs or other), options)
        return run_module(loaded, attn, options.seed, label)
    name = str(given)
    suffix = Path(name).suffix.lower()
    if suffix == ".safetensors":
        return _of_file(Path(name))
    if suffix == ".onnx":
        return _of_onnx(Path(name), inputs or other, label)
    if suffix == ".pt2":
        return run_module(_exported(Path(name), inputs or other, options), None, options.seed, label, kind="exported")
    if not isinstance(given, str | Path):
        raise InvalidTypeError(
            f"{label} is a {type(given).__name__}", hint="Give a torch.nn.Module, a name, or a path."
        )
    loaded = resolve(name, options, inputs or other)
    return run_module(loaded, None, options.seed, label)


def _fitted(module: nn.Module, inputs: Inputs | None) -> Inputs | None:
    """The inputs as the module's forward takes them: those of its names, else the tensors in their order."""
    if not isinstance(inputs, dict):
        return inputs
    takes = forward_arguments(module)
    if not takes or set(inputs) <= set(takes):
        return inputs
    known = {name: value for name, value in inputs.items() if name in takes}
    if known and all(name in known for name, needed in takes.items() if needed):
        return known
    return tuple(value for value in inputs.values() if isinstance(value, Tensor))[: max(1, sum(takes.values()))]


def run_module(loaded: LoadedModel, attn: str | None, seed: int, label: str, kind: str = "model") -> Side:
    """Run a module once under a trace that keeps its tensors.

    Raises:
        ModelError: its forward raises, no attention runs in it, or it is on the meta device.
        UnsupportedError: it can't be switched to `attn`.
    """
    module = loaded.module
    if on_meta(module, loaded.inputs):
        raise ModelError(
            f"{label}, {loaded.id}, has no values: it is on the meta device",
            hint="Give both sides their weights: a difference is one of numbers.",
        )
    if attn is not None and not offers_choice(module):
        raise UnsupportedError(
            f"{label}: {type(module).__name__} offers no choice of attention, {attn} was asked for",
            hint=f"Leave --attn-{label.lower()} out.",
        )
    tokens = tokens_of(module, loaded.inputs)
    run = _traced(module, loaded.inputs, seed, attn)
    missed = tuple(Unpaired(entry.site, 0, entry.formula, entry.reason) for entry in run.not_measured)
    if not run.calls:
        reasons = [entry.reason for entry in run.not_measured] + [entry.reason for entry in run.not_attention]
        raise ModelError(
            f"no attention ran in {label}, {loaded.id}" + (f": {reasons[0]}" if reasons else ""),
            hint="Both sides must have softmax(q . k) v in their forward, in the thread that calls it.",
        )

    def again() -> Mapping[str, Tensor]:
        twin = copy.deepcopy(module).double()
        exact = _traced(twin, _doubled(loaded.inputs), seed, attn)
        return inputs_of(exact.tensors)

    first = run.calls[0]
    info = SideInfo(
        name=loaded.id,
        kind=kind,
        module_class=type(module).__name__,
        attn=attn or loaded.attn,
        dtype=first.dtype,
        device=first.device,
        calls=len(run.calls),
        versions=_versions(),
    )
    return Side(info, run.tensors, missed, loaded.inputs, tokens, again=again)


def _traced(module: nn.Module, inputs: Inputs, seed: int, attn: str | None) -> Trace:
    with ExitStack() as stack:
        stack.enter_context(random_state(module))
        stack.enter_context(eval_mode(module))
        if attn is not None:
            stack.enter_context(implementation(module, attn))
        torch.manual_seed(seed)
        with Trace(module, stats=False, numeric=False, keep=True) as run:
            forward(module, inputs)
    return run


def _doubled(inputs: Inputs) -> Inputs:
    def double(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    if isinstance(inputs, dict):
        return {name: double(value) for name, value in inputs.items()}
    return tuple(double(value) for value in inputs)


def inputs_of(calls: tuple[CallTensors, ...]) -> dict[str, Tensor]:
    """What entered each attention, by its name; calls of which that is not known are left out."""
    known: dict[str, Tensor] = {}
    for call in calls:
        entering = entering_of(call)
        if entering is not None:
            known[name_of(call)] = entering
    return known


def entering_of(call: CallTensors) -> Tensor | None:
    """The input (B, L, D) of the projection of q, or else what is nearest to it that is recorded."""
    if call.query.projection is not None:
        return call.query.projection.input
    return call.query.projected


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _of_file(path: Path) -> Side:
    from sqrtdk.recording.read import read_trace_file

    file = read_trace_file(path)
    if not file.calls:
        raise InvalidValueError(f"{path} holds no call", hint="Record a model that has attention.")
    info = SideInfo(str(path), "trace file", calls=len(file.calls), dtype=file.calls[0].dtype)
    return Side(info, tuple(file.calls), forwards=0, cuts=tuple(file.cuts))


def _of_onnx(path: Path, inputs: Inputs | None, label: str) -> Side:
    from sqrtdk.graphs.onnx import read_onnx

    if inputs is None:
        raise InvalidValueError(
            f"{label} is an ONNX graph, and no inputs are known",
            hint="Give a model as A, whose inputs are made up, or inputs with --input FILE.safetensors.",
        )
    run = read_onnx(path, inputs)
    missed = tuple(Unpaired(entry.site, 0, None, entry.reason) for entry in run.missing)
    if not run.calls:
        reason = f": {run.missing[0].reason}" if run.missing else ""
        raise ModelError(f"no attention could be read in {label}, {path}{reason}", hint="Give a graph with attention.")
    first, versions = run.calls[0], dict(run.versions)
    info = SideInfo(str(path), "onnx", run.producer, None, first.dtype, "cpu", len(run.calls), versions)
    return Side(info, run.calls, missed, inputs, forwards=run.forwards)


def _exported(path: Path, inputs: Inputs | None, options: LoadOptions) -> LoadedModel:
    from sqrtdk.graphs.program import read_exported

    return read_exported(path, inputs, trust_remote_code=options.trust_remote_code)
