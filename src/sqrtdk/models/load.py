"""Turns a MODEL argument into a model with inputs; the entry point of `sqrtdk.models`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sqrtdk.errors import INTERRUPTS, InvalidValueError, ModelError, kind_and_text
from sqrtdk.messages import Message, id_of, joined
from sqrtdk.models.adapters import Adapter, base_of, is_adapter, merge_adapter, read_adapter
from sqrtdk.models.alone import alone
from sqrtdk.models.build import AttnRefusedError, build_model, parse_dtype, raise_if_attn_refused
from sqrtdk.models.demo import DemoModel, load_demo
from sqrtdk.models.factory import call_factory
from sqrtdk.models.ggml import load_ggml
from sqrtdk.models.input_file import read_inputs
from sqrtdk.models.inputs import demo_inputs, guess_inputs, make_inputs, move_inputs, without_numbers
from sqrtdk.models.limits import check_seed, check_sizes
from sqrtdk.models.modules import config_of, refuse_odd
from sqrtdk.models.names import calls_factory, ggml_kind, is_demo, locate
from sqrtdk.models.options import ATTN, LoadOptions
from sqrtdk.models.records import AttnBuild, Inputs, LoadedModel
from sqrtdk.models.run import on_cpu_by_default

_LOAD_DEFAULTS = LoadOptions()
_ATTN_IGNORED = "premises.attention.ignored"


@alone()
def resolve_model(
    model: str = "demo", options: LoadOptions = _LOAD_DEFAULTS, inputs: Inputs | None = None
) -> LoadedModel:
    """Find and build a model, in eval mode, with inputs that it accepts.

    Args:
        model: `demo` or `demo:unscaled|twice|inverted`; a local directory or its `config.json`; any other JSON file
            that is a config; `package.module:factory`; a .gguf file, which llama.cpp runs; or a hub id.
        options: How to load it.
        inputs: Inputs to use in place of a factory's, and of those that the options name or make.

    Raises:
        ModelError: The model can't be found, built, or given inputs; the hint says what to do.
        MissingExtraError: transformers or accelerate is needed and missing.
        InvalidValueError: A size is below 1 or beyond all memory, torch lacks the seed, or a device map is given for a
            model that is not a checkpoint.

    Example:
        >>> loaded = resolve_model("demo:unscaled", LoadOptions(seq_len=16))
        >>> loaded.kind, loaded.inputs["input_ids"].shape, loaded.module(**loaded.inputs).shape
        ('demo', torch.Size([1, 16]), torch.Size([1, 16, 256]))
    """
    check_seed(options.seed)
    check_sizes(options.rows, options.seq_len)
    if ggml_kind(model) is not None:
        return load_ggml(model, options, inputs)
    dtype = parse_dtype(options.dtype)
    if options.attn is not None and options.attn not in ATTN:
        raise ModelError(
            Message("errors.options.attn", attn=repr(options.attn)),
            hint=Message("errors.hint.one_of", names=joined(ATTN, "comma")),
        )
    static, device = options.static or options.device == "meta", _check_device(options.device or "cpu")
    is_embedded = is_demo(model)
    is_own = calls_factory(model)
    device_map = options.device_map
    if is_embedded or is_own:
        _refuse_spread(model, device_map=device_map, offload_folder=options.offload_folder)
    # An offload folder without a device map means "auto".
    elif options.offload_folder is not None and device_map is None and not static:
        device_map = "auto"
    notes: tuple[str, ...] = ()
    home: Path | None = None
    ready: Inputs | None = None
    adapter: Adapter | None = None
    module: nn.Module
    config: Any = None
    if is_embedded:
        with on_cpu_by_default():
            kind, module = "demo", load_demo(model)
    elif is_own:
        kind = "factory"
        module, ready = call_factory(model, static=static, seed=options.seed)
        refuse_odd(module)
        # A factory may build its model on meta by itself.
        static = static or without_numbers(module, ready if inputs is None and options.input_file is None else None)
        config = config_of(module)
    else:
        trusted = options.trust_remote_code
        of_adapter = Path(os.path.expanduser(model)) if is_adapter(model) else None
        whole = model if of_adapter is None else str(options.base or base_of(of_adapter))
        kind, home = locate(whole, options.revision, weights=not static, trust_remote_code=trusted)
        if of_adapter is not None and dtype is None:
            dtype = torch.float32  # in the base's bfloat16, merging would round the update away
        with on_cpu_by_default():
            module, config, notes = build_model(
                home,
                static=static,
                dtype=dtype,
                device=device,
                seed=options.seed,
                trust_remote_code=trusted,
                attn=options.attn,
                device_map=device_map,
                offload_folder=options.offload_folder,
            )
            if of_adapter is not None:
                adapter, extra = _adapted(module, of_adapter, whole, static)
                notes += extra
    if home is None:
        module, extra = _settle(module, static, dtype, device, options.attn)
        notes += extra
    if options.revision is not None and kind != "hub":
        notes += (Message("premises.config.revision", revision=options.revision, model=repr(model)),)
    if inputs is not None:
        ready = inputs
    elif options.input_file is not None:
        ready = dict(read_inputs(options.input_file, module, config))
    made = ready is None and options.seq_len is None and options.text is None
    if ready is None:
        with on_cpu_by_default():
            ready, extra = _make(module, config, options, home)
        notes += extra
    name = getattr(config, "_attn_implementation", None)
    return LoadedModel(
        module=module,
        inputs=move_inputs(ready, module),
        id=model,
        kind=kind,
        config=config,
        attn=name if isinstance(name, str) else None,
        notes=notes,
        # The hub's files are in a cache, and not in a directory of the user.
        home=None if kind == "hub" else home,
        made=made,
        adapter=adapter,
    )


def _adapted(module: nn.Module, directory: Path, base: str, static: bool) -> tuple[Adapter | None, tuple[str, ...]]:
    """Merge the adapter of a directory into its base model, and return it with notes."""
    if static:
        return None, (Message("premises.adapter.static", base=repr(base)),)
    adapter = read_adapter(directory, module)
    merge_adapter(adapter, module)
    notes: tuple[str, ...] = (Message("premises.adapter.merged", count=len(adapter.updates), base=repr(base)),)
    if adapter.unknown:
        first = repr(adapter.unknown[0][:200])
        notes += (Message("premises.adapter.unknown", count=len(adapter.unknown), name=first),)
    return adapter, notes


def iter_attn(
    model: str = "demo", options: LoadOptions = _LOAD_DEFAULTS, inputs: Inputs | None = None
) -> Iterator[AttnBuild]:
    """Build a Hugging Face model twice, with eager and then with sdpa attention, from the same weights and inputs.

    A model that supports only one of them yields the other with `loaded` None and the reason. A model without a choice
    of attention (the demo, a user's own module) is yielded once, as "own".

    Args:
        model: See `resolve_model`.
        options: See `resolve_model`; its `attn` is ignored.
        inputs: See `resolve_model`.

    Raises:
        ModelError: The model can't be built either way.
    """
    refused = 0
    for attn in ATTN:
        try:
            loaded = resolve_model(model, replace(options, attn=attn), inputs)
        except AttnRefusedError as error:
            refused += 1
            if refused == len(ATTN):
                raise
            yield AttnBuild(attn, None, error.message)
            continue
        if loaded.attn is None:
            notes = tuple(note for note in loaded.notes if id_of(note) != _ATTN_IGNORED)  # the user did not ask
            reason = Message("premises.attention.no_choice", model=type(loaded.module).__name__)
            yield AttnBuild("own", replace(loaded, notes=notes), reason)
            return
        if loaded.attn != attn:
            yield AttnBuild(attn, None, Message("premises.attention.runs_other", asked=attn, runs=loaded.attn))
            continue
        yield AttnBuild(attn, loaded)
        del loaded  # free its memory before the next one is built


def _refuse_spread(model: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise InvalidValueError(
                Message("errors.options.not_a_checkpoint", name=name, model=repr(model)),
                hint=Message("errors.hint.leave_map_out", name=name.replace("_", "-")),
            )


def _check_device(device: str) -> str:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ModelError(
            Message("errors.options.device", device=repr(device)), hint=Message("errors.hint.devices")
        ) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ModelError(Message("errors.options.no_cuda"), hint=Message("errors.hint.cpu"))
    return "cpu" if kind == "meta" else device


def _settle(
    module: nn.Module, static: bool, dtype: torch.dtype | None, device: str, attn: str | None
) -> tuple[nn.Module, tuple[str, ...]]:
    """Put the user's own module in eval mode, and apply device, dtype and attention."""
    notes: tuple[str, ...] = ()
    try:
        choose = getattr(module, "set_attn_implementation", None)
        if attn is not None and callable(choose):
            choose(attn)
        elif attn is not None:
            notes = (Message(_ATTN_IGNORED, attn=attn, model=type(module).__name__),)
        module = module.to("meta" if static else device, dtype)
        module.eval()  # not chained: a user's own eval() may return None
        return module, notes
    except INTERRUPTS:
        raise
    except BaseException as error:  # a user's module may raise anything
        raise_if_attn_refused(error, attn)
        raise ModelError(
            Message("errors.model.not_prepared", reason=kind_and_text(error)),
            hint=Message("errors.hint.supported"),
        ) from error


def _make(module: nn.Module, config: Any, options: LoadOptions, home: Path | None) -> tuple[Inputs, tuple[str, ...]]:
    rows, seq_len, seed, text = options.rows, options.seq_len, options.seed, options.text
    if isinstance(module, DemoModel):
        return demo_inputs(batch=rows, seq_len=seq_len, text=text)
    if config is not None:
        return make_inputs(module, config, batch=rows, seq_len=seq_len, seed=seed, text=text, directory=home)
    return guess_inputs(module, batch=rows, seq_len=seq_len, seed=seed)
