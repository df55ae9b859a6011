"""`record` runs a model once and writes the tensors of its attentions to a trace file."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._files import check_writable
from sqrtdk._wrappers import hint_for
from sqrtdk.audit.context import tokens_of
from sqrtdk.audit.guard import current, eval_mode, implementation, offers_choice, random_state
from sqrtdk.audit.own_module import as_inputs, from_module, refuse_empty
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError, SqrtdkError
from sqrtdk.messages import Message
from sqrtdk.models.inputs import without_numbers
from sqrtdk.models.limits import check_seed, check_sizes
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import ATTN, LoadOptions
from sqrtdk.models.records import Inputs, LoadedModel
from sqrtdk.models.run import by_default_of
from sqrtdk.models.run import call as forward
from sqrtdk.models.tensor_state import has_memory
from sqrtdk.models.unchanged import unchanged
from sqrtdk.recording.cut import cut_call
from sqrtdk.recording.encode import is_empty
from sqrtdk.recording.format import NAME_BY_DTYPE
from sqrtdk.recording.limits import MAX_NAME_CHARACTERS
from sqrtdk.recording.records import Cut, Recording, Shard, TraceMetadata
from sqrtdk.recording.rings import own_blocks
from sqrtdk.recording.write import check_limits, write_trace_file
from sqrtdk.tracing import Trace
from sqrtdk.tracing.records import NotMeasured
from sqrtdk.tracing.tape.stance import fast_path_off
from sqrtdk.tracing.tensors import CallTensors, Vector

_VERSIONED_PACKAGES = ("sqrtdk", "torch", "transformers", "numpy")


def record(
    model: nn.Module | str,
    inputs: Any = None,
    path: str | Path = "",
    *,
    calls: str = "*",
    rows: int | None = None,
    heads: Sequence[int] | None = None,
    projections: bool = False,
    shard: Shard | None = None,
    force: bool = False,
    announce: Callable[[str], None] = lambda text: None,
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
) -> Recording:
    """Run a model once, in evaluation mode, and write a trace file: q, k, v, output and formula of every attention.

    The file also holds the inputs of the model. docs/en/trace-file.md describes the format and readers in other tools.

    Args:
        model: A module, or a name that `check` accepts.
        inputs: A dict, a tuple or one tensor for forward; None makes up suitable inputs.
        path: The file to write, "run.safetensors".
        calls: Sites to record, as a shell pattern: "layers.0.*".
        rows: Number of query rows to keep of each call, from the first on; all keys stay.
        heads: Keep these query heads, and the key heads that they read.
        projections: Whether to write weights and inputs of the projections of q, k and v too.
        shard: Which rows, keys and heads of all ranks this one has, for a model that runs on several; each rank writes
            a file of its own, and `diff` puts them together. None: one process.
        force: Whether to replace an existing file.
        announce: Called with the file's size before it is written.
        attn: "eager" or "sdpa", for a model that offers the choice.
        text: UTF-8 file for the tokenizer, for a model given by name.
        input_file: safetensors with the inputs, for a model given by name.
        batch: Rows of made-up inputs, default 1.
        seq_len: Tokens in each row of made-up inputs.
        device: Device of a model given by name; a module runs where it is.
        dtype: Dtype of a model given by name; a module keeps its own.
        seed: Seed of random weights, made-up inputs and the run.
        revision: Revision of a hub id.
        trust_remote_code: Whether the model's own Python files may run.
        device_map: "auto" lets accelerate spread a checkpoint over devices.
        offload_folder: Directory for weights that fit on no device.
        base: Base model of an adapter's directory; None takes the directory that the adapter names, or its neighbour.

    Returns:
        A description of the file that was written.

    Raises:
        OutputError: The file exists, can't be written, or does not fit on the disk.
        ModelError: The model can't be built or has no values, its forward raises, or no attention runs in it.
        InvalidValueError: No call matches `calls`, `rows` is below 1, a call lacks a head, or an option does not apply
            to a module.
        InvalidTypeError: `model` or `inputs` has another type.
        UnsupportedError: The module can't be switched to `attn`.
        TraceFileError: The file would be larger than a reader takes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     recording = record("demo", None, f"{folder}/demo.safetensors", seq_len=8, calls="blocks.0.*")
        >>> recording.calls
        1
    """
    options = LoadOptions(
        attn=attn, text=text, input_file=input_file, batch=batch, seq_len=seq_len, device=device, dtype=dtype,
        seed=seed, revision=revision, trust_remote_code=trust_remote_code, device_map=device_map,
        offload_folder=offload_folder, base=base,
    )  # fmt: skip
    return record_with(
        model, inputs, path, options,
        calls=calls, rows=rows, heads=heads, projections=projections, shard=shard, force=force, announce=announce,
    )  # fmt: skip


def record_with(
    model: nn.Module | str,
    inputs: Any,
    path: str | Path,
    options: LoadOptions,
    *,
    calls: str = "*",
    rows: int | None = None,
    heads: Sequence[int] | None = None,
    projections: bool = False,
    shard: Shard | None = None,
    force: bool = False,
    announce: Callable[[str], None] = lambda text: None,
) -> Recording:
    """Run `record` with its loading options in one object.

    `record` documents the arguments, the result and the errors.
    """
    if not str(path):
        raise InvalidValueError("no path to write to", hint="Name a file: run.safetensors.")
    check_writable(path, force)  # before the model is loaded and run
    if shard is not None and (rows is not None or heads is not None):
        raise InvalidValueError(
            "a shard of ranks is written whole, and rows= or heads= cut it", hint="Leave rows and heads out."
        )
    if rows is not None and rows < 1:
        raise InvalidValueError(f"{rows} rows are wanted", hint="Keep at least one.")
    check_seed(options.seed)
    check_sizes(options.rows, options.seq_len)
    loaded = _loaded(model, None if inputs is None else as_inputs(inputs), options)
    with unchanged(model, inputs) as before, by_default_of(loaded.module):
        run, ran = _traced(loaded, options)
        ring = shard is not None and shard.keys is not None
        tensors = own_blocks(run.calls, run.tensors) if ring else run.tensors
        chosen = [call for call in tensors if fnmatchcase(call.site, calls)]
        _refuse_none(loaded, run, calls, chosen)
        notes = list(loaded.notes)
        written: list[CallTensors] = []
        cuts: list[Cut | None] = []
        for call in chosen:
            less, cut = cut_call(_written(call, projections), rows, heads)
            written.append(less)
            cuts.append(cut)
        for call in written:
            if is_empty(call):
                place, reason = f"{call.site}#{call.index}", call.missing or ""
                notes.append(Message("recording.no_tensors", site=place, reason=reason))
        metadata = _metadata(loaded, run, ran)
        for entry in metadata.not_measured:
            place = entry.site or Message("recording.model")
            notes.append(Message("recording.not_measured", site=place, reason=entry.reason))
        recording = write_trace_file(
            path,
            written,
            metadata,
            cuts=cuts,
            shards=None if shard is None else [shard] * len(written),
            model_inputs=_plain_tensors(loaded.inputs, notes),
            projections=projections,
            force=force,
            announce=announce,
        )
    return replace(recording, notes=(*notes, *before.stayed))


def _loaded(model: nn.Module | str, inputs: Inputs | None, options: LoadOptions) -> LoadedModel:
    if isinstance(model, nn.Module):
        loaded = from_module(model, inputs, options)
    elif isinstance(model, str):
        loaded = resolve_model(model, options, inputs)
    else:
        raise InvalidTypeError(
            f"model is a {type(model).__name__}", hint=hint_for(model, "Give a torch.nn.Module or a name.")
        )
    if without_numbers(loaded.module, loaded.inputs):
        raise ModelError(
            f"{loaded.id} is on the meta device, where tensors have no values: there is nothing to record",
            hint="Build it with its weights, or with random ones.",
        )
    return loaded


def _traced(loaded: LoadedModel, options: LoadOptions) -> tuple[Trace, str | None]:
    """Run the model, and return the trace and the attention implementation that the model reports."""
    module = loaded.module
    with ExitStack() as stack:
        stack.enter_context(random_state(module))
        stack.enter_context(eval_mode(module))
        if options.attn in ATTN and offers_choice(module):
            stack.enter_context(implementation(module, options.attn))
        stack.enter_context(fast_path_off())
        torch.manual_seed(options.seed)
        tokens = tokens_of(module, loaded.inputs)
        run = stack.enter_context(Trace(module, stats=False, tokens=tokens.of, values=loaded.masks, keep=True))
        try:
            forward(module, loaded.inputs)
        except ModelError:
            refuse_empty(loaded.inputs)
            raise
        return run, current(module)


def _refuse_none(loaded: LoadedModel, run: Trace, pattern: str, chosen: Sequence[CallTensors]) -> None:
    if chosen:
        return
    if run.tensors:
        sites = list(dict.fromkeys(call.site for call in run.tensors))
        raise InvalidValueError(
            f"no attention ran at {pattern!r}; {len(sites)} sites have one",
            hint=f"They are: {', '.join(sites[:4])}{', ...' if len(sites) > 4 else ''}.",
        )
    refuse_empty(loaded.inputs)
    reasons = [entry.reason for entry in run.not_measured] + [entry.reason for entry in run.not_attention]
    raise ModelError(
        f"no attention could be read in {loaded.id}" + (f": {reasons[0]}" if reasons else ""),
        hint="Give a model with softmax(q . k) v in its forward, run without torch.compile.",
    )


def _written(call: CallTensors, projections: bool) -> CallTensors:
    """Return the call if it can be written, else one without tensors that gives the reason: the others are kept."""
    try:
        check_limits(call, projections=projections)
    except SqrtdkError as error:
        nothing = Vector(torch.zeros(0))
        reason = Message("recording.not_written", error=error.message)
        return replace(
            call, query=nothing, key=nothing, value=nothing, output=nothing.values, terms=None, lse=None, kept=None,
            missing=reason, site=call.site[:MAX_NAME_CHARACTERS],
        )  # fmt: skip
    return call


def _metadata(loaded: LoadedModel, run: Trace, attn: str | None) -> TraceMetadata:
    first = next((p for p in loaded.module.parameters() if p.is_floating_point()), None)
    # a softmax that may have been an attention counts as lost, not as "no attention"
    lost = [NotMeasured(e.site, e.reason, e.formula, e.at) for e in run.not_attention if e.doubtful]
    return TraceMetadata(
        writer=f"sqrtdk {_version('sqrtdk')}",
        model=loaded.id,
        module_class=type(loaded.module).__name__,
        dtype="" if first is None else str(first.dtype).removeprefix("torch."),
        device="cpu" if first is None else str(first.device),
        attn=attn,
        packages={"python": platform.python_version()}
        | {name: version for name in _VERSIONED_PACKAGES if (version := _version(name))},
        not_measured=(*run.not_measured, *lost),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _plain_tensors(inputs: Inputs, notes: list[str]) -> Mapping[str, Tensor]:
    """Return the inputs that the format can hold; the others are noted."""
    named = inputs.items() if isinstance(inputs, dict) else ((str(at), value) for at, value in enumerate(inputs))
    tensors = {}
    for name, value in named:
        if not isinstance(value, Tensor):
            continue
        if (
            value.is_nested
            or value.is_complex()
            or value.layout is not torch.strided
            or value.dtype not in NAME_BY_DTYPE
            or not has_memory(value)
            or len(name) > MAX_NAME_CHARACTERS // 2
        ):
            notes.append(Message("recording.input", name=name))
        else:
            tensors[name] = value
    return tensors
