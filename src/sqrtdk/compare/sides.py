"""One side of a comparison: a module, a name, a trace file or an exported graph, run once with its tensors kept."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import hint_for, unwrapped
from sqrtdk.audit.context import TokenMasks, tokens_of
from sqrtdk.audit.guard import evaluated, offers_choice
from sqrtdk.audit.own_module import from_module, refuse_empty
from sqrtdk.audit.records import JudgedCall
from sqrtdk.audit.verdicts import judge_all
from sqrtdk.compare.align import name_of, once_a_site
from sqrtdk.compare.inputs import fit_inputs
from sqrtdk.compare.outside.modules import ModuleListener, ModuleStep, Patch
from sqrtdk.compare.records import SideInfo, Unpaired, kind_word
from sqrtdk.compare.weights.records import KnownChanges
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError, SqrtdkError, UnsupportedError
from sqrtdk.frontends.module import ForeignModule
from sqrtdk.messages import Message, joined
from sqrtdk.models.inputs import without_numbers
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import Inputs, LoadedModel
from sqrtdk.models.run import by_default_of
from sqrtdk.models.run import call as forward
from sqrtdk.modules.calls import CallPlace
from sqrtdk.modules.structures import tensors_of
from sqrtdk.recording.records import Cut, RankRows
from sqrtdk.tracing.records import AttentionCall
from sqrtdk.tracing.tensors import CallTensors
from sqrtdk.tracing.trace import Trace

COMPARED_PACKAGES = ("torch", "transformers")
TRACE, ONNX, EXPORTED, DUMP = ".safetensors", ".onnx", ".pt2", ".ggmldump"  # file suffixes of sides
TRACE_KIND = "trace file"  # `SideInfo.kind` of a trace file
ModelSource = nn.Module | str | Path
OfSides = tuple[Any, Any]  # an option of A alone, and the same of B alone


@dataclass(frozen=True, slots=True, eq=False)
class FinerRun:
    """A further run of a side in a finer dtype.

    Attributes:
        dtype: dtype of the run.
        inputs: what enters its attentions, by `name_of`.
        outputs: every floating tensor that its forward returned.
        steps: calls of its modules, in the order in which they end; empty if not recorded.
        listened: whether module calls were recorded; a scripted model has none even so.
        calls: its attentions, if the patch asked for them.
        replaced: module calls whose output was replaced as the patch asked.
    """

    dtype: torch.dtype
    inputs: Mapping[str, Mapping[str, Tensor]]
    outputs: Mapping[str, Tensor]
    steps: tuple[ModuleStep, ...] = ()
    replaced: frozenset[CallPlace] = frozenset()
    listened: bool = False
    calls: tuple[CallTensors, ...] = ()


@dataclass(slots=True, eq=False)
class ModelSide:
    """A side that has run.

    Attributes:
        info: description for the report.
        calls: its attentions.
        missed: attentions that could not be read.
        inputs: inputs of the run; None for a trace file without them.
        tokens: which input positions are not padding.
        forwards: how often it has run.
        outputs: every floating tensor that its forward returned, by name; None for a trace file.
        again: runs the side in float64. The first argument asks for the steps of its modules; the second is what the
            run takes from the other side. None if it can't run so.
        exact: result of that run.
        notes: sentences on what was decided for the user.
        cuts: for a trace file, the recorded part of each call, parallel to `calls`; empty if all are complete.
        declared: what declares a call's scale, by `name_of`, if config or family declares it and the run applies it.
        module: module that ran; None for a file.
        ranks: for the files of several ranks, the parts of each call's output, parallel to `calls`.
        known: of A, what its weights have of B's: an adapter, a rounding.
    """

    info: SideInfo
    calls: tuple[CallTensors, ...]
    missed: tuple[Unpaired, ...] = ()
    inputs: Inputs | None = None
    tokens: TokenMasks = field(default_factory=TokenMasks)
    forwards: int = 1
    outputs: Mapping[str, Tensor] | None = None
    again: Callable[[bool, Patch | None], FinerRun] | None = None
    exact: FinerRun | None = None
    notes: tuple[str, ...] = ()
    cuts: tuple[Cut | None, ...] = ()
    declared: Mapping[str, str] = field(default_factory=dict)
    module: nn.Module | None = None
    ranks: tuple[tuple[RankRows, ...], ...] = ()
    known: KnownChanges | None = None


def options_of_sides(
    both: LoadOptions, *, attn: OfSides, dtype: OfSides, device: OfSides, revision: OfSides
) -> tuple[LoadOptions, LoadOptions]:
    """Return the loading options of A and of B, from common options and pairs of own options.

    A side's own option wins unless it is None. Text and input file belong to A alone: B runs on A's inputs.

    Example:
        >>> none, both = (None, None), LoadOptions(seed=3, text="poem.txt")
        >>> a, b = options_of_sides(both, attn=(None, "sdpa"), dtype=none, device=none, revision=none)
        >>> (a.attn, a.text, a.seed), (b.attn, b.text, b.seed)
        ((None, 'poem.txt', 3), ('sdpa', None, 3))
    """
    own = {"attn": attn, "dtype": dtype, "device": device, "revision": revision}
    a, b = (
        replace(both, **{name: pair[side] for name, pair in own.items() if pair[side] is not None}) for side in (0, 1)
    )
    return a, replace(b, text=None, input_file=None)


def load_side(given: ModelSource, label: str, inputs: Inputs | None, options: LoadOptions) -> LoadedModel | Path:
    """Return the loaded module with its inputs, or the path of a trace file or ONNX graph.

    Raises:
        ModelError: the module can't be built.
        InvalidValueError: no inputs are given and none can be made.
    """
    with _errors_name_side(label):
        if isinstance(given, nn.Module):
            given = unwrapped(given)
            fitted = None if inputs is None else fit_inputs(given, inputs)
            loaded = from_module(given, None if fitted is None else fitted.inputs, options)
            return loaded if fitted is None else replace(loaded, notes=(*loaded.notes, *fitted.notes))
        if not isinstance(given, str | Path):
            raise InvalidTypeError(
                f"{label} is a {type(given).__name__}",
                hint=hint_for(given, "Give a torch.nn.Module, a name, or a path."),
            )
        if (suffix := Path(given).suffix.lower()) in (TRACE, ONNX):
            return Path(given)
        if suffix == EXPORTED:
            from sqrtdk.graphs.program import read_exported

            return read_exported(Path(given), inputs, trust_remote_code=options.trust_remote_code)
        loaded = resolve_model(str(given), options, inputs)
        if inputs is None:
            return loaded
        fitted = fit_inputs(loaded.module, loaded.inputs)
        return replace(loaded, inputs=fitted.inputs, notes=(*loaded.notes, *fitted.notes))


def run_side(loaded: LoadedModel | Path, label: str, inputs: Inputs | None, options: LoadOptions) -> ModelSide:
    """Run what `load_side` returned, and return the side. A graph runs on `inputs`; a loaded module on its own."""
    if isinstance(loaded, Path):
        side = side_of_file(loaded) if loaded.suffix.lower() == TRACE else _of_onnx(loaded, inputs, label, options)
        side.notes += _unused(side.info.kind, options)
        return side
    attn = options.attn if loaded.kind == "module" else None
    with by_default_of(loaded.module):
        side = run_module(loaded, attn, options.seed, label, "exported" if loaded.kind == "exported" else "model")
    side.notes = (*loaded.notes, *(loaded.module.notes if isinstance(loaded.module, ForeignModule) else ()))
    return side


def _unused(kind: str, options: LoadOptions) -> tuple[str, ...]:
    """Return a note on options that have no effect on a file, whose run is already recorded."""
    every = {name: getattr(options, name) for name in ("attn", "dtype", "device", "revision")}
    named = [f"{name} {str(value).removeprefix('torch.')}" for name, value in every.items() if value is not None]
    return (Message("compare.note.no_effect", options=joined(named, "comma"), kind=kind_word(kind)),) if named else ()


@contextmanager
def _errors_name_side(label: str) -> Iterator[None]:
    """Adds the side to the message of a ModelError, since both sides may have the same class."""
    try:
        yield
    except ModelError as error:
        if type(error) is not ModelError:
            raise
        raise ModelError(Message("joins.colon", first=label, second=error.message), hint=error.hint) from error


def run_module(loaded: LoadedModel, attn: str | None, seed: int, label: str, kind: str = "model") -> ModelSide:
    """Run a module once under a trace that keeps its tensors, and return the side.

    Raises:
        ModelError: forward raises, no attention runs, or the module is on the meta device.
        UnsupportedError: the module can't be switched to `attn`.
    """
    module = loaded.module
    if without_numbers(module, loaded.inputs):
        raise ModelError(
            f"{label}, {loaded.id}, has no values: it is on the meta device",
            hint="Give both sides their weights: a difference is one of numbers.",
        )
    if attn is not None and not offers_choice(module):
        raise UnsupportedError(
            f"{label}: {type(module).__name__} offers no choice of attention, {attn} was asked for",
            hint=f"Leave --attn-{label.lower()} out.",
        )
    with _errors_name_side(label):
        if kind != "onnx":  # a graph takes a cache without tokens as an input
            refuse_empty(loaded.inputs)
        tokens = tokens_of(module, loaded.inputs)
        run, returned = _traced(module, loaded.inputs, seed, attn)
    missed = once_a_site([Unpaired(entry.site, 0, entry.formula, entry.reason) for entry in run.not_measured])
    if not run.calls:
        reasons = [entry.reason for entry in run.not_measured] + [entry.reason for entry in run.not_attention]
        raise ModelError(
            f"no attention ran in {label}, {loaded.id}" + (f": {reasons[0]}" if reasons else ""),
            hint="Both sides must have softmax(q . k) v in their forward, in the thread that calls it.",
        )

    sites = frozenset(call.site for call in run.calls)

    def again(listen: bool, patch: Patch | None) -> FinerRun:
        """Runs in float64; a half-precision model without float64 operations runs in float32.

        A model that can't run in a finer dtype runs in its own for the walk over its modules, and gives no reference.
        """
        finer = partial(_finer, loaded, seed=seed, attn=attn, sites=sites if listen else None, patch=patch)
        own: torch.dtype = getattr(torch, run.calls[0].dtype)
        for dtype in (torch.float64, *((torch.float32,) if own in (torch.float16, torch.bfloat16) else ())):
            with suppress(SqrtdkError, RuntimeError, TypeError, ValueError, NotImplementedError):
                return finer(dtype)
        if not listen:
            return FinerRun(own, {}, {})
        return replace(finer(own), inputs={}, outputs={})

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
        framework=module.framework if isinstance(module, ForeignModule) else "",
    )
    return ModelSide(
        info,
        run.tensors,
        missed,
        loaded.inputs,
        tokens,
        outputs=tensors_of(returned),
        again=again,
        declared=_declared_scales(run.calls, module),
        module=module,
    )


def _declared_scales(calls: Sequence[AttentionCall], model: nn.Module) -> dict[str, str]:
    """Return what declares the scale of calls, by `name_of`, if config or family declares it and the run applies it.

    An attribute of a module doesn't count as a declaration: it may be the mistake itself.
    """
    judged = [one for one in judge_all(calls, model) if one.verdict == "declared"]
    declarations = {name_of(one.call): _without_source(one) for one in judged}
    return {name: declaration for name, declaration in declarations.items() if declaration is not None}


def _without_source(judged: JudgedCall) -> str | None:
    """Return a declaration by a config or family without its source; None for an attribute's or a norm's."""
    declared_by = judged.declared_by or ""
    if judged.declared_as == "family" and isinstance(declared_by, Message):
        of, rule = declared_by.values["type"], declared_by.values["rule"]
        return Message("sources.declared.family_alone", type=of, rule=rule)
    text = declared_by.partition(" (")[0]
    return text if text.startswith(("config.", "family ")) else None


def _traced(
    module: nn.Module,
    inputs: Inputs,
    seed: int,
    attn: str | None,
    listener: ModuleListener | None = None,
    *,
    reads: bool = True,
) -> tuple[Trace, Any]:
    """Return the trace of a run and what forward returned; the trace stays empty unless attentions are read."""
    with evaluated(module, attn), ExitStack() as stack:
        torch.manual_seed(seed)
        run = Trace(module, stats=False, numeric=False, keep=True)
        with run if reads else nullcontext():
            if listener is not None:
                stack.enter_context(listener.on(module))
            returned = forward(module, inputs)
    return run, returned


def _finer(
    loaded: LoadedModel,
    dtype: torch.dtype,
    *,
    seed: int,
    attn: str | None,
    sites: frozenset[str] | None,
    patch: Patch | None,
) -> FinerRun:
    """Runs a copy of the model in another dtype; `sites` of attentions ask for records of its modules."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    named = loaded.inputs
    inputs = {name: cast(x) for name, x in named.items()} if isinstance(named, dict) else tuple(map(cast, named))
    copied: dict[int, Any] = {}  # memo of deepcopy: numbers are copied once, into their new dtype
    for tensor in (*loaded.module.parameters(), *loaded.module.buffers()):
        if tensor.is_floating_point() and tensor.dtype != dtype and type(tensor) in (nn.Parameter, Tensor):
            other = tensor.detach().to(dtype)
            kept = type(tensor) is nn.Parameter
            copied[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if kept else other
    twin = copy.deepcopy(loaded.module, copied).to(dtype)
    listener = None if sites is None else ModuleListener(sites, patch)
    # most patched runs serve only the walk over modules
    run, returned = _traced(twin, inputs, seed, attn, listener, reads=patch is None or patch.reads)
    entering = {name_of(call): entering_of(call) for call in run.tensors if call.missing is None}
    exact = FinerRun(dtype, entering, tensors_of(returned), calls=run.tensors if patch is not None else ())
    if listener is None:
        return exact
    return replace(exact, steps=tuple(listener.steps), replaced=frozenset(listener.replaced), listened=True)


def entering_of(call: CallTensors) -> dict[str, Tensor]:
    """Return what enters an attention: "input" (B, L, D), "projected" v and "value" v (B, H, S, Ev), as far as known.

    The first of these that both sides have is compared.
    """
    query, value = call.query, call.value
    known = {
        "input": query.viewed if query.projection is None else query.projection.input,
        "projected": value.projected,
        "value": value.values,
    }
    return {name: tensor for name, tensor in known.items() if tensor is not None}


def _versions() -> dict[str, str]:
    versions = {}
    for name in COMPARED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def side_of_file(path: Path, *, shapes: bool = False) -> ModelSide:
    """Return the side of a trace file, or of those of ranks; with `shapes`, its tensors have shapes but no values."""
    from sqrtdk.recording.ranks import read_files

    file, ranks = read_files(path, shapes=shapes)
    if not file.calls:
        raise InvalidValueError(f"{path} holds no call", hint="Record a model that has attention.")
    info = SideInfo(str(path), TRACE_KIND, calls=len(file.calls), dtype=file.calls[0].dtype)
    inputs: Inputs | None = dict(file.model_inputs) or None
    if inputs and all(name.isdecimal() for name in file.model_inputs):  # inputs recorded by position are a tuple
        inputs = tuple(file.model_inputs[place] for place in sorted(file.model_inputs, key=int))
    return ModelSide(info, file.calls, inputs=inputs, forwards=0, notes=file.notes, cuts=file.cuts, ranks=ranks)


def _of_onnx(path: Path, inputs: Inputs | None, label: str, options: LoadOptions) -> ModelSide:
    """Run an ONNX graph as a module, if its outputs are onnxruntime's."""
    from sqrtdk.graphs.onnx import open_onnx, versions

    if inputs is None:
        raise InvalidValueError(
            f"{label} is an ONNX graph, and no inputs are known",
            hint="Give a model as A, whose inputs are made up, or inputs with --input FILE.safetensors.",
        )
    opened = open_onnx(path, inputs)
    reasons = [*filter(None, (opened.off, *(entry.reason for entry in opened.missing)))]
    why = f": {reasons[0]}" if reasons else ""
    lost = ModelError(f"no attention could be read in {label}, {path}{why}", hint="Give a graph with attention.")
    if opened.off is not None:
        raise lost
    try:
        side = run_module(opened.loaded, None, options.seed, label, "onnx")
    except ModelError as error:
        raise lost from error
    side.missed = once_a_site([*(Unpaired(one.site, 0, None, one.reason) for one in opened.missing), *side.missed])
    side.info = replace(side.info, module_class=opened.producer, versions=versions())
    side.forwards, side.outputs, side.notes = 4, tensors_of(opened.outputs), (*side.notes, *opened.loaded.notes)
    return side
